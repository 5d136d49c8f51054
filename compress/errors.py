"""Errors: bytes of somebody else that are no packet (PacketError), numbers of our own (NonFiniteError)."""

from __future__ import annotations


class PacketError(ValueError):
    """These bytes are no packet that this version can read; the message says what was met and expected."""


class NonFiniteError(ValueError):
    """A value to be sent is NaN or infinite: the model has diverged, or a gradient overflowed."""

    def __init__(self, value: float, position: int, parameter: str | None = None) -> None:
        """`position` counts within the sampled vector; `parameter` is its name, where names were given."""
        where = f" ({parameter})" if parameter else ""
        super().__init__(f"{value} at position {position:,} of the sampled vector{where}: nothing was sent")
        self.value = value
        self.position = position
        self.parameter = parameter
