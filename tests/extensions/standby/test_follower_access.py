"""The objects of a standby, asked by it and by others."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from hub_swarm import HubSwarm
from test_object_access import QUIET, Visited, example, hello
from test_takeover import FILE, FollowedWork, standing_by
from toy_swarm import ToyPeer, toy_settings

from cocktail_cli.extensions.standby import hub_process
from cocktail_cli.extensions.standby.bodies import NAME, Follow
from cocktail_cli.extensions.standby.follower import BOUNDS
from cocktail_cli.extensions.standby.hub import Replication
from transport import PeerLink
from transport.peer import PeerIdentity
from transport.protocol import ObjectKind, messages
from transport.transfer import NO_ROW

KINDS = [kind for kind in vars(hub_process).values() if isinstance(kind, ObjectKind)]


def following(running: HubSwarm, name: str, secret: str = "") -> messages.Hello:
    follow = msgspec.msgpack.encode(Follow("127.0.0.1:9", secret))
    return msgspec.structs.replace(hello(running, name), extra={NAME: follow})


@pytest.fixture(scope="module")
def visited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visited]:
    folder: Path = tmp_path_factory.mktemp("objects")
    settings = toy_settings(**(QUIET | {"samples": 10**6}))
    with ExitStack() as stack:
        running = HubSwarm(
            settings, FollowedWork(folder), folder, 0, extend=lambda *of: standing_by(*of, lag=1)
        )
        stack.enter_context(running)
        thread = (peer := ToyPeer(PeerLink(running.url, PeerIdentity("ann")))).start()
        running.until(lambda: running.committed() > 0)
        found = Visited(running, stack)
        found.caller("a member", hello(running, "bob"))
        found.caller("the standby", following(running, "standby", running.keys.stop))
        yield found
        running.hub.stop(now=True)
        thread.join(120)
        assert peer.error is None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.form)
def test_what_a_standby_copies_is_for_its_session_alone(visited: Visited, kind: ObjectKind) -> None:
    name = example(kind)
    answer, payload = visited.callers["the standby"].get(name)

    assert isinstance(answer, messages.Data), answer
    assert payload == FILE or kind.form != "replica/<stamp>/<path>"
    assert visited.callers["a member"].get(name) == (messages.NoObject(name, NO_ROW), b"")
    assert any(name.startswith(prefix) for prefix in BOUNDS)


def test_the_page_lists_the_rows_of_the_code() -> None:
    rows = {(f"`{kind.form}`", kind.largest) for kind in KINDS}
    text = (Path(hub_process.__file__).parent / "README.md").read_text()
    table = text.partition("| object | at most |")[2].partition("\n\n")[0].splitlines()[2:]

    assert {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in table} == rows


def test_what_a_follower_has_is_for_the_session_that_follows_now(visited: Visited) -> None:
    """A standby that another one has replaced is a standby no more, whatever its session still says."""
    (replication,) = visited.running.hub._rounds.extensions
    assert isinstance(replication, Replication)
    replication.session = "another"
    answer, payload = visited.callers["the standby"].get("replica/manifest/2")

    assert isinstance(answer, messages.NoObject)
    assert not payload
