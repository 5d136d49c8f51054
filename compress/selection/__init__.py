"""Top-K by magnitude."""

from . import topk
