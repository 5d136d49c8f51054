"""This machine: devices, identity, address, cache, the runs it knows."""

from .devices import (
    GIB,
    RUNTIME,
    Glance,
    GpuReading,
    NvidiaGpus,
    check_memory_limit,
    default_peer_name,
    devices_of,
    glance,
    handle_of,
    hardware,
    limit_memory,
    memory_of,
    no_kernels,
    nvidia_gpus,
    nvml,
    pick_device,
    split_devices,
    weaknesses,
)
from .local_files import lock_of, locked_folder, network_file_system, own_keys, registered_as, remove_unlocked
from .network_address import (
    BIND,
    EVERYWHERE,
    INTERNET,
    PORT,
    ListenAddress,
    free_address,
    joined,
    local_host,
    network_of,
    own_address,
    parse_advertised,
    parse_listen,
    reach_of,
)
from .own_process import check_trust, hide_token, in_child, isolate_model_code, return_freed_memory
from .run_registry import (
    FILE,
    FORMAT,
    RunRecord,
    State,
    cache,
    check_home,
    check_record,
    home,
    known_runs,
    load_run,
    new_name,
    read_run,
    reread_run,
    save_run,
    the_run_going_on,
    write_private,
)
from .units import parse_rate, parse_size, rate_text
