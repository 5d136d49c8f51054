"""Measurements that a peer makes of its GPUs while it trains."""

from .gpu_readings import GpuReading, NvidiaGpus, nvidia_gpus
