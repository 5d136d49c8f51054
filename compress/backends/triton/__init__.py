"""Triton kernels: the packets of the host, from tensors on a GPU. Importing this imports triton."""

from . import code_kernels, launching, selection_kernels, vector_kernels
