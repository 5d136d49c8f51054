"""Names of the objects that peers upload, as prefix and round."""

from __future__ import annotations

# each followed by a round; PART then by the name of an owner, SHARD by the attempt
UPDATE, HANDOFF, PART, SHARD, ERROR = "update/", "legacy/", "part/", "shard/", "error/"
TRIAL = "trial/"  # by a number of the peer's own


def round_of(prefix: str, name: str) -> int | None:
    """The number in "update/17"; None where the name is another."""
    digits = name.removeprefix(prefix)
    plain = name.startswith(prefix) and digits.isascii() and digits.isdigit() and len(digits) < 19
    return int(digits) if plain else None


def round_and_name(prefix: str, name: str) -> tuple[int, str] | None:
    """Round and name in "part/17/ann"; None where the name is another."""
    round, _, rest = name.removeprefix(prefix).partition("/")
    number = round_of(prefix, prefix + round) if name.startswith(prefix) and rest else None
    return None if number is None else (number, rest)
