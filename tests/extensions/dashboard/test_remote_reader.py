"""A run that lies elsewhere: what its hub answers, again and again, becomes a chronicle."""

import socket
from typing import Any

import pytest
from waiting import until

from cocktail_cli.extensions.dashboard.report_page import idle_of, page_of, words
from cocktail_cli.extensions.dashboard.run_history import RemoteReader
from recipes.config import load_recipe
from transport import RunKeys
from transport.protocol import LinkLost, Unreachable

SLOW_ANN = {
    **{"peer": "ann", "cause": "upload", "evidence": "its update took 3.0 s", "remedy": "see the line"},
    **{"lengthened": 0.5, "since": 4, "round": 5},
}
HUBS_UP = {"line": "the hub's up", "waiting": 0.5, "bytes_per_s": 1000}


def answer(round: int, *peers: tuple[str, int], **changed: Any) -> dict[str, Any]:
    """Build a hub's answer before `round`, from each peer's name and the bytes it has sent."""
    fields = {
        "run": "amber-otter-42",
        "recipe_hash": "abc",
        "parameters": 1_000_000,
        "local_steps": 1,
        "rung": "p 0.113",
        "need": 1.25,
        "state": "running",
        "step": round,
        "max_steps": 20,
        "round": round,
        "loss": 5.0 - round / 4,
        "losses": [[1, 4.75], [2, 4.5]],
        "eval_losses": [[0, 6.0]],
        "eval_loss": None,
        "peers": [
            {
                "name": name,
                "gpu": "A10G",
                "state": "training",
                "share": 0.5,
                "tokens": up,
                "up_bytes": up,
                "down_bytes": 2 * up + 500,
                "fetched_bytes": 500,
                "joined_s": 40.0,
                "rounds": round,
                "left_out": 0,
                "compute_s": 0.3 * round,
                "wait_s": 0.1 * round,
            }
            for name, up in peers
        ],
    }
    return fields | changed


@pytest.fixture
def remote() -> RemoteReader:
    return RemoteReader(str(RunKeys.generate().url("203.0.113.7", 29400, "amber-otter-42")))


def test_rounds_between_two_answers_have_their_bytes(remote: RemoteReader) -> None:
    remote.hear(answer(4, ("ann", 1000), ("bob", 1000)), 101.0)
    remote.hear(answer(6, ("ann", 3000), ("bob", 5000)), 111.0)

    (one,) = remote.known.rounds

    assert (one.round, one.step, one.loss, one.members) == (5, 6, 3.5, ("ann", "bob"))
    assert (one.up, one.down, one.seconds) == (3000, 6000, 5.0)  # two rounds: half of it each
    assert idle_of([one]) == pytest.approx(0.25)
    assert one.ratio == pytest.approx(8_000_000 / 9000)


def test_the_page_says_the_setting_of_rounds_and_why(remote: RemoteReader) -> None:
    remote.hear(answer(4, ("ann", 1000)), 101.0)

    assert "Rounds have p 0.113: an exchange of the recipe's packets takes 1.2 steps' compute." in words(
        remote.known
    )


def test_an_answer_that_says_the_same_adds_nothing(remote: RemoteReader) -> None:
    remote.hear(answer(4, ("ann", 1000)), 101.0)
    before = remote.known
    remote.hear(answer(4, ("ann", 1000)), 103.0)

    assert remote.known == before
    assert before.rounds == ()


def test_who_comes_and_goes_is_seen_from_one_answer_to_the_next(remote: RemoteReader) -> None:
    remote.hear(answer(4, ("ann", 0)), 101.0)
    remote.hear(answer(4, ("bob", 0)), 103.0)
    remote.hear(answer(4, ("ann", 0), ("bob", 0)), 105.0)

    stays = [(stay.peer, stay.joined, stay.left) for stay in remote.known.stays]

    assert stays == [("ann", 61.0, 103.0), ("bob", 63.0, None), ("ann", 65.0, None)]
    assert [one.peer for one in remote.known.contributions] == ["ann", "bob"], "gone or not"


