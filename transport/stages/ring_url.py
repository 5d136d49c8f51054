"""The ring URL by which the machines of one replica find each other: `cocktail-ring://SECRET@HOST:PORT,-/1`.

All of them have the same secret, from which the CURVE keys of each follow, and the addresses by stage. A
machine that cannot be dialled has `-` as its address; one of any two neighbours has another. The number says
whose URL it is.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

from transport.protocol import CurveKeys, UrlError, parse_address

from .stage_link import Neighbour

SCHEME = "cocktail-ring://"
NOT_DIALLED = "-"
FEWEST, MOST = 2, 256  # machines
ADDRESSES = "give the HOST:PORT of each machine with commas between, this one's first; `-` cannot be dialled"
COPY = (
    "copy the whole ring URL that the head prints for this machine: SECRET@ADDRESSES/NUMBER follow the scheme"
)


@dataclass(frozen=True)
class RingURL:
    """A ring, and one machine's place in it."""

    secret: str
    addresses: tuple[str, ...]  # "host:port" by stage; empty: it cannot be dialled
    number: int = 0

    def __str__(self) -> str:
        return f"{SCHEME}{self.secret}@{','.join(a or NOT_DIALLED for a in self.addresses)}/{self.number}"

    def __repr__(self) -> str:
        return f"RingURL(number={self.number}, addresses={self.addresses})"

    @property
    def stages(self) -> int:
        return len(self.addresses)

    @property
    def address(self) -> str:
        """Return the address of this machine; empty: it cannot be dialled."""
        return self.addresses[self.number]

    def of(self, number: int) -> RingURL:
        """Return the ring URL of another machine."""
        return replace(self, number=number)

    def keys(self, number: int) -> CurveKeys:
        """Derive the keys of a stage's machine."""
        return CurveKeys.derived(hashlib.sha256(f"cocktail ring {number} {self.secret}".encode()).digest())

    def neighbour(self, step: int) -> Neighbour:
        """Return the stage after (1) or before (-1) this one."""
        number = (self.number + step) % self.stages
        return Neighbour(f"stage {number}", self.keys(number).public, self.addresses[number])


def parse_addresses(text: str) -> tuple[str, ...]:
    """Parse `HOST:PORT,-`. Raises UrlError."""
    found = tuple("" if part == NOT_DIALLED else part for part in text.split(","))
    if not FEWEST <= len(found) <= MOST:
        raise UrlError(f"a replica has {FEWEST} to {MOST} machines, not {len(found)}", ADDRESSES)
    for here, after in zip(found, found[1:] + found[:1], strict=True):
        if here:
            _check(here)
        elif not after:
            raise UrlError(
                "neither of two neighbours in the ring can be dialled: one needs an address", ADDRESSES
            )
        if here and found.count(here) > 1:
            raise UrlError(f"two machines of the ring have the address {here}", ADDRESSES)
    return found


def _check(address: str) -> None:
    try:
        parse_address(address)
    except UrlError as error:
        raise UrlError(str(error).replace("in the run URL", "in the ring"), ADDRESSES) from None


def parse_ring(text: str) -> RingURL:
    """Parse a machine's ring URL. Raises UrlError."""
    match = re.fullmatch(r"cocktail-ring://([A-Za-z0-9_-]{22,64})@([^/@\s]+)/([0-9]{1,3})", text.strip())
    if match is None:
        if text.strip().startswith(SCHEME):
            raise UrlError("this ring URL is not whole", COPY)
        raise UrlError("this ring URL does not begin with cocktail-ring://", COPY)
    url = RingURL(match[1], parse_addresses(match[2]), int(match[3]))
    if not 0 < url.number < url.stages:
        raise UrlError(
            f"the replica has the stages 1 to {url.stages - 1} beside its head, not {url.number}", COPY
        )
    return url
