"""The line that a replica's machine is given: all that it needs to know its neighbours, and they it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.protocol import UrlError
from transport.stages import RingURL, parse_ring

SECRET = "0123456789abcdef0123456789abcdef"


@given(st.integers(2, 9), st.data())
def test_every_machine_expects_the_key_that_its_neighbour_has(stages: int, data: st.DataObject) -> None:
    """Read back from its text, each line names the neighbours, their addresses and public keys."""
    hidden = data.draw(st.sets(st.sampled_from(range(0, stages - stages % 2, 2))))
    addresses = tuple("" if n in hidden else f"10.0.0.{n}:29500" for n in range(stages))
    urls = [parse_ring(str(RingURL(SECRET, addresses, n))) for n in range(1, stages)]

    keys = [urls[0].keys(number) for number in range(stages)]
    for pair in keys:
        pair.check()
    assert len({pair.public for pair in keys}) == stages
    for url in urls:
        assert url.neighbour(1).key == keys[(url.number + 1) % stages].public
        assert url.neighbour(-1).key == keys[url.number - 1].public
        assert url.neighbour(-1).address == addresses[url.number - 1]
    assert RingURL(SECRET[::-1], addresses).keys(0) != keys[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cocktail://KEY.TOKEN@10.0.0.1:29400/amber-otter-42", "does not begin with cocktail-ring"),
        ("cocktail-ring://", "is not whole"),
        (f"cocktail-ring://{SECRET}@10.0.0.1:29500,-", "is not whole"),
        (f"cocktail-ring://{SECRET}@10.0.0.1:2,10.0.0.1:2/1", "two machines of the ring have the address"),
        (f"cocktail-ring://{SECRET}@10.0.0.1:99999,-/1", "port '99999' in the ring"),
        (f"cocktail-ring://{SECRET}@10.0.0.1:29500/1", "2 to 256 machines, not 1"),
        (f"cocktail-ring://{SECRET}@-,-/1", "neither of two neighbours"),
        (f"cocktail-ring://{SECRET}@10.0.0.1:29500,10.0.0.2:1,-/3", "stages 1 to 2 beside its head, not 3"),
        (f"cocktail-ring://{SECRET}@10.0.0.1,-/1", "not of the form host:port"),
    ],
)
def test_a_line_that_is_none_is_refused_with_a_sentence(text: str, says: str) -> None:
    with pytest.raises(UrlError, match=says):
        parse_ring(text)
