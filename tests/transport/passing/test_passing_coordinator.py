"""The roles of peers that pass packets on, and how one loses its role; a lone accuser only harms itself."""

from __future__ import annotations

from toy_passing import SIZE, passing_settings

from transport.actions import Outbox, Send
from transport.membership import Roster
from transport.passing import PassingCoordinator
from transport.protocol import messages
from transport.scheduling import Exchange


class Table:
    """A coordinator with five members, of which two can be reached."""

    def __init__(self, mode: str = "always") -> None:
        settings, self.out = passing_settings(own_key="key-of-host", passing=mode), Outbox()
        self.members = Roster(settings, self.out, lambda session: 0, 0.0)
        for name in ("ann", "bob", "cat", "dan", "eve", "host"):
            address = f"{name}:1" if name in ("ann", "bob", "host") else ""
            hello = messages.Hello(
                messages.PROTOCOL, "", settings.run, name, owns=bool(address), address=address
            )
            session = self.members.begin(f"key-of-{name}.{name}".encode(), hello, 0.0)
            session.can_aggregate = bool(address)
        self.session = {s.name: s for s in self.members}
        self.coordinator = PassingCoordinator(settings, self.out, self.members)

    def sources(self) -> dict[str, messages.Sources]:
        """Peer -> what it hears of a committed round."""
        self.out.drain()
        self.coordinator.committed(Exchange(3, 3, {s.id: s.name for s in self.members}, 8, 0.0, 9.0), SIZE)
        sent = [action for action in self.out.drain() if isinstance(action, Send)]
        assert all(isinstance(action.message, messages.Sources) for action in sent)
        return {action.conn.decode().split(".")[1]: action.message for action in sent}  # type: ignore[misc]

    def accuse(self, name: str, helper: str, *, wrong: bool = False) -> None:
        said = messages.SourceFailed(3, helper, wrong, "why")
        self.coordinator.failed(self.session[name], said, 0.0)


def helpers(of: messages.Sources) -> list[str]:
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
        old = table.session["ann"]
        table.members.end(old, "gone", "lost")
        hello = messages.Hello(messages.PROTOCOL, "", "toy-run", "ann", owns=True, address="ann:1")
        table.members.begin(b"key-of-ann.ann", hello, 1.0).can_aggregate = True

        assert ("ann" in helpers(table.sources()["eve"])) is not wrong


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
