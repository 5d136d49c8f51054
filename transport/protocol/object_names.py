"""Names of objects as prefix and round."""

from __future__ import annotations

from collections.abc import Collection

# each followed by a round; PART also by the name of an aggregator, SHARD by the attempt
UPDATE, HANDOFF, PART, SHARD, ERROR = "update/", "legacy/", "part/", "shard/", "error/"
PACKET = "packet/"  # followed by a round: its aggregate; and by shards, "0-3,40-42": those of it
STAGE = "stage/"  # followed by a round: the shards of one machine of a replica
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


def shard_ranges(shards: Collection[int]) -> str:
    """Write shard numbers as ranges, each with its end: "0-3,40-42" for 0, 1, 2, 40 and 41."""
    ranges = list[list[int]]()
    for number in sorted(shards):
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return ",".join(f"{start}-{stop}" for start, stop in ranges)


def round_and_shards(name: str, most: int) -> tuple[int, tuple[int, ...]] | None:
    """Parse "packet/17/0-3,40-42"; None for another name, or shards that are not all below `most`."""
    if (found := round_and_name(PACKET, name)) is None:
        return None
    shards = list[int]()
    for part in found[1].split(","):
        start, stop = (round_of("", number) for number in (part.partition("-")[0], part.partition("-")[2]))
        if start is None or stop is None or not start < stop <= most:
            return None
        shards.extend(range(start, stop))
    return found[0], tuple(shards)
