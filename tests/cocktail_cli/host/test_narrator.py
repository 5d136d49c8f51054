"""The hub's events become what users read: honest ratios, sums over the run, no tricks from strangers."""

import pytest

from cocktail_cli.host.narrator import Narrator
from cocktail_cli.ui import events as ours
from transport.protocol import events as theirs


def committed(**changed: object) -> theirs.RoundCommitted:
    fields: dict[str, object] = {
        "at": 0.0,
        "round": 4,
        "step": 4,
        "steps": 80,
        "counted": 64,
        "loss": 3.5,
        "tokens": 1000,
        "members": ("a", "b"),
        "accepted": ("a", "b"),
        "fingerprint": 0xFF,
        "size": 900,
        "packets": {"a": 700, "b": 800},
        "tokens_by_peer": {"a": 500, "b": 500},
        "compute_s": {},
        "wait_s": {},
        "seconds": 0.25,
        "up": {"a": 1000, "b": 2000, "joiner": 50},
        "down": {"a": 4000, "b": 4000, "joiner": 1_000_000},
    }
    return theirs.RoundCommitted(**(fields | changed))  # type: ignore[arg-type]  # a table of keywords


def step_of(event: theirs.RoundCommitted, parameters: int = 1_000_000) -> ours.Step:
    (told,) = Narrator(parameters).tell(event)
    assert isinstance(told, ours.Step)
    return told


def test_a_ratio_is_sixteen_bits_a_parameter_over_the_bytes_of_the_socket() -> None:
    step = step_of(committed())

    assert step.ratio_up == {"a": 2000.0, "b": 1000.0}
    assert step.ratio_down == {"a": 500.0, "b": 500.0}
    assert step.ratio_fp16 == pytest.approx(2 * 2 * 2_000_000 / 11_000, abs=0.01)


def test_fp16_counts_where_packets_move_something_up_at_once_and_down_a_round_later() -> None:
    narrator, ratios = Narrator(1_000_000), []
    for size in (80, 84, 15_000, 15_000):
        (told,) = narrator.tell(committed(size=size))
        ratios.append(told.ratio_fp16)

    assert ratios == pytest.approx([0, 0, 2 * 2_000_000 / 11_000, 2 * 2 * 2_000_000 / 11_000], abs=0.01)


def test_what_a_peer_fetched_before_it_was_ready_is_no_part_of_a_ratio() -> None:
    fetched = {"b": 3000, "joiner": 1_000_000}
    plain = step_of(committed())
    step = step_of(committed(down={"a": 4000, "b": 7000, "joiner": 1_000_000}, fetched=fetched))

    assert (step.ratio_down, step.ratio_fp16) == (plain.ratio_down, plain.ratio_fp16)
    assert (step.down_bytes["b"], step.fetched_bytes) == (7000, fetched)


def test_with_local_steps_a_ratio_and_seconds_are_of_a_step() -> None:
    plain = step_of(committed())
    (told,) = Narrator(1_000_000).tell(committed(local_steps=5))

    assert isinstance(told, ours.Step)
    assert told.ratio_up == {name: 5 * ratio for name, ratio in plain.ratio_up.items()}
    assert told.ratio_fp16 == pytest.approx(5 * plain.ratio_fp16, abs=0.05)
    assert (told.step_s, told.local_steps) == (plain.step_s / 5, 5)


def test_a_run_that_changes_its_rung_says_so_with_the_reason_and_the_seconds_are_still_of_a_step() -> None:
    """A round's members report the compute of the round before it."""
    narrator = Narrator(1_000_000)
    rounds = [(4, 1, 2.0), (5, 2, 2.0), (6, 2, 4.0)]
    told = [
        line
        for round, steps, compute_s in rounds
        for line in narrator.tell(
            committed(
                round=round, local_steps=steps, rung=f"{steps} steps", need=27.1, compute_s={"a": compute_s}
            )
        )
    ]

    assert [line.state for line in told if isinstance(line, ours.Progressed)] == [
        "from round 5 on, with 2 peers, 2 steps: "
        "an exchange of the recipe's packets takes 27.1 steps' compute"
    ]
    steps = [line for line in told if isinstance(line, ours.Step)]
    assert [step.compute_s["a"] for step in steps] == [2.0, 2.0, 2.0]
    assert [step.local_steps for step in steps] == [1, 2, 2]


def test_a_step_tells_the_rate_of_its_schedule_and_the_norm_of_its_round() -> None:
    narrator = Narrator(1_000_000)
    narrator.rate_at = lambda step: 1e-3 * step
    (told,) = narrator.tell(committed(norm=0.7))
    (drained,) = narrator.tell(committed(loss=None))

    assert isinstance(told, ours.Step)
    assert isinstance(drained, ours.Step)
    assert (told.lr, told.grad_norm, told.samples) == (pytest.approx(3e-3), 0.7, 64)
    assert (drained.lr, drained.grad_norm) == (None, None)


def test_a_joiners_bytes_are_told_but_are_no_members_ratio() -> None:
    step = step_of(committed())

    assert step.down_bytes["joiner"] == 1_000_000
    assert "joiner" not in step.ratio_down


def test_a_fingerprint_is_sixteen_hex_digits() -> None:
    assert step_of(committed()).fingerprint == "00000000000000ff"


def test_the_narrator_remembers_what_the_end_needs() -> None:
    narrator = Narrator(1)
    for event in (
        theirs.PeerJoined(0.0, "a", "CPU", 0),
        theirs.PeerJoined(0.0, "b", "CPU", 0),
        committed(tokens=10),
        committed(tokens=20),
        theirs.EvaluationDone(0.0, 4, 4, 2.5, 100, True),
        theirs.PeerLeft(0.0, "a", "left"),
    ):
        list(narrator.tell(event))

    assert (narrator.tokens, narrator.rounds, narrator.step, narrator.eval_loss) == (30, 2, 4, 2.5)
    assert narrator.present == {"b"}


def test_a_strangers_words_cannot_move_the_cursor() -> None:
    (told,) = Narrator(1).tell(theirs.PeerJoined(0.0, "evil\x1b[2J\r\n", "x" * 500, 0))

    assert isinstance(told, ours.PeerJoined)
    assert told.peer == "evil?[2J  "
    assert len(told.hardware) == 128


def test_the_first_peer_from_another_machine_confirms_the_address_and_one_from_further_away_again() -> None:
    narrator, reached = Narrator(1), []
    for peer, origin in (("a", "127.0.0.1"), ("b", "192.168.1.7"), ("c", "8.8.8.8"), ("d", "192.168.1.8")):
        told = narrator.tell(theirs.PeerJoined(0.0, peer, "CPU", 0, origin))
        reached += [event for event in told if isinstance(event, ours.Reached)]

    assert reached == [ours.Reached("b", "this network"), ours.Reached("c", "the internet")]


def test_what_extensions_tell_is_shown_as_it_is_and_their_fields_are_in_the_step() -> None:
    event = ours.OfExtension()

    assert list(Narrator(1).tell(theirs.OfExtension(0.0, event))) == [event]
    assert step_of(committed(extra={"hottest": 71})).extra == {"hottest": 71}
