"""Messages between stages come once, whole and in order, whatever happens to frames, connections and ends."""

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail_cli.extensions.stages.lines import LineLost, StageMessage
from cocktail_cli.extensions.stages.lines.stage_line import (
    FRAGMENT,
    GONE_S,
    PING_S,
    QUIET_S,
    RENEWED,
    WINDOW,
    StageLine,
    State,
    pack,
    unpack,
)
from transport.protocol import ProtocolError

LIMIT = 4 * FRAGMENT
SIZES = (0, 1, 100, FRAGMENT - 20, FRAGMENT, 3 * FRAGMENT)
FAULTS = ("send", "drop", "damage", "twice", "cut", "wait", "restart")


class TwoEnds:
    """Both ends of a line, and a connection that carries their frames in order: a clock of floats."""

    def __init__(self) -> None:
        self.now, self.lives = 0.0, 0
        self.ends = [self.start(0), self.start(1)]
        self.lines: list[deque[list[bytes]]] = [deque(), deque()]  # on their way to each end
        self.wanted: list[list[StageMessage]] = [[], []]  # sent to each end since either began
        self.found: list[list[StageMessage]] = [[], []]
        self.news: list[object] = []
        self.connect()

    def start(self, number: int) -> StageLine:
        self.lives += 1
        return StageLine(b"life%04d" % self.lives, number == 0, LIMIT, self.now)

    def connect(self) -> None:
        for end, line in zip(self.ends, self.lines, strict=True):
            line.clear()
            end.opened(self.now)

    def restart(self, number: int) -> None:
        self.ends[number] = self.start(number)
        self.wanted, self.found = [[], []], [[], []]
        self.connect()

    def send(self, number: int, size: int) -> None:
        kind = ("gradients", "activations")[number]
        body = bytes([len(self.wanted[number]) % 251]) * size
        message = StageMessage(3, kind, len(self.wanted[number]), body)  # type: ignore[arg-type]
        self.wanted[number].append(message)
        self.ends[1 - number].send(message)

    def pump(self, most: int = 10**9) -> None:
        """Move so many frames onto the line."""
        for number, end in enumerate(self.ends):
            for _ in range(most):
                frames = end.next(self.now)
                if frames is None:
                    break
                self.lines[1 - number].append([bytes(frame) for frame in frames])

    def deliver(self, number: int, most: int = 10**9) -> None:
        for _ in range(min(most, len(self.lines[number]))):
            for came in self.ends[number].receive(self.lines[number].popleft(), self.now):
                if isinstance(came, StageMessage):
                    self.found[number].append(came)
                    self.ends[number].took(came)
                else:
                    self.news.append(came)

    def settle(self) -> None:
        """Let all that is under way arrive, and pings show what is lost."""
        for _ in range(12):
            self.now += PING_S
            for _ in range(10):
                self.pump()
                self.deliver(0)
                self.deliver(1)


def greeted() -> TwoEnds:
    both = TwoEnds()
    both.settle()
    return both


def do(both: TwoEnds, fault: str, number: int, size: int) -> None:
    if fault == "send":
        both.send(number, size)
    both.pump(2)
    line = both.lines[number]
    if fault == "drop" and line:
        line.popleft()
    elif fault == "damage" and line:
        frame = bytearray(line[0][-1])
        if frame:
            frame[size % len(frame)] ^= 1 + size % 255
        line[0][-1] = bytes(frame)
    elif fault == "twice" and line:
        line.appendleft(list(line[0]))
    elif fault == "cut":
        for end in both.ends:
            end.closed()
        both.connect()
    elif fault == "wait":
        both.now += PING_S
    elif fault == "restart":
        both.restart(number)
    both.deliver(number, 1 + size % 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 1), st.sampled_from(SIZES)), max_size=40))
def test_every_message_comes_once_whole_and_in_order(steps: Sequence[tuple[str, int, int]]) -> None:
    """Frames are lost, damaged and doubled, connections cut, ends started again: what was sent since the last
    start is there in the end, in order, and at no time anything else."""
    both = greeted()
    for fault, number, size in steps:
        do(both, fault, number, size)
        if fault == "restart":
            both.settle()
            assert both.news[-1] == RENEWED
        for found, wanted in zip(both.found, both.wanted, strict=True):
            assert found == wanted[: len(found)]
    both.settle()
    assert both.found == both.wanted
    restarts = sum(fault == "restart" for fault, _, _ in steps)
    assert both.news == [RENEWED] * restarts


