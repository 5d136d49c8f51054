"""scripts/fuzz in short: whatever arrives is taken and well formed, or refused by its own error."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from random import Random

import pytest
from transport_targets import HUB_BYTES, PEER_BYTES, hear, joined_connections, open_hub

from scripts.fuzzing.fuzz import Tally, TooMuch, case_of, fuzz, keep, replay, targets, try_case
from scripts.fuzzing.mutate import Target, message
from transport.protocol import encode, messages
from transport.wire import Received, TokenBuckets

CASES = {"messages": 40_000, "bulk": 1_000, "packets": 3_500, "legacy": 300, "files": 1_500, "ways": 500}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # what earlier tests have left open is collected here
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("group", CASES)
def test_what_a_stranger_sends_is_sound_or_refused_in_bounded_memory(group: str, tmp_path: Path) -> None:
    if not (chosen := targets([group])):
        pytest.skip("its extension is not here")
    out = fuzz(chosen, CASES[group], 1, tmp_path)

    assert not out.findings, "\n".join(out.findings)
    assert sum(t.cases for t in out.tallies.values()) > CASES[group] - len(out.tallies)
    for name, tally in out.tallies.items():
        assert tally.taken < tally.cases, f"{name} refuses nothing"
        assert tally.taken or name == "kept", f"{name} takes nothing: its cases get nowhere"


def test_a_case_leaves_no_thread(tmp_path: Path) -> None:
    (hub,) = [target for target in targets() if target.name == "hub"]
    before = threading.active_count()
    assert fuzz([hub], 4, 1, tmp_path).tallies["hub"].cases == 4
    assert threading.active_count() == before


@pytest.mark.slow
def test_the_script_finds_its_targets_without_pytest(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.fuzzing.fuzz", "--cases", "60", "--folder", str(tmp_path)]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)

    assert ran.returncode == 0, ran.stdout + ran.stderr


def sizes(thing: object, seen: set[int], depth: int = 0) -> Iterator[int]:
    """The length of every table that is held by an object of ours, and by what it holds."""
    if id(thing) in seen or depth > 6:
        return
    seen.add(id(thing))
    if isinstance(thing, Sized) and not isinstance(thing, str | bytes):
        yield len(thing)
        inner = (
            list(thing.values())
            if isinstance(thing, dict)
            else list(thing)
            if isinstance(thing, list)
            else []
        )
    else:
        ours = type(thing).__module__.startswith("transport")
        inner = list(getattr(thing, "__dict__", {}).values()) if ours else []
    for each in inner:
        yield from sizes(each, seen, depth + 1)


def growth(start: object, hear_one: Callable[[int], None]) -> int:
    """Measure how all tables grow in 10,000 hostile messages, after the first 2,000."""
    for number in range(2_000):
        hear_one(number)
    before = sum(sizes(start, set()))
    for number in range(2_000, 12_000):
        hear_one(number)
    return sum(sizes(start, set())) - before


@pytest.mark.slow
def test_a_hub_that_hears_ten_thousand_hostile_messages_does_not_grow() -> None:
    hub, rng = open_hub(), Random(1)
    unlimited = TokenBuckets(1e9, 1e9)  # so that all of them are heard
    hub._connections._said = hub._state.admission._hellos = unlimited

    def one(number: int) -> None:
        fresh = message(rng, HUB_BYTES) if rng.random() < 0.7 else rng.choice(HUB_BYTES)
        hear(hub, number % 9, fresh)
        hub._wire.said.clear()  # type: ignore[attr-defined]  # what was told is the owner's
        while not hub._events.empty():
            hub._events.get()

    assert growth(hub, one) < 200
    assert hub.error is None


@pytest.mark.slow
def test_a_peer_that_hears_ten_thousand_hostile_messages_does_not_grow() -> None:
    connections, rng = joined_connections(), Random(1)

    def one(number: int) -> None:
        fresh = message(rng, PEER_BYTES)
        connections._take(Received(number & 1, [fresh, b""]), 0.001 * number)
        connections._send_all()
        if b"Refused" in fresh or b"Over" in fresh:  # else nothing more would mean anything
            connections.state.link = type(connections.state.link).JOINED

    assert growth(connections, one) < 9_000, "it remembers 4,096 rounds and as many leases, and no more"
    assert connections.broken is None


def test_an_evaluation_over_no_tokens_is_no_number_and_a_large_one_fits_the_ledger() -> None:
    for tokens, loss in ((0, None), (2**40, 0.0)):
        hub = open_hub()
        for member in (0, 1):
            hear(hub, member, encode(messages.Evaluated(1, 0, 0.0, tokens)))

        assert hub._state.rounds.evaluations.now is None, "two say the same of its part"
        assert (hub._state.rounds.history.eval_loss, hub.error) == (loss, None)


# ---- the fuzzer finds what it is for -----------------------------------------------------------------------


def door(check: Callable[[bytes], bool]) -> Target:
    return Target("to-hub", "messages", 1, lambda rng: rng.randbytes(4), check, most=1 << 16)


def test_a_finding_is_kept_to_be_replayed_and_a_case_follows_from_its_number(tmp_path: Path) -> None:
    broken = door(lambda case: bool({}[case]))
    out = fuzz([broken], 3, 7, tmp_path)

    assert len(out.findings) == 3
    assert "to-hub case 0 of seed 7" in out.findings[0]
    assert "KeyError" in out.findings[0]
    name, case = (tmp_path / "to-hub-7-2.hex").read_text().split()
    assert (name, bytes.fromhex(case)) == ("to-hub", case_of(broken, 7, 2))


def test_a_case_that_takes_too_much_memory_is_a_finding() -> None:
    with pytest.raises(TooMuch, match="at most 65,536"):
        try_case(door(lambda case: bool(bytearray(1 << 20))), b"four", Tally(), measure=True)


def test_a_case_without_an_end_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.fuzzing.fuzz.ENDLESS", 0.05)
    out = fuzz([door(lambda case: all(1 for _ in iter(int, 1)))], 1, 1, tmp_path)

    assert "no end after" in out.findings[0]


def test_a_kept_case_is_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay(keep(tmp_path, door(lambda case: True), 1, 1, b"\x81" * 9))

    assert capsys.readouterr().out.startswith("ok     to-hub: refused")
