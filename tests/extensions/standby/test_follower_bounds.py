"""A hub that lies to its standby about sizes: nothing is kept."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from lying_hub import LyingHub
from test_size_bounds import PACKET, hub, lied_to  # noqa: F401

from cocktail_cli.extensions.standby.follower import BOUNDS, Follower
from transport import PeerLink
from transport.transfer import Spool


class SmallDisk:
    """A disk with room for little."""

    free = 1 << 20

    def take(self, size: int, what: str) -> None:
        assert size <= self.free

    def give_back(self, size: int) -> None: ...


def follower(link: PeerLink, folder: Path) -> Follower:
    link.bounds_of_extensions |= BOUNDS
    one = Follower(link.url, None, folder, lambda _: None, lambda _: None, lambda _: PACKET)  # type: ignore[arg-type]
    one._disk = SmallDisk()  # type: ignore[assignment]
    one._spool = Spool(folder, SmallDisk())
    return one


def ledger(link: PeerLink, folder: Path) -> None:
    one = follower(link, folder)
    with closing(one.copy):
        one._fetch(link, 1)


def updates(link: PeerLink, folder: Path) -> None:
    one = follower(link, folder)
    with closing(one.copy), ExitStack() as stack:
        one._updates(link, 1, stack)


def replica(link: PeerLink, folder: Path) -> None:
    one = follower(link, folder)
    with closing(one.copy):
        one._look(link)


def packets(link: PeerLink, folder: Path) -> None:
    one = follower(link, folder)
    with closing(one.copy), ExitStack() as stack:
        one._spooled(link, "replica/packets/0-1", PACKET, stack)


LIES: dict[str, tuple[Callable[[PeerLink, Path], object], str]] = {
    "replica/packets/": (packets, "1,024 at most: the recipe's compression"),
    "ledger/": (ledger, "16,777,216 at most: what a hub sends of its ledger"),
    "updates/": (updates, "1,048,576 at most: what the disk of a standby has room for"),
    "replica/": (replica, "8,388,608 at most: the size that the hub has listed"),
}


def test_of_each_object_that_a_standby_fetches_there_is_a_lie_here() -> None:
    assert LIES.keys() == BOUNDS.keys()


@pytest.mark.parametrize("name", LIES)
def test_of_what_is_announced_to_a_standby_longer_than_it_can_be_nothing_is_kept(
    hub: LyingHub,  # noqa: F811
    name: str,
    tmp_path: Path,
) -> None:
    call, said = LIES[name]

    assert said in lied_to(hub, name, call, tmp_path)
