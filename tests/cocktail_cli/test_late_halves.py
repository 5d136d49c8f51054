"""An extension that a run may never need is imported once it is needed, at a peer and at a hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from in_this_process import Run

from cocktail_cli import assembly
from cocktail_cli.assembly import EXTENSIONS, Extension, HostParts, LatePeer, PeerExtension, Row, recipe_type
from recipes.config import load_resolved
from recipes.errors import RecipeError
from transport.hub import Late
from transport.scheduling import HubExtension


class Half(PeerExtension):
    """Tells what it is called for."""

    name = "half"

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    @contextmanager
    def beside(self, processes: set[int]) -> Iterator[None]:
        self.told.append(processes)
        yield
        self.told.append("over")

    def received(self, body: bytes) -> None:
        self.told.append(body)

    def committed(self, message: Any) -> None:
        self.told.append(message.extra)


def test_a_late_half_of_a_peer_begins_with_the_first_body_for_it_and_runs_beside_the_training() -> None:
    told: list[Any] = []
    among: list[PeerExtension] = []
    late = LatePeer("half", lambda: Half(told), among)
    among += [PeerExtension(), late]
    with late.beside({1}):
        late.committed(SimpleNamespace(extra={"another": b"x"}))  # type: ignore[arg-type]
        assert told == []
        late.received(b"a")
        late.received(b"b")
        among[1].committed(SimpleNamespace(extra={}))  # type: ignore[arg-type]

    assert isinstance(among[1], Half)
    assert told == [{1}, b"a", b"b", {}, "over"]


def test_the_first_body_may_come_with_a_committed_round() -> None:
    told: list[Any] = []
    among: list[PeerExtension] = []
    late = LatePeer("half", lambda: Half(told), among)
    among.append(late)
    late.committed(SimpleNamespace(extra={"half": b"x"}))  # type: ignore[arg-type]

    assert told == [{"half": b"x"}]


class Toy(Extension):
    def hub(self, host: HostParts) -> Any:
        return lambda hub: HubExtension()

    def peer(self, peer: Any) -> PeerExtension:
        return PeerExtension()


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of extensions that were imported, of four that each run has; one cannot begin later."""
    found: list[str] = []
    rows = (
        Row("both", always=True, late=("hub", "peer")),
        Row("fetched", always=True, late=("hub", "peer", "dialled")),
        Row("one", always=True, late=("peer",)),
        Row("now", always=True),
    )
    monkeypatch.setattr(assembly, "EXTENSIONS", rows)
    monkeypatch.setattr(assembly, "extension_of", lambda row: found.append(row.folder) or Toy())
    return found


def host_of(*noted: str, without: tuple[str, ...] = ()) -> HostParts:
    recipe: Any = SimpleNamespace(extensions={}, without=without)
    ledger: Any = SimpleNamespace(noted=lambda name: name if name in noted else "")
    return HostParts(recipe, None, ledger, None)  # type: ignore[arg-type]


def test_a_hub_imports_what_begins_at_once_and_what_its_ledger_has_notes_of(imported: list[str]) -> None:
    extends = assembly.hub_extensions(host_of("both"))

    late = [one for one in extends if isinstance(one, Late)]
    assert imported == ["both", "one", "now"]
    assert [(one.name, one.dialled) for one in late] == [("fetched", True)]
    late[0](None)  # type: ignore[arg-type]
    assert imported[3:] == ["fetched"]


def test_a_recipe_may_do_without_what_each_run_has(imported: list[str]) -> None:
    assert len(assembly.hub_extensions(host_of(without=("now", "one")))) == 2
    assert imported == []


def test_a_peer_imports_what_the_welcome_has_a_body_for_or_what_others_reach(imported: list[str]) -> None:
    parts: Any = SimpleNamespace(
        recipe=SimpleNamespace(extensions={}),
        link=SimpleNamespace(welcome=SimpleNamespace(extra={"both": b"x"})),
        server=None,
    )
    found = assembly.peer_extensions(parts)
    assert imported == ["both", "now"]
    assert [one.name for one in found if isinstance(one, LatePeer)] == ["fetched", "one"]

    parts.server, imported[:] = "a server", []
    assembly.peer_extensions(parts)
    assert imported == ["both", "fetched", "now"]


@pytest.mark.skipif(not any(row.always for row in EXTENSIONS), reason="no extension is of each run")
def test_what_a_recipe_does_without_is_something_that_each_run_has(cocktail: Run) -> None:
    usual = next(row.folder for row in EXTENSIONS if row.always)
    recipe: Any = load_resolved("smoke", [f"without=[{usual}]"], extend=recipe_type).recipe
    with pytest.raises(RecipeError) as refused:
        load_resolved("smoke", ["without=[another]"], extend=recipe_type)

    assert recipe.without == (usual,)
    assert [problem.key for problem in refused.value.problems] == ["without"]
    assert cocktail("validate", "smoke", f"without=[{usual}]").exit == 0
