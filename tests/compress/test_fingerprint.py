"""The fingerprint: changes with any bit, follows updates, is the same number everywhere."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import fingerprint, fingerprint_change

WRAP = 2**64


def some(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


def splitmix(x: int) -> int:
    x &= 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return (x ^ (x >> 31)) | 1


def plain(x: torch.Tensor) -> int:
    """The specification, one element at a time."""
    golden = 0x9E3779B97F4A7C15
    total = 0
    for i, bits in enumerate(x.numpy().view(np.uint32).tolist()):
        a = splitmix((i % 65536) * golden + 0x636F636B7461696C)
        b = splitmix((i // 65536) * golden + 0x7368616B656E2121)
        total += a * b * bits
    return total % 2**64


@pytest.mark.parametrize("n", [0, 1, 1000, 65536 + 3])
def test_the_fingerprint_is_the_sum_of_the_specification(n: int) -> None:
    assert fingerprint(some(n)) == plain(some(n))


@settings(max_examples=50)
@given(at=st.integers(0, 69_999), bit=st.integers(0, 31))
def test_any_single_bit_changes_the_fingerprint(at: int, bit: int) -> None:
    x = some(70_000)
    before = fingerprint(x)
    x.view(torch.int32)[at] ^= np.int32(np.uint32(1 << bit).astype(np.int32))

    assert fingerprint(x) != before


def test_two_exchanged_elements_change_the_fingerprint() -> None:
    x = some(200_000)
    y = x.clone()
    y[[3, 140_000]] = x[[140_000, 3]]

    assert fingerprint(x) != fingerprint(y)


@pytest.mark.parametrize("n", [10, 1000, 300_000])
def test_the_fingerprint_follows_an_update_from_the_changed_elements_alone(n: int) -> None:
    x = some(n)
    before = fingerprint(x)
    at = torch.randperm(n, generator=torch.Generator().manual_seed(1))[: n // 10].sort().values
    old = x[at].clone()
    x[at] += 0.125

    forth, back = fingerprint_change(at, old, x[at], n), fingerprint_change(at, x[at], old, n)
    assert (before + int(forth)) % WRAP == fingerprint(x)
    assert (fingerprint(x) + int(back)) % WRAP == before


@pytest.mark.parametrize("cut", [1, 65_535, 65_536, 70_000, 131_073])
def test_fingerprints_of_parts_add_up_wherever_a_vector_is_cut(cut: int) -> None:
    x = some(200_000)

    together = fingerprint(x[:cut]) + fingerprint(x[cut : cut + 9], cut) + fingerprint(x[cut + 9 :], cut + 9)
    assert together & 0xFFFFFFFFFFFFFFFF == fingerprint(x)


def test_no_change_leaves_the_fingerprint() -> None:
    nothing = torch.empty(0)

    assert int(fingerprint_change(torch.empty(0, dtype=torch.int64), nothing, nothing, 9)) == 0


def test_a_device_computes_the_fingerprint_of_the_host() -> None:
    """On a device the rows are multiplied in torch rather than in NumPy."""
    from compress.fingerprint import _inner, _long, fingerprint_tables

    rows = some(3 * 65536).view(torch.int32).view(3, -1)
    across, _ = fingerprint_tables(65536, rows.device)

    assert _inner(rows, across).tolist() == (_long(rows) * across).sum(1).tolist()


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        fingerprint(torch.zeros(3, dtype=torch.float64))
