"""Triton kernels: the packets of the host, from tensors on a GPU."""
