"""Others' words about stages: hostile bytes are refused, hostile texts are safe to show."""

import pytest
from hostile_bytes import MSGPACK
from hostile_words import HOSTILE as WORDS
from hostile_words import safe, texts_in

from cocktail_cli.assembly import with_figures
from cocktail_cli.extensions.stages import extension
from cocktail_cli.extensions.stages.bodies import Lends, Placed, Probed
from cocktail_cli.extensions.stages.compute.ring_request import request_of
from cocktail_cli.extensions.stages.compute.stage_worker import activations_of
from cocktail_cli.extensions.stages.events import Stages
from cocktail_cli.extensions.stages.lines import StageMessage, line_probe, stage_line
from compress import PacketError
from transport.protocol import ProtocolError, read_msgpack

RINGS = [[{"name": WORDS, "layers": [0, 2]}, {"name": None, "layers": [2, 4]}]]


@pytest.mark.parametrize("name", MSGPACK)
def test_hostile_msgpack_is_no_frame_of_a_stage_and_no_body(name: str) -> None:
    data = MSGPACK[name]

    for read in (activations_of, lambda data: request_of(StageMessage(0, "request", 0, data))):
        with pytest.raises(PacketError):
            read(data)
    assert stage_line.unpack([stage_line._digest(data, b"") + data]) is None
    assert line_probe.unpack([data, b""], line_probe.Ping) == (None, 0)
    for kind in (Lends, Placed, Probed):
        with pytest.raises(ProtocolError):
            read_msgpack(data, kind, "a body")


def test_a_status_of_another_type_is_a_protocol_error_and_one_without_rings_has_none() -> None:
    with pytest.raises(ProtocolError, match="the hub's status cannot be read"):
        with_figures({"stages": {"rings": [[{"name": "a", "layers": [1]}]]}})
    assert with_figures({})["stages"] is None
    [line, waits] = extension.above_peers({"stages": {"rings": RINGS[:1], "waiting": ["bob"]}})
    assert line.endswith("(layers 0 to 1), nobody (layers 2 to 3)")
    assert waits == "waiting for a place: bob"


def test_hostile_names_are_safe_to_show() -> None:
    event = Stages(RINGS, [WORDS])

    assert all(map(safe, texts_in(vars(event))))
    assert "\n" not in event.sentence()
    known = extension.page().heard(None, {"event": "stages", **vars(event)})
    assert len(extension.page().show(known).words) == 2
    assert not extension.page().show(extension.page().heard(known, {"event": "run_finished"})).words