def test_what_was_on_its_way_to_a_stage_that_starts_again_is_not_delivered() -> None:
    """The other end is told, and the new one gets what is sent afterwards."""
    both = greeted()
    both.send(1, 3 * FRAGMENT)
    both.pump(2)
    both.restart(1)
    both.settle()
    assert both.news == [RENEWED]
    assert both.found == [[], []]
    both.send(1, 5)
    both.settle()
    assert both.found == both.wanted


@pytest.mark.parametrize("fault", ["drop", "damage"])
def test_a_lost_frame_costs_itself_and_what_followed(fault: str) -> None:
    """Two of six frames are there before the loss: the other four are sent twice, nothing else."""
    both = greeted()
    both.send(1, 3 * FRAGMENT)
    both.send(1, 2 * FRAGMENT)
    both.pump()
    both.deliver(1, 2)
    do(both, fault, 1, 0)
    both.settle()
    assert both.found == both.wanted
    assert 3 * FRAGMENT < both.ends[0].resent < 4 * FRAGMENT


def test_nothing_is_sent_twice_where_nothing_is_lost() -> None:
    both = greeted()
    for size in SIZES:
        both.send(0, size)
        both.send(1, size)
    both.settle()
    assert both.found == both.wanted
    assert both.ends[0].resent == both.ends[1].resent == 0


def test_the_last_frame_is_missed_at_the_next_ping() -> None:
    """No gap follows it: the sender's State says how far it was."""
    both = greeted()
    both.send(1, 10)
    both.pump()
    both.lines[1].clear()
    both.now += PING_S
    for _ in range(3):
        both.pump()
        both.deliver(1)
        both.deliver(0)
    assert both.found == both.wanted


def test_a_stage_that_computes_lets_no_more_arrive_than_its_room() -> None:
    """Messages that the caller has not taken are no credit: a window and one message wait here at most."""
    both = greeted()
    sender, receiver = both.ends
    for number in range(200):
        sender.send(StageMessage(1, "activations", number, bytes(LIMIT)))
    arrived = list[StageMessage]()
    for _ in range(50):
        both.pump()
        both.deliver(0)
        while both.lines[1]:
            arrived += [
                m for m in receiver.receive(both.lines[1].popleft(), 0.0) if isinstance(m, StageMessage)
            ]
    waiting = sum(len(message.body) for message in arrived)
    assert WINDOW - LIMIT < waiting <= WINDOW + LIMIT
    receiver.took(arrived[0])
    both.pump()
    assert len(both.lines[0]) == 1
    both.deliver(0)
    both.pump()
    assert both.lines[1]


def test_silence_is_noticed_and_said_once() -> None:
    """A connection without a frame is dead after QUIET_S, a neighbour after GONE_S; its next frame revives
    it."""
    both = greeted()
    end = both.ends[0]
    both.now += 0.9 * QUIET_S
    assert not end.is_quiet(both.now)
    both.now += 0.2 * QUIET_S
    assert end.is_quiet(both.now)
    assert end.look(both.now) == []
    both.now += GONE_S
    [gone] = end.look(both.now)
    assert gone == LineLost("has been silent for 14 s")
    assert end.look(both.now + 1) == []
    both.settle()
    assert end.look(both.now) == []
    both.now += 2 * GONE_S
    assert len(end.look(both.now)) == 1


def test_a_neighbour_that_breaks_the_rules_is_named() -> None:
    """A message beyond the limit, one of no kind, and bytes that were never sent."""
    both = greeted()
    both.ends[0].send(StageMessage(1, "activations", 0, bytes(LIMIT + 1)))
    both.pump()
    with pytest.raises(ProtocolError, match="the longest has"):
        both.deliver(1)
    both = greeted()
    lie = State(both.ends[1].life, both.ends[0].life, 10**6, 10**9, 0, False)
    with pytest.raises(ProtocolError, match="1,000,000 bytes are said to be there, 0 were sent"):
        both.ends[0].receive(pack(lie), both.now)


@given(st.lists(st.binary(max_size=40), max_size=3))
def test_bytes_of_strangers_are_no_frame(frames: list[bytes]) -> None:
    assert unpack(frames) is None
