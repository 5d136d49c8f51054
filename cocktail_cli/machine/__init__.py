"""This machine: devices, identity, address, cache, the runs it knows."""

from .cache_locks import claimed, clear
from .devices import (
    hardware,
    limit_memory,
    memory_of,
    own_name,
    pick_device,
    pick_devices,
    split_devices,
)
from .gpu_catalogue import GIB, RUNTIME, Gpu, gpu_of, this_machine
from .hide_argv import hide
from .identity import own_keys, under
from .network_address import (
    EVERYWHERE,
    INTERNET,
    ListenAddress,
    parse_listen,
    reach_of,
    where_from,
)
from .remote_code_consent import check_trust, own_modules
from .run_registry import (
    RunRecord,
    State,
    cache,
    home,
    known_runs,
    load,
    new_name,
    newest,
    read,
    save,
)
from .units import as_text, parse_rate, parse_size

__all__ = [
    "EVERYWHERE",
    "GIB",
    "INTERNET",
    "RUNTIME",
    "Gpu",
    "ListenAddress",
    "RunRecord",
    "State",
    "as_text",
    "cache",
    "check_trust",
    "claimed",
    "clear",
    "gpu_of",
    "hardware",
    "hide",
    "home",
    "known_runs",
    "limit_memory",
    "load",
    "memory_of",
    "new_name",
    "newest",
    "own_keys",
    "own_modules",
    "own_name",
    "parse_listen",
    "parse_rate",
    "parse_size",
    "pick_device",
    "pick_devices",
    "reach_of",
    "read",
    "save",
    "split_devices",
    "this_machine",
    "under",
    "where_from",
]
