"""CocktailSGD (Wang et al., ICML 2023), Algorithms 1 and 2."""

from .adaptive_rate import fill_of
from .cocktail_sgd import (
    Common,
    Part,
    Piece,
    Worker,
    fold,
    mix_of,
    read,
    rehearse,
)
from .decoded_updates import RejectedUpdate, length
from .robust_mean import FEWEST, HELD, Moved, median_of
from .shard_aggregator import (
    Owners,
    even,
    given_before,
    merged,
    owners_of,
    part_of,
    spoken_of,
)

__all__ = [
    "FEWEST",
    "HELD",
    "Common",
    "Moved",
    "Owners",
    "Part",
    "Piece",
    "RejectedUpdate",
    "Worker",
    "even",
    "fill_of",
    "fold",
    "given_before",
    "length",
    "median_of",
    "merged",
    "mix_of",
    "owners_of",
    "part_of",
    "read",
    "rehearse",
    "spoken_of",
]