def test_who_was_late_and_what_each_gave_is_known(remote: RemoteReader) -> None:
    remote.hear(answer(4, ("ann", 1000), ("bob", 1000)), 101.0)
    late = answer(5, ("ann", 4000), ("bob", 1000))
    late["peers"][1] |= {"rounds": 4, "left_out": 1}
    remote.hear(late, 103.0)

    told = remote.known

    assert (told.rounds[0].members, told.rounds[0].left_out) == (("ann", "bob"), ("bob",))
    assert [(one.peer, one.part, one.rounds, one.left_out) for one in told.contributions] == [
        ("ann", 0.8, 5, 0),
        ("bob", 0.2, 4, 1),
    ]


def test_the_recipe_is_asked_for_once_and_shown(remote: RemoteReader) -> None:
    recipe = load_recipe("smoke")
    remote.hear(answer(4, ("ann", 0), recipe=recipe.to_json()), 101.0)
    remote.hear(answer(5, ("ann", 9)), 103.0)

    about = remote.known.about

    assert (about.recipe, about.model, about.parameters) == ("smoke", "builtin:tiny-gpt-neox", 1_000_000)
    assert "max_length: 128" in about.recipe_text


def test_the_loss_is_known_from_the_start(remote: RemoteReader) -> None:
    remote.hear(answer(2, ("ann", 0)), 101.0)
    remote.hear(answer(3, ("ann", 0)), 103.0)

    told = remote.known
    assert told.losses == [(1, 4.75), (2, 4.5), (3, 4.25)]
    assert told.evaluations == ((0, 6.0),)


@pytest.mark.parametrize(("last", "said"), [("running", "unreachable"), ("finished", "finished")])
def test_a_hub_that_is_gone_leaves_what_it_said(last: str, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    remote = RemoteReader(str(RunKeys.generate().url("127.0.0.1", port, "amber-otter-42")))
    with pytest.raises(Unreachable):
        remote.look()
    remote.hear(answer(4, ("ann", 1000), state=last), 101.0)

    told = remote.look()

    assert (told.state, told.step) == (said, 4)


def test_it_is_listened_to_whether_anybody_looks_or_not(
    remote: RemoteReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = iter(range(4, 100))
    monkeypatch.setattr("cocktail_cli.extensions.dashboard.run_history.EVERY", 0.01)

    def ask(url: object, *_: object, **__: object) -> dict[str, Any]:
        if url is not remote.url:  # of a reader that an earlier test has left watching
            raise LinkLost("another run")
        return answer(next(told), ("ann", 0))

    monkeypatch.setattr("transport.ask_status", ask)

    remote.watch()
    until(lambda: len(remote.known.rounds) >= 3)

    assert [one.round for one in remote.known.rounds[:3]] == [4, 5, 6]


def test_a_page_of_it_says_what_it_cannot_know(remote: RemoteReader) -> None:
    remote.hear(answer(4, ("ann", 1000)), 101.0)
    remote.hear(answer(5, ("ann", 2000)), 103.0)

    assert "before this page was opened" in str(page_of([remote.known]))


def test_who_slows_the_rounds_is_on_the_page_once_with_cause_and_remedy() -> None:
    remote = RemoteReader(str(RunKeys.generate().url("203.0.113.7", 29400, "amber-otter-42")))
    remote.hear(answer(5, ("ann", 1000), culprits=[SLOW_ANN]), 101.0)
    again = answer(6, ("ann", 2000), culprits=[SLOW_ANN | {"round": 6}], bottleneck=HUBS_UP)
    remote.hear(again, 103.0)

    page = str(page_of([remote.known]))

    assert page.count("its update took 3.0 s") == 2, "in the table, and in words"
    assert "Newest of 1 finding on slow rounds: ann makes rounds 50% longer: upload" in page
    assert "'bottleneck': \"the hub's up\"" in page
    assert "The bottleneck of the newest rounds is the hub's up." in page
