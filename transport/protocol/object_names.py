"""Names of objects as prefix and round."""

from __future__ import annotations

# each followed by a round; PART also by the name of an aggregator, SHARD by the attempt
UPDATE, HANDOFF, PART, SHARD, ERROR = "update/", "legacy/", "part/", "shard/", "error/"
PACKET = "packet/"  # followed by a round: its aggregate
TRIAL = "trial/"  # followed by a number that the peer chooses


def round_of(prefix: str, name: str) -> int | None:
    """Parse the number in "update/17"; None for another name."""
    digits = name.removeprefix(prefix)
    plain = name.startswith(prefix) and digits.isascii() and digits.isdigit() and len(digits) < 19
    return int(digits) if plain else None


def round_and_name(prefix: str, name: str) -> tuple[int, str] | None:
    """Parse round and name in "part/17/ann"; None for another name."""
    round, _, rest = name.removeprefix(prefix).partition("/")
    number = round_of(prefix, prefix + round) if name.startswith(prefix) and rest else None
    return None if number is None else (number, rest)
