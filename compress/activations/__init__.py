"""Activations and their gradients between the stages of a pipeline, as AQ-SGD sends them."""

from .activation_codec import (
    ActivationDecoder,
    ActivationEncoder,
    MemoryMismatch,
    Rows,
    decode_gradient,
    encode_gradient,
)
from .activation_memory import ActivationMemory
