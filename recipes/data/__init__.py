"""Rows to samples of tokens, and the order in which they are seen."""

from .corpus import Corpus, Glimpse, build_corpus, glimpse
from .sample_order import shuffled
from .samples import Sample, batches, collate, pack, unpack
from .sources import bring, lines, rows
from .streaming import Stream
from .tokenization import Encoder, detect

__all__ = [
    "Corpus",
    "Encoder",
    "Glimpse",
    "Sample",
    "Stream",
    "batches",
    "bring",
    "build_corpus",
    "collate",
    "detect",
    "glimpse",
    "lines",
    "pack",
    "rows",
    "shuffled",
    "unpack",
]
