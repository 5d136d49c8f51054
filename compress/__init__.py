"""Compress a vector to bytes and decode it to the same bits everywhere: sample, top-k, quantize,
entropy-code.
"""

from compress.backends import kernels_missing
from compress.codec import Cocktail, Delta, Encoded
from compress.errors import NonFiniteError, PacketError
from compress.fingerprint import fingerprint, fingerprint_change
from compress.packet import VERSION as PACKET_VERSION
from compress.packet import (
    PackedUpdate,
    Update,
    decode,
    decode_packed,
    decode_windows,
    join,
    joined_size,
    sampled,
    split,
)
from compress.pinned_copy import Arriving, brought, staging
from compress.sampling import Sample, Shard, one_range, within
from compress.yardsticks import entropy, heavy_tailed_models, heavy_tailed_packet

from . import topk
