"""This machine's memory and cores, and the number formats of its accelerators. Imports no torch by itself."""

from .accelerators import HalfPrecision, half_precision, untried
from .host_memory import HostMemory, host_memory, usable_cores
