"""Quantize values to codes of q bits, and dequantize them to the bit."""

from . import levels, quantizer
from .quantizer import BITS, Codes, dequantize, packed_size, planes, quantize, signed_table, table_size, widen
