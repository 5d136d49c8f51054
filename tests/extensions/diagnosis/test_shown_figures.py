"""People and programs see the diagnosis of an honest hub; that of another is cut or refused."""

import json
from dataclasses import asdict
from typing import Any

import pytest
from hostile_words import HOSTILE, WORDS, safe, texts_in
from in_this_process import Run
from lying_host import lying_host

import cocktail_cli
from cocktail_cli.assembly import with_figures
from cocktail_cli.commands.status import screen
from cocktail_cli.extensions.diagnosis import SLOW, SlowRoundsOnPage
from cocktail_cli.extensions.diagnosis.bodies import Culprit
from cocktail_cli.ui import events, from_json, sentence
from transport.protocol import ProtocolError

ANN = {"peer": "ann", "cause": "upload", "evidence": "its update took 3.0 s", "remedy": "see the line"}
SLOW_ANN = ANN | {"lengthened": 0.5, "since": 4, "round": 5}
HUBS_UP = {"line": "the hub's up", "waiting": 0.5, "bytes_per_s": 1000}
SAID = "ann makes rounds 50% longer: upload, its update took 3.0 s. Remedy: see the line"


def test_a_culprit_is_an_event_of_json_and_a_sentence() -> None:
    told = Culprit(**ANN, lengthened=0.5, round=5)
    line = json.loads(events.as_json(told))

    assert line == ANN | {"v": 1, "t": line["t"], "event": "culprit", "lengthened": 0.5, "round": 5}
    assert from_json(line) == told
    assert sentence(told) == SAID
    assert cocktail_cli.events.Culprit is Culprit, "as all events are, from Python"


def test_a_culprit_cannot_be_made_with_text_that_a_terminal_obeys() -> None:
    told = Culprit(**dict.fromkeys(ANN, HOSTILE), lengthened=0.5, round=5)

    assert safe(sentence(told) or "")
    assert all(map(safe, texts_in(json.loads(events.as_json(told)))))


def test_a_status_shows_the_bottleneck_above_the_peers_and_culprits_below_them() -> None:
    peer = {"name": "ann", "gpu": "CPU", "state": "training"}
    found = {"run": "r", "state": "running", "step": 1, "max_steps": 9, "peers": [peer]}

    lines = list(screen(found | {"bottleneck": HUBS_UP, "culprits": [SLOW_ANN]}))

    assert lines[1] == "bottleneck: the hub's up (devices wait 50% of the time for their exchange)"
    assert lines[-2].startswith("ann ")
    assert lines[-1] == SAID


def test_a_status_of_a_hub_that_says_nothing_of_it_has_empty_figures() -> None:
    assert with_figures({"run": "r"}) | {"run": "r", "bottleneck": None, "culprits": []} == with_figures(
        {"run": "r"}
    )


@pytest.mark.parametrize(
    "fields", [{"culprits": [{"peer": 3}]}, {"bottleneck": {"line": "x", "waiting": []}}], ids=str
)
def test_a_figure_of_another_type_is_a_protocol_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="the hub's status cannot be read"):
        with_figures(fields)


@pytest.mark.parametrize("field", ["bottleneck", "culprits"])
@pytest.mark.parametrize("value", ["A\x1b]52;c;cm0gLXJm\x07", [[1]], {"line": 1}, -1e300, 2**120])
def test_a_figure_of_another_kind_is_the_hosts_fault(cocktail: Run, field: str, value: object) -> None:
    with lying_host(status={field: value}) as hub:
        said = cocktail("status", hub.url)

    assert said.exit == 6, said.err
    assert f"`$.{field}" in said.err


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_what_a_hub_says_of_slow_rounds_is_words_on_a_terminal(
    cocktail: Run, options: tuple[str, ...]
) -> None:
    hostile = dict.fromkeys(ANN, WORDS) | {"lengthened": 0.5, "round": 3, "since": 1}
    figures = {"bottleneck": HUBS_UP | {"line": WORDS}, "culprits": [hostile]}
    with lying_host(status=figures) as hub:
        said = cocktail("status", hub.url, *options)

    assert said.exit == 0, said.err
    assert safe(said.out + said.err)
    if options:
        assert all(map(safe, texts_in(json.loads(said.out))))
        assert said.out.isascii()
    else:
        assert "bottleneck: " in said.out
        assert "makes rounds 50% longer" in said.out


def test_a_page_from_events_has_the_last_bottleneck_and_the_newest_culprits_first() -> None:
    part, known = SlowRoundsOnPage(), None
    assert dict(part.show(known).figures) == {"bottleneck": "-"}
    for round in range(SLOW + 9):
        known = part.heard(known, {"event": "step", "bottleneck": f"line {round}"})
        known = part.heard(known, {"event": "culprit"} | SLOW_ANN | {"round": round})
        known = part.heard(known, {"event": "eval"})

    shown = part.show(known)

    assert dict(shown.figures) == {"bottleneck": f"line {SLOW + 8}"}
    ((kind, table),) = shown.sections["Slow rounds"]
    assert kind == "table"
    assert table["rows"][0] == [*ANN.values(), "50%", f"{SLOW + 8}"]
    assert len(known.slow) <= SLOW + 1 if known else False


def test_a_culprit_has_the_fields_of_the_status_but_for_its_first_round() -> None:
    assert asdict(Culprit(**ANN, lengthened=0.5, round=5)) == {
        key: value for key, value in SLOW_ANN.items() if key != "since"
    }
