"""The peer's transport thread, asked what it does at which time; its wire only remembers."""

from __future__ import annotations

from transport.bandwidth import Bandwidth, BothWays
from transport.carrier import CONTROL, Carrier
from transport.messages import Hello, Welcome
from transport.peer_state import PeerState
from transport.wire import Came, Down, Frames, Up


class SilentWire:
    """Takes everything and brings nothing."""

    def __init__(self) -> None:
        self.did: list[tuple[str, int]] = []

    def dial(self, flow: int) -> None:
        self.did.append(("dial", flow))

    def hang_up(self, flow: int) -> None:
        self.did.append(("hang up", flow))

    def poll(self, timeout: float) -> list[Up | Down | Came]:
        return []

    def send(self, flow: int, frames: Frames) -> bool:
        return True

    def wake(self) -> None: ...

    def close(self) -> None: ...


def test_a_link_that_swallows_everything_is_dialled_anew_whole_not_only_its_control_connection() -> None:
    wire, state = SilentWire(), PeerState(Hello(1, "token", "run", "ann"))
    carrier = Carrier(wire, state, 4, 600.0, "hub:1", BothWays(Bandwidth()))
    carrier._flow_up(CONTROL, 0.0)
    state.receive(Welcome(1, "run", "ann", "s1", "{}", "00", [], 0, 1.0), 1.0)
    carrier._flow_up(1, 1.0)
    carrier._flow_up(2, 1.0)
    carrier._keep_up(state.silent_until() - 0.1)
    assert ("hang up", CONTROL) not in wire.did
    wire.did.clear()

    carrier._keep_up(state.silent_until())

    assert wire.did[:3] == [("hang up", 0), ("hang up", 1), ("hang up", 2)]
    assert ("dial", CONTROL) in wire.did
