"""Compiled loops for the host (numba) and for GPUs (Triton)."""

from .dispatch import WORTH, compiled, kernels_missing, usable
