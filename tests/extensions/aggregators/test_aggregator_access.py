"""The objects of aggregators, asked by members and by others."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_object_access import QUIET, Visited, example, meet
from toy_aggregators import ShardedSwarm, ShardedWork, reachable, sharded_settings

from cocktail_cli.extensions.aggregators import hub as hub_part
from cocktail_cli.extensions.aggregators.peer import BOUNDS
from transport.protocol import ObjectKind, messages
from transport.transfer import NO_ROW

KINDS = [kind for kind in vars(hub_part).values() if isinstance(kind, ObjectKind)]


@pytest.fixture(scope="module")
def visited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visited]:
    folder: Path = tmp_path_factory.mktemp("objects")
    with ExitStack() as stack:
        running = ShardedSwarm(sharded_settings(**(QUIET | {"samples": 10**6})), ShardedWork(), folder, 0)
        stack.enter_context(running)
        peer = reachable(running.url, "ann")
        thread = peer.start()
        running.until(lambda: running.committed() > 0)
        found = Visited(running, stack)
        meet(found)
        yield found
        running.hub.stop(now=True)
        thread.join(120)
        peer.shut()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.form)
def test_what_members_fetch_is_for_sessions_of_the_run(visited: Visited, kind: ObjectKind) -> None:
    """A member that aggregates nothing gets nothing of others either."""
    name = example(kind)
    for who, caller in visited.callers.items():
        answer, payload = caller.get(name)
        if who in ("a member", "a guest"):  # this hub knows no guests: it is a member too
            assert isinstance(answer, messages.NoObject)
            assert answer != messages.NoObject(name, NO_ROW)
        else:
            assert isinstance(answer, messages.Refused), f"{who}: {answer}"
        assert payload == b""
    assert any(name.startswith(prefix) for prefix in BOUNDS)


def test_the_page_lists_the_rows_of_the_code() -> None:
    rows = {(f"`{kind.form}`", kind.largest) for kind in KINDS}
    text = (Path(hub_part.__file__).parent / "README.md").read_text()
    table = text.partition("| object | at most |")[2].partition("\n\n")[0].splitlines()[2:]

    assert {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in table} == rows
