"""The roles of peers that pass packets on, and how one loses its role; a lone accuser only harms itself."""

import msgspec
import pytest
from toy_passing import SIZE, passing_settings

from cocktail_cli.extensions.passing.bodies import NAME, FileHelpers, Newcomer, SourceFailed, Sources
from cocktail_cli.extensions.passing.hub import PassingCoordinator
from transport.actions import CommitDone, Outbox, Send
from transport.hub import HubParts
from transport.ledger import Recovered
from transport.membership import Roster, State
from transport.protocol import ProtocolError, messages
from transport.scheduling import Exchange


class Table:
    """A coordinator with five members, of which two can be reached."""

    def __init__(self, mode: str = "always") -> None:
        settings, self.out = passing_settings(own_key="key-of-host"), Outbox()
        self.members = Roster(settings, self.out, lambda session: 0, 0.0)
        for name in ("ann", "bob", "cat", "dan", "eve", "host"):
            address = f"{name}:1" if name in ("ann", "bob", "host") else ""
            hello = messages.Hello(messages.PROTOCOL, "", settings.run, name, address=address)
            session = self.members.begin(f"key-of-{name}.{name}".encode(), hello, 0.0)
            session.reachable = bool(address)
        self.session = {s.name: s for s in self.members}
        parts = HubParts(settings, self.out, self.members, None, None, "", Recovered())  # type: ignore[arg-type]
        self.coordinator = PassingCoordinator(parts, mode)

    def sources(self) -> dict[str, Sources]:
        """Peer -> what it hears of a committed round."""
        self.out.drain()
        ex = Exchange(3, 3, {s.id: s.name for s in self.members}, 8, 0.0, 9.0)
        self.coordinator.committed(ex, CommitDone(round=3, size=SIZE, packets={"ann": SIZE}), 0.0)
        heard = dict[str, Sources]()
        for action in self.out.drain():
            assert isinstance(action, Send)
            assert isinstance(action.message, messages.Extension)
            assert action.message.name == NAME
            heard[action.conn.decode().split(".")[1]] = msgspec.msgpack.decode(
                action.message.body, type=Sources
            )
        return heard

    def accuse(self, name: str, helper: str, *, wrong: bool = False) -> None:
        said = SourceFailed(helper, wrong, "why")
        self.coordinator.received(self.session[name], msgspec.msgpack.encode(said), 0.0)


def helpers(of: Sources) -> list[str]:
    return sorted(source.name for source in of.sources)


def test_members_hear_of_reachable_peers_but_not_of_the_hosts_machine() -> None:
    """Its peers share the hub's line: what they passed on would go over it again, and they need nobody."""
    said = Table().sources()

    assert sorted(said) == ["ann", "bob", "cat", "dan", "eve"]
    assert all(helpers(of) == ["ann", "bob"] for of in said.values())
    assert sum(s.stop - s.first for s in said["cat"].sources) <= SIZE // said["cat"].chunk
    assert sorted(said["ann"].keys) == ["bob", "cat", "dan", "eve"], "who may fetch from it"
    assert said["cat"].keys == {}


def test_one_accuser_harms_only_itself() -> None:
    table = Table()
    table.accuse("cat", "ann", wrong=True)
    table.accuse("cat", "bob")
    said = table.sources()

    assert "cat" not in said, "it takes all from the hub"
    assert helpers(said["dan"]) == ["ann", "bob"]


def test_a_helper_that_fails_half_of_its_receivers_has_no_role_any_more() -> None:
    table = Table()
    table.accuse("cat", "ann")
    table.accuse("dan", "ann")
    said = table.sources()

    assert all(helpers(of) == ["bob"] for of in said.values())


def test_wrong_bytes_are_remembered_of_a_key_and_a_lost_line_of_a_session() -> None:
    for wrong in (True, False):
        table = Table()
        table.sources()
        for accuser in ("bob", "cat", "dan"):
            table.accuse(accuser, "ann", wrong=wrong)
        table.members.end(table.session["ann"], "gone", "lost")
        hello = messages.Hello(messages.PROTOCOL, "", "toy-run", "ann", address="ann:1")
        table.members.begin(b"key-of-ann.ann", hello, 1.0).reachable = True

        assert ("ann" in helpers(table.sources()["eve"])) is not wrong


def test_a_word_that_cannot_be_read_accuses_nobody() -> None:
    table = Table()
    for body in (b"", b"\xc1", msgspec.msgpack.encode({"source": "ann"})):
        with pytest.raises(ProtocolError):
            table.coordinator.received(table.session["cat"], body, 0.0)

    assert all(helpers(of) == ["ann", "bob"] for of in table.sources().values())


def test_a_newcomer_is_welcomed_with_the_peers_that_have_files_and_named_to_them() -> None:
    """To those that have been ready; who has is named no more."""
    table = Table()
    assert table.coordinator.welcome(table.session["cat"]) == b"", "nobody has been ready"
    for name in ("ann", "bob", "host"):
        table.session[name].state = State.READY
    table.out.drain()
    body = table.coordinator.welcome(table.session["cat"])

    assert [one.name for one in msgspec.msgpack.decode(body, type=FileHelpers).helpers] == ["ann", "bob"]
    told = [action for action in table.out.drain() if isinstance(action, Send)]
    assert [action.conn for action in told] == [table.session[name].conn for name in ("ann", "bob")]
    assert all(
        msgspec.msgpack.decode(action.message.body, type=Newcomer) == Newcomer("cat", "key-of-cat")  # type: ignore[attr-defined]
        for action in told
    )
    assert table.coordinator.welcome(table.session["ann"]) == b""


def test_a_helper_with_a_slow_line_is_none() -> None:
    table = Table()
    table.session["ann"].uplink, table.session["bob"].uplink = 1e5, 1e6

    assert all(helpers(of) == ["bob"] for of in table.sources().values())


def test_by_itself_it_tries_helpers_where_packets_do_not_fit_beside_the_compute() -> None:
    """Peers measure that twice as much fits once others pass packets on."""
    table, heard = Table("auto"), []
    for _ in range(12):
        for session in table.session.values():
            session.fits = SIZE if heard and heard[-1] else SIZE // 2
        heard.append(bool(table.sources()))

    assert not any(heard[:3])
    assert all(heard[4:])
