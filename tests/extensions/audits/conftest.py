"""Ranks, and the texts that they train on."""

from test_spread_peer import data, ranks  # noqa: F401
