"""The decoder: a packet to an update, window by window, the same bits on every device.

`decode_windows` reads the sections as streams, so its memory does not grow with the packet. `decode`
decompresses all sections first and takes them as one window. A GPU decodes the expanded sections in one step
of its own; it shares the header and the checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch

from compress.backends import compiled, usable
from compress.coding import Bytes, Stream, decode_positions, held
from compress.errors import PacketError
from compress.quantization import Codes, dequantize
from compress.sparse_update import Update

from .format import Header, read_header

WINDOW = 1 << 16  # values
EACH = 48  # bytes of memory a value takes while its window is decoded
PLANES = {3: 2, 16: 2, 32: 4}  # streams that read the codes, by quant_bits; else 1


def decode(
    packet: bytes | bytearray | memoryview,
    m: int,  # length of the sampled vector, which the receiver knows
    device: torch.device | str = "cpu",  # where the update is wanted
    kernels: bool | None = None,  # True: Triton; False: NumPy, the reference; None: the fastest there
) -> Update:
    """Decode the update in a packet, to the same bits on every device.

    PacketError where anything is wrong: the packet comes from somebody else. Every size is checked against
    m before memory is asked for; at most some 40 bytes are allocated for each of the m elements.
    """
    header, device = read_header(memoryview(packet), m).expanded(), torch.device(device)
    if header.quant_bits < 32 and (usable(device) if kernels is None else kernels):
        from compress.backends.triton import code_kernels, selection_kernels  # imports triton

        positions = selection_kernels.decode_positions(header.positions, m, header.k, device)
        return Update(m, positions, code_kernels.dequantize(header.codes(), device))
    update = decode_expanded(header, m, None if kernels is False else compiled(m))
    return Update(m, update.positions.to(device), update.values.to(device))


def decode_expanded(header: Header, m: int, loops: ModuleType | None) -> Update:
    """Decode a packet whose sections are in memory, on the host: in one window."""
    values = _finite_values(header.codes())
    whole = (m + 8) & ~7  # a window that holds every position
    windows = list(decode_positions(header.positions, m, header.k, whole, loops))
    positions = windows[0] if windows else np.empty(0, np.int64)
    return Update(m, torch.from_numpy(positions), torch.from_numpy(values))


def decode_windows(packet: Bytes, m: int, at_most: int = WINDOW) -> Iterator[Update]:
    """Decode the update in windows of at most `at_most` values (at least 8), positions ascending.

    packet: a memoryview, or a `FileSlice`. The windows together are what `decode` gives, bit for bit.
    PacketError where anything is wrong: of the header and the checksum at once, else with the window that
    is wrong or after the last.
    """
    return _windows(read_header(packet, m), m, max(at_most & ~7, 8))


def window_memory(packet: Bytes, m: int, at_most: int = WINDOW) -> int:
    """Return about how many bytes of memory `decode_windows` takes at once. Errors: PacketError."""
    header = read_header(packet, m, checksum=False)
    positions, low, codes, *scales = header.sections
    sections = [positions, low, *[codes] * PLANES.get(header.quant_bits, 1), *scales]
    return EACH * min(at_most, max(header.k, 8)) + sum(held(section) for section in sections)


def _windows(header: Header, m: int, window: int) -> Iterator[Update]:
    values = _values(header, window)
    for positions in decode_positions(header.positions, m, header.k, window):
        yield Update(m, torch.from_numpy(positions), torch.from_numpy(next(values)))
    for _ in values:  # runs the checks that follow the last one
        raise PacketError(f"more values than the {header.k:,} positions")


def _values(header: Header, window: int) -> Iterator[np.ndarray]:
    """Decode the values: (window,) float32 each, the last one shorter. Checks scales and finiteness."""
    bits, bucket, k = header.quant_bits, header.quant_bucket_size, header.k
    codes = header.sections[2]
    widths, starts = [bits], [0]  # bits of a value in each plane, and the byte where the plane begins
    if bits in PLANES:
        widths = [1, 2] if bits == 3 else [8] * PLANES[bits]
        starts = [0, -(-k // 8)] if bits == 3 else [i * k for i in range(len(widths))]
    planes = [Stream(codes, start) for start in starts]
    low, high = (Stream(section) for section in header.sections[3:])
    scales = np.empty(0, np.uint16)  # of the buckets that reach into the window
    for start in range(0, k, window):
        count, inside = min(window, k - start), start % bucket  # values of the first bucket passed already
        parts = [plane.read(-(-count * width // 8)) for plane, width in zip(planes, widths, strict=True)]
        packed = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if bits < 32:
            scales = scales[-1:] if inside else scales[:0]
            more = -(-(inside + count) // bucket) - len(scales)
            scales = np.concatenate([scales, header.scales(low.read(more), high.read(more))])
        yield _finite_values(header.window(count, packed, scales), inside)
    for stream in (planes[-1], low, high):
        stream.end()


def _finite_values(codes: Codes, inside: int = 0) -> np.ndarray:
    values = dequantize(codes, inside)
    if codes.quant_bits == 32 and not np.isfinite(values).all():
        raise PacketError("a value that is not finite")
    return values
