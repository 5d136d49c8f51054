"""Measurements that a peer makes of itself while it trains: its GPUs, its machine, the phases of a round."""

from .gpu_readings import GpuReading, NvidiaGpus, nvidia_gpus
from .machine_load import LoadMeter
from .round_timer import RoundTimer
