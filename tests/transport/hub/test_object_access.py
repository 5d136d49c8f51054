"""Every name of an object, asked by everybody who can reach the hub's port: who may not have it gets
nothing."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hub_swarm import HubSwarm
from msgspec import structs
from toy_extension import Health
from toy_swarm import ToyPeer, ToyWork, toy_settings

from transport import PeerLink, ask_admin, parse_url
from transport.hub import HubParts
from transport.peer import BOUNDS, PeerIdentity
from transport.peer.connection_manager import bound_of
from transport.protocol import CurveKeys, ObjectKind, RunKeys, decode_to_peer, encode, messages
from transport.scheduling import HubExtension
from transport.transfer import NO_ROW, object_store
from transport.wire import Connected, DealerWire, Received, routes_to

QUIET = {"ping_s": 1000.0, "peer_timeout": 3000.0, "grace_s": 100.0, "linger_s": 0.1, "start_timeout": 1e4}
WITH_AN_EXTENSION = "with an extension"
HUBS: dict[str, dict[str, object]] = {
    "that evaluates": {"eval": True},
    WITH_AN_EXTENSION: {},
}
NAMED = {  # what stands for a part of a name -> an example
    "<round>": "0",
    "<a>": "0",
    "<b>": "1",
    "<link>": "0",
    "<number>": "1",
    "<stamp>": str(10**18),
    "<file>": "config.json",
    "<peer>": "ann",
    "<object>": "base/config.json",
    "<path>": "tokenizer/t.json",
}
SAID = {  # what a fetched object is, where this toy knows it
    "base/<file>": b"a config",
    "eval": b"texts to evaluate",
    "hashes/<object>": b"hashes",
    "note/<round>": b"a note 0",
}
# nothing of these is there in this toy
EMPTY = {"snapshot/<round>/model.safetensors", "lease/<round>"}


class Guests(HubExtension):
    """Sessions that train nothing."""

    name, role = "guests", "guest"

    def __init__(self, hub: HubParts) -> None:
        self.members = hub.members

    def admits(self, conn: bytes, body: bytes) -> bool:
        return True


class Caller:
    """A connection to a hub, with a key of its own."""

    def __init__(self, running: HubSwarm, keys: CurveKeys | None = None) -> None:
        url = parse_url(running.url) if isinstance(running.url, str) else running.url
        self._wire = DealerWire(routes_to(url), url.key, keys)
        self._wire.dial(0)
        self._until(lambda event: isinstance(event, Connected))

    def _until(self, wanted: Callable[[object], bool], seconds: float = 120.0) -> object:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for event in self._wire.poll(left):
                if wanted(event):
                    return event
        raise AssertionError("no answer")

    def ask(self, message: messages.Message) -> tuple[messages.Message, bytes]:
        """Return the answer: what is no news of the run, and its payload."""
        self._wire.send(0, [encode(message)])

        def answers(event: object) -> bool:
            return isinstance(event, Received) and isinstance(
                decode_to_peer(event.frames[0]),
                messages.Welcome | messages.Refused | messages.Data | messages.NoObject | messages.Over,
            )

        event = self._until(answers)
        assert isinstance(event, Received)
        return decode_to_peer(event.frames[0]), bytes(event.frames[1]) if len(event.frames) > 1 else b""

    def get(self, name: str) -> tuple[messages.Message, bytes]:
        return self.ask(messages.Get(name, 0, 1 << 18))

    def hears(self, message: messages.Message) -> bool:
        """Send a message; tell whether anything comes back."""
        self._wire.send(0, [encode(message)])
        end = time.monotonic() + 0.1
        while (left := end - time.monotonic()) > 0:
            if any(isinstance(event, Received) for event in self._wire.poll(left)):
                return True
        return False

    def close(self) -> None:
        self._wire.close()


def hello(running: HubSwarm, name: str, **changes: str) -> messages.Hello:
    fields = {"token": running.keys.token, "run": running.settings.run} | changes
    return messages.Hello(messages.PROTOCOL, name=name, **fields)


@dataclass
class Visited:
    """A hub that has committed rounds, and callers by who they are."""

    running: HubSwarm
    stack: ExitStack
    callers: dict[str, Caller] = field(default_factory=dict)

    def caller(self, who: str, greeting: messages.Message | None, keys: CurveKeys | None = None) -> Caller:
        """Connect; greet, and be welcome."""
        caller = self.callers[who] = Caller(self.running, keys)
        self.stack.callback(caller.close)
        if greeting is not None:
            answer, _ = caller.ask(greeting)
            assert isinstance(answer, messages.Welcome), answer
        return caller


@pytest.fixture(scope="module", params=HUBS)
def visited(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visited]:
    folder: Path = tmp_path_factory.mktemp("objects")
    (folder / "run").mkdir()
    work = ToyWork()
    work.objects |= {"base/config.json": b"a config", "eval": b"texts to evaluate"}
    work.objects["hashes/base/config.json"] = b"hashes"
    settings = toy_settings(**(QUIET | HUBS[request.param] | {"samples": 10**6}))
    with ExitStack() as stack:
        extensions = [Guests, *([Health] if request.param == WITH_AN_EXTENSION else [])]
        running = HubSwarm(settings, work, folder / "run", 0, extend=lambda keys, ledger: extensions)
        stack.enter_context(running)
        peer = ToyPeer(PeerLink(running.url, PeerIdentity("ann")))
        thread = peer.start()
        running.until(lambda: running.committed() > 0)
        found = Visited(running, stack)
        meet(found)
        yield found
        running.hub.stop(now=True)
        thread.join(120)


def meet(found: Visited) -> None:
    """Let everybody come: each proves first that it is who it says."""
    running = found.running
    found.caller("a stranger", None)
    found.caller("a member", hello(running, "bob"))
    left = found.caller("one who left", hello(running, "cem"))
    answer, _ = left.ask(messages.Leave("done"))
    assert isinstance(answer, messages.Over)
    banned = found.caller("a banned one", hello(running, "dan"))
    ask_admin(running.url, running.keys.stop, "ban", peer="dan")
    answer, _ = banned.get("base/config.json")
    assert isinstance(answer, messages.Refused), answer
    elsewhere = found.caller("a member of another run", None)
    answer, _ = elsewhere.ask(hello(running, "eve", run="another", token=RunKeys.generate().token))
    assert isinstance(answer, messages.Refused)
    guest = structs.replace(hello(running, "fay"), extra={Guests.name: b"may I?"})
    found.caller("a guest", guest)


ROLES = {"a member": "peer", "a guest": "guest"}


def example(kind: ObjectKind) -> str:
    return re.sub("<[a-z]+>", lambda place: NAMED[place[0]], kind.form)


def test_every_name_is_for_its_readers_and_for_nobody_else(visited: Visited) -> None:
    kinds = visited.running.hub._objects.kinds
    assert len(kinds) >= 7
    given = set()
    for who, caller in visited.callers.items():
        for kind in kinds:
            answer, payload = caller.get(example(kind))
            told = f"{who} asks for {kind.form}: {answer}"
            if who in ROLES and ROLES[who] in (kind.readers or ROLES.values()):
                assert isinstance(answer, messages.Data | messages.NoObject), told
                assert answer != messages.NoObject(example(kind), NO_ROW), told
                assert isinstance(answer, messages.Data) or kind.form in EMPTY, told
                if kind.form in SAID:
                    assert payload == SAID[kind.form], told
                given |= {kind.form} if isinstance(answer, messages.Data) else set()
            elif who in ROLES:
                assert (answer, payload) == (messages.NoObject(example(kind), NO_ROW), b""), told
            else:
                assert isinstance(answer, messages.Refused), told
                assert payload == b"", told
    assert given >= {"packet/<round>", "packets/<a>-<b>", "base/<file>"}


def test_names_without_an_object_leave_nothing_behind_and_those_without_a_row_end_their_session(
    visited: Visited,
) -> None:
    store = visited.running.hub._objects
    caller = visited.caller("one who guesses", hello(visited.running, "gus"))
    guessed = [f"base/guess-{n}" for n in range(40)] + [f"hashes/base/guess-{n}" for n in range(40)]
    guessed += [f"guess-{n}/0" for n in range(8)] + [f"packet/{n}" for n in range(777, 780)]
    for name in guessed:
        answer, _ = caller.get(name)
        assert isinstance(answer, messages.NoObject)
    caller.get("base/config.json")
    kept = str([[*table] for table in vars(store).values() if isinstance(table, dict)])
    assert "base/config.json" in kept, "what was there is remembered"
    assert "guess" not in kept
    assert "packet/777" not in kept
    assert sum(caller.hears(messages.Get(f"guess-{n}/0", 0, 1)) for n in range(16)) < 8, "it is hung up on"


def all_kinds() -> set[ObjectKind]:
    """The rows of all hubs."""
    return {kind for kind in vars(object_store).values() if isinstance(kind, ObjectKind)}


def test_who_fetches_an_object_knows_how_long_it_may_be() -> None:
    names = {example(kind) for kind in all_kinds()}

    assert all(bound_of(name) for name in names)
    assert [prefix for prefix in BOUNDS if not any(name.startswith(prefix) for name in names)] == []


def test_the_protocol_lists_the_rows_of_the_code() -> None:
    rows = {
        (f"`{kind.form}`", ", ".join(kind.readers) or "all", kind.largest, kind.cost.name.lower())
        for kind in all_kinds()
    }
    text = (Path(__file__).parents[3] / "transport/PROTOCOL.md").read_text()
    table = text.partition("| object | readers |")[2].partition("\n\n")[0].splitlines()[2:]
    listed = {tuple(cell.strip() for cell in line.split("|")[1:5]) for line in table}
    assert listed == rows, json.dumps(sorted(rows ^ listed), indent=1)
