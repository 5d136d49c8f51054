"""A visit asks a real hub over a real socket, is seen as deciding, and leaves no trace behind."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_swarm import HubSwarm
from toy_swarm import ToyWork, toy_settings
from waiting import until

from transport import PeerLink, RunKeys, RunURL, ask_status
from transport.peer import PeerIdentity, RunVisit
from transport.peer.hub_questions import preview_of
from transport.protocol import CurveKeys, ProtocolError, RefusedByHub, Unreachable


@pytest.fixture
def url(tmp_path: Path) -> Iterator[RunURL]:
    with HubSwarm(toy_settings(min_peers=9), ToyWork(), tmp_path, 0) as swarm:
        yield swarm.url


def states(url: RunURL) -> dict[str, str]:
    found = ask_status(url)
    return {peer["name"]: peer["state"] for peer in found["peers"] + found["others"]}


def test_a_visitor_reads_what_hello_would_be_answered_and_then_joins_under_its_name(url: RunURL) -> None:
    me = PeerIdentity("ann", keys=CurveKeys.generate())
    visit = RunVisit(url, me)
    preview = visit.look(5.0)
    assert states(url) == {}, "only one who decides is seen"
    visit.decide()
    until(lambda: states(url) == {"ann": "deciding"})
    link = PeerLink(url, me)
    welcome = link.connect(5.0)
    visit.end(declined=False)

    assert states(url) == {"ann": "syncing"}
    for field in ("run", "recipe", "recipe_hash", "base", "round", "log_bytes", "snapshots"):
        assert getattr(preview.welcome, field) == getattr(welcome, field), field
    link.close()


def test_a_visitor_who_declines_is_gone(url: RunURL) -> None:
    visit = RunVisit(url, PeerIdentity("ann"))
    visit.look(5.0)
    visit.decide()
    until(lambda: states(url) == {"ann": "deciding"})
    visit.end(declined=True)

    assert states(url) == {}


def test_a_visitor_without_the_token_is_refused(url: RunURL) -> None:
    stranger = RunURL(url.key, RunKeys.new_token(), url.host, url.port, url.run)
    visit = RunVisit(stranger, PeerIdentity("ann"))
    with pytest.raises(RefusedByHub, match="token"):
        visit.look(5.0)
    visit.end(declined=True)


def test_a_hub_that_does_not_listen_is_unreachable(url: RunURL) -> None:
    away = RunURL(url.key, url.token, "127.0.0.1", 1, url.run)
    visit = RunVisit(away, PeerIdentity("ann"))
    with pytest.raises(Unreachable):
        visit.look(0.0)
    visit.end(declined=True)


@pytest.mark.slow
@pytest.mark.parametrize(("waits", "patience"), [(False, 600.0), (True, 2.5)])
def test_a_hub_with_another_key_is_asked_again_where_somebody_waits(
    url: RunURL, waits: bool, patience: float
) -> None:
    """A proxy answers while the hub behind it is started anew."""
    other = RunURL(RunKeys.generate().pair.public, url.token, url.host, url.port, url.run)
    visit, began = RunVisit(other, PeerIdentity("ann")), time.monotonic()
    with pytest.raises(Unreachable) as raised:
        visit.look(patience, waits)
    visit.end(declined=True)

    assert raised.value.layer == "key"
    assert time.monotonic() - began >= patience or not waits


def test_a_status_without_the_parts_of_a_welcome_is_no_preview() -> None:
    with pytest.raises(ProtocolError, match="not one for joiners"):
        preview_of({"run": "toy-run", "round": 3})
