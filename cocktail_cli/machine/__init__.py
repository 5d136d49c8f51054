"""This machine: devices, identity, address, cache, the runs it knows."""

from .cache_locks import locked_folder, remove_unlocked
from .devices import (
    Glance,
    check_memory_limit,
    default_peer_name,
    devices_of,
    glance,
    hardware,
    limit_memory,
    memory_of,
    no_kernels,
    pick_device,
    split_devices,
    weaknesses,
)
from .file_systems import network_file_system
from .freed_memory import return_freed_memory
from .gpu_catalogue import GIB, GPUS, RUNTIME, Gpu, gpu_of, this_machine
from .hide_argv import hide_token
from .identity import own_keys, registered_as
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
from .nvidia_driver import driver_version, handle_of, nvml, users_of
from .remote_code_consent import check_trust, isolate_model_code
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
