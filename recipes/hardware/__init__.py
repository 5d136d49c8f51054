"""This machine's memory and cores, and the number formats of its accelerators. Imports no torch by itself."""

from .host_memory import HostMemory, host_memory, usable_cores
