"""`cocktail doctor`: check whether this machine can train, host a run, and join one.

Of a run it checks reachability, versions, throughput. It joins as a peer would under the name `doctor`,
fetches part of the base model, uploads bytes that the hub discards, and leaves before it is given work. It
measures its own line and the hub's, as busy as they are.
"""

from __future__ import annotations

import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from cocktail_cli import __version__, machine, options
from cocktail_cli.assembly import ask_status, everyone, recipe_type, url_to_dial
from cocktail_cli.errors import Failure, explain
from cocktail_cli.installation import command_to_add
from cocktail_cli.options import Device, Json, Quiet
from cocktail_cli.ui import counted, found, megabytes, print_findings, say
from recipes.hardware import half_precision, host_memory, untried, usable_cores

if TYPE_CHECKING:
    from recipes.errors import Finding
    from recipes.planning import LinkSpeed
    from transport import PeerLink, RunURL
    from transport.protocol import Route, Unreachable

PACKAGES = (
    *("torch", "transformers", "datasets", "tokenizers", "safetensors", "huggingface_hub", "pyzmq"),
    "numba",
)
RUN = "Also check whether this run can be reached and joined."
HUBS_PORT = "Port that a hub on this machine would listen on."
VERSIONS = "Print versions to paste into a report; check nothing."
FILES = 1024  # open files that a hub of some hundred peers needs
DISK = 10 << 30  # bytes for a small model, its snapshots and a run's packets
MEMORY = 4 << 30
SKEW = 60.0  # seconds of clock error from which certificates may be refused
ANSWER = 5.0  # seconds for the Hugging Face hub's answer
# addresses reserved for documentation (RFC 5737, RFC 3849): unused
WAYS = (("IPv4", socket.AF_INET, "192.0.2.1"), ("IPv6", socket.AF_INET6, "2001:db8::1"))


def doctor(
    run_url: Annotated[str | None, options.argument("RUN_URL", RUN, show_default=False)] = None,
    device: Device = "auto",
    port: Annotated[int, options.port(HUBS_PORT, min=1)] = machine.PORT,
    env: Annotated[bool, options.flag("--env", VERSIONS)] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check this machine; with a URL also whether that run can be joined.

    Looks at versions, device, disk, the Hugging Face hub, port and clock.

    Asks the Hugging Face hub, and the run whose URL is given; nobody else.

    Examples: cocktail doctor
    cocktail doctor cocktail://...

    Exit 4 where a line says fail. With --json one object:
    {"v": 1, "findings": [{"level", "about", "text", "hint"}]}
    """
    if env:
        say(*environment())
        return
    print_findings(checks(run_url, device, port), as_json, quiet, "preflight")


def environment() -> Iterator[str]:
    """Describe this installation as Markdown, for a bug report."""
    yield f"- cocktail {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield "- " + ", ".join(f"{name} {installed(name) or 'not installed'}" for name in PACKAGES)
    yield f"- {cuda()}"
    yield f"- {usable_cores()} cores, {megabytes(machine.memory_of('cpu'))} of memory"


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def checks(run_url: str | None, device: str, port: int) -> Iterator[Finding]:
    """Run every check, in the order in which a user would mend things."""
    simple: list[tuple[str, Callable[[], Finding]]] = [
        ("python", python),
        ("packages", packages),
        ("device", lambda: trains_on(device)),
        ("memory", memory),
        ("curve", curve),
        ("codec", lambda: codec(device)),
        ("disk", disk),
        ("files", files),
        ("port", lambda: listens(port)),
        *(check for one in everyone() for check in one.checks().items()),
        ("address", address),
        ("power", power),
    ]
    for about, check in simple:
        try:
            yield check()
        except Exception as error:  # a check that breaks is a finding, and the next is run
            yield found("warn", about, f"could not be checked: {type(error).__name__}: {error}")
    yield from hub()
    if run_url is not None:
        yield from run(run_url)


# ---- this machine ------------------------------------------------------------------------------------------


def python() -> Finding:
    text = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    prefix = Path(sys.prefix)
    if (prefix / "conda-meta").is_dir():
        if (prefix / "condabin").is_dir():  # only conda's own environment has it
            hint = "conda create -n cocktail python, then install cocktail there"
            return found("warn", "python", f"{text}, in conda's base environment", hint)
        return found("ok", "python", f"{text}, conda environment {prefix.name}")
    if sys.prefix == sys.base_prefix:
        hint = "uv tool install, pipx or a venv"
        return found("warn", "python", f"{text}, no environment of its own", hint)
    return found("ok", "python", text)


def packages() -> Finding:
    missing = [name for name in PACKAGES if installed(name) is None and name != "numba"]
    if missing:
        return found("fail", "packages", f"missing: {', '.join(missing)}", command_to_add(*missing))
    return found("ok", "packages", ", ".join(f"{name} {installed(name)}" for name in PACKAGES[:4]))


def cuda() -> str:
    """Describe torch's CUDA build and the driver."""
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if torch.version.hip:
        built = f"ROCm {torch.version.hip}"
    return f"torch {torch.__version__} for {built}; NVIDIA driver {driver_version() or 'none'}"


def trains_on(wanted: str) -> Finding:
    """Report the device of `--device auto`, or whether the requested one exists."""
    try:
        device = machine.pick_device(wanted)
    except Failure as error:
        return found("fail", "device", error.message, "--device auto takes what is there")
    if device != "cpu":
        return accelerator(device)
    if driver_version():
        hint = "install torch for this driver: https://pytorch.org/get-started/locally"
        text = f"an NVIDIA driver is here, but this torch cannot use it ({cuda()})"
        return found("fail", "device", text, hint)
    text = f"the CPU, {usable_cores()} cores: enough to own a run, slow to train in one"
    return found("warn", "device", text, "a GPU, or join with another machine")


def accelerator(device: str) -> Finding:
    """Report an accelerator: name, precision, free memory, and who else holds it."""
    import torch

    here, others = half_precision(torch.device(device)), untried(device)
    half = "bf16" if here.dtype == torch.bfloat16 else "fp16 (it only emulates bf16)"
    text = f"{machine.hardware(device)}, {cuda()}, {half if here.pays else 'fp32'}"
    if device.startswith("cuda"):
        major, minor = torch.cuda.get_device_capability(device)
        free, total = torch.cuda.mem_get_info(device)
        text += f", capability {major}.{minor}, {gib(free)} of {gib(total)} GiB free"
        if free < 0.8 * total:
            holders = "; ".join(users_of(device)[:3])
            return found("warn", "device", text, f"others hold it: {holders or 'unknown'}")
    if others:
        hint = "try it with preview and `launch smoke`, and report what they say"
        return found("warn", "device", f"{text}; cocktail was never tried on {others}", hint)
    return found("ok", "device", text)


def memory() -> Finding:
    import psutil

    here, whole = host_memory(), psutil.virtual_memory().total
    text = f"{gib(here.total)} GiB, {gib(here.free)} GiB of it free"
    if here.total < whole:
        text += f"; a container or cgroup keeps this process from the rest of {gib(whole)} GiB"
    if here.total < MEMORY:
        return found("warn", "memory", text, "a small model: cocktail plan RECIPE")
    return found("ok", "memory", text)


def curve() -> Finding:
    from transport import RunKeys

    RunKeys.generate()
    return found("ok", "transport", f"pyzmq {installed('pyzmq')}, encrypted (CURVE)")


def codec(wanted: str) -> Finding:
    """Report what encodes packets: numba on the processor, Triton's kernels on a GPU, launched on trial."""
    version = installed("numba")
    if version is None:
        text = "numba is missing: packets take longer to make"
        return found("warn", "codec", text, command_to_add("numba"))
    try:
        device = machine.pick_device(wanted)
    except Failure:  # `device` tells
        device = "cpu"
    if why := machine.no_kernels(device):
        return found("warn", "codec", why, "a C compiler and Python's headers: gcc and python3-dev")
    kernels = f", Triton {installed('triton')}" if device.startswith("cuda") else ""
    return found("ok", "codec", f"numba {version}{kernels}")


def disk() -> Finding:
    """Report free space where models are cached and where runs are written."""
    from huggingface_hub.constants import HF_HUB_CACHE

    places = {str(there(Path(p))) for p in (HF_HUB_CACHE, machine.cache(), Path.cwd())}
    free = {place: shutil.disk_usage(place).free for place in places}
    text = ", ".join(f"{megabytes(size)} free at {place}" for place, size in free.items())
    least = min(free, key=lambda place: free[place])
    if free[least] < DISK:
        hint = f"make room at {least}, or set HF_HOME and COCKTAIL_HOME to another disk"
        return found("warn", "disk", text, hint)
    if (remote := machine.network_file_system(Path.cwd())) is not None:
        hint = "launch -o FOLDER on a disk of this machine"
        return found("warn", "disk", f"{text}; here is a network file system ({remote})", hint)
    return found("ok", "disk", text)


def there(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    return path if path.exists() else there(path.parent)


def files() -> Finding:
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return found("ok", "files", "no limit on this system")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        enough = f"ulimit -n {FILES}" if hard < 0 or hard >= FILES else f"an administrator raises {hard}"
        return found("warn", "files", f"{soft} open files at most: a hub of many peers needs more", enough)
    return found("ok", "files", "open files are not limited" if soft < 0 else f"{soft} open files")


def listens(port: int) -> Finding:
    """Report whether a hub could listen on the port, and what is known of the address."""
    with socket.socket() as probe:
        try:
            probe.bind((machine.EVERYWHERE[0], port))
        except OSError as error:
            text = f"{port} cannot be listened on: {error.strerror}"
            hint = "to host a run: cocktail launch --port 0, or end what holds it"
            return found("warn", "port", text, hint)
    return found("ok", "port", f"{port} is free; {machine.reach_of(machine.BIND, port, None).known}")


def address() -> Finding:
    """Report whether this machine can dial IPv4 addresses. Nothing is sent."""
    ways = [name for name, family, there in WAYS if leads_there(family, there)]
    if "IPv4" in ways:
        return found("ok", "address", f"this machine has a way out over {' and '.join(ways)}")
    text = "no way out over IPv4: a run is reached only if its URL has a name or an IPv6 address"
    return found("warn", "address", text, "ask the run's host for --advertise NAME, or another network")


def leads_there(family: int, there: str) -> bool:
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((there, 9))
        return True
    return False


def power() -> Finding:
    """Warn of a laptop on battery: it soon sleeps, and a sleeping peer is late."""
    import psutil

    read = getattr(psutil, "sensors_battery", None)  # missing where psutil knows of none, as on AIX
    battery = read() if read is not None else None
    if battery is None or battery.power_plugged is None:
        return found("ok", "power", "no battery, or not known on this system")
    if battery.power_plugged:
        return found("ok", "power", "on the mains")
    return found("warn", "power", "on battery: this machine sleeps soon, and slows down", "plug it in")


def gib(count: float) -> str:
    return f"{count / 2**30:.1f}"


# ---- the Hugging Face hub ----------------------------------------------------------------------------------


def hub() -> Iterator[Finding]:
    """Report whether the Hugging Face hub answers, the account, and the clock's error."""
    try:
        answer = ask_hub(ANSWER)
    except Exception as error:
        yield found("warn", "hub", f"could not be asked: {type(error).__name__}: {error}")
        return
    if answer is OFFLINE:
        yield found("ok", "hub", "not asked: HF_HUB_OFFLINE is set, so only what is in its cache is used")
        return
    if answer.error:
        hint = "models in folders need no hub; what is in its cache is used"
        yield found("warn", "hub", f"{answer.endpoint} does not answer: {answer.error}", hint)
        return
    if answer.user:
        yield found("ok", "hub", f"{answer.endpoint} answers, logged in as {answer.user}")
    elif answer.token:
        yield found("warn", "hub", f"{answer.endpoint} does not take this machine's token", "hf auth login")
    else:
        text = f"{answer.endpoint} answers; no token, which gated models need"
        yield found("ok", "hub", text, "hf auth login")
    yield from licences()
    yield clock(answer.skew)


def licences() -> Iterator[Finding]:
    """Report shipped recipes whose gated models this machine may not read yet."""
    from recipes.config import is_hub_id, list_recipes
    from recipes.downloads import licence_hint

    named = {recipe.model.model_name_or_path: recipe.name for recipe in list_recipes(recipe_type)}
    for model in gated_models([name for name in named if is_hub_id(name)]):
        yield found("warn", "licence", f"{named[model]} needs {model}, which is gated {licence_hint(model)}")


def clock(skew: float | None) -> Finding:
    if skew is None:
        return found("warn", "clock", "not compared: the hub's answer has no date")
    said = f"{abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} the hub's"
    if abs(skew) > SKEW:
        set_by = {"Windows": "w32tm /resync", "Darwin": "sudo sntp -sS time.apple.com"}
        hint = set_by.get(platform.system(), "sudo timedatectl set-ntp true")
        return found("fail", "clock", said, hint)
    return found("ok", "clock", said)


RUN_ANSWER = 10.0  # seconds to wait for a run's hub
NAME = "doctor"
FETCH_S, FETCH = 3.0, 32 << 20  # download trial: at most so many seconds and bytes
FIRST, SEND_S, SEND = 64 << 10, 2.0, 4 << 20  # upload trial: bytes of the first, then seconds and most bytes
SLOWEST = 30.0  # seconds for either trial
ENOUGH = 0.7  # share of the time that a device computes; below that a line is worth a word


def run(text: str) -> Iterator[Finding]:
    """Check the layers from the outside in; the first failure ends it."""
    from cocktail_cli.host import versions
    from transport.protocol import Unreachable

    try:
        url = url_to_dial(text)
        tried = try_ways(url)
        failed = [result for _, result in tried if isinstance(result, Unreachable)]
        if len(failed) == len(tried) == 1:
            raise failed[0]
        yield from (way_found(route, result) for route, result in tried)
        if len(failed) == len(tried):
            hints = "; ".join(dict.fromkeys(hint for error in failed for hint in explain(error).hints))
            yield found("fail", "run", f"none of {len(tried)} ways leads to its hub", hints)
            return
        status = ask_status(url, RUN_ANSWER)
        with visiting(url) as link:
            yield found("ok", "run", f"{url.run} at {link.way}: {said(status)}")
            same = ", ".join(f"{package} {number}" for package, number in versions().items())
            yield found("ok", "versions", f"those of the run: {same}")
            gated = any(file.gated for file in link.welcome.base)
            down = None if gated else down_rate(link)
            yield base_access(link) if down is None else fetched(link, down)
            up = up_rate(link)
            yield sent(up)
            if up and down:
                yield pace(status, link.welcome.recipe, up, down)
    except Exception as error:
        failure = explain(error)
        yield found("fail", "run", failure.message, "; ".join(failure.hints))


def try_ways(url: RunURL) -> list[tuple[Route, float | Unreachable]]:
    """Connect to the hub on each way, all at once; return the seconds each took, or why it does not work."""
    from transport.protocol import Unreachable
    from transport.wire import routes_to, try_route

    def result(route: Route) -> float | Unreachable:
        try:
            return try_route(route, url.key, timeout=RUN_ANSWER)
        except Unreachable as error:
            return error

    routes = routes_to(url)
    with ThreadPoolExecutor(len(routes)) as pool:
        return [*zip(routes, pool.map(result, routes), strict=True)]


def way_found(route: Route, result: float | Unreachable) -> Finding:
    """Report one way to the hub: directly, or through something."""
    if not isinstance(result, float):
        return found("warn", route.kind, str(result))
    text, remark = f"{route} works, connected in {1000 * result:.0f} ms", route.remark()
    return found("ok", route.kind, f"{text}; {remark}" if remark else text)


@contextmanager
def visiting(url: RunURL) -> Iterator[PeerLink]:
    """Join the run for the duration of the block."""
    from cocktail_cli.host import versions
    from transport import PeerLink
    from transport.peer import PeerIdentity

    link = PeerLink(url, PeerIdentity(NAME, NAME, versions(), keys=machine.own_keys(), alone=False))
    try:
        link.connect(RUN_ANSWER)
        yield link
    finally:
        link.leave("the doctor has seen enough")


def said(status: dict[str, Any]) -> str:
    there = counted(status["peer_count"], "peer")
    return f"{status['state']}, step {status['step']}/{status['max_steps']}, {there}"


def down_rate(link: PeerLink) -> float:
    """Measure the download rate of the base model, in bytes per second; nothing of it is kept."""
    largest = max(link.welcome.base, key=lambda file: file.size)
    before, started, dropped = link.bytes_down, time.monotonic(), DroppedChunks(largest.size)
    chunks = range(min(dropped.map.count, 2 * FETCH // dropped.map.chunk))
    download = link.begin_chunks(f"base/{largest.name}", dropped, chunks)
    try:
        while not download.done and link.bytes_down - before < FETCH and time.monotonic() - started < FETCH_S:
            time.sleep(0.02)
    finally:
        link.forget(download)
    return (link.bytes_down - before) / max(time.monotonic() - started, 1e-3)


class DroppedChunks:
    """Takes the chunks of an object and keeps none of them (a transport.transfer.Sink)."""

    def __init__(self, size: int) -> None:
        from transport.transfer import CHUNK, ChunkMap

        self.map = ChunkMap(size, CHUNK)

    def add(self, index: int, payload: bytes) -> tuple[int, ...]:
        self.map.add(index, payload)
        return ()


def fetched(link: PeerLink, rate: float) -> Finding:
    """Report the download rate, and how much of the base model is missing here."""
    from cocktail_cli.volunteer import base_folder, bytes_to_fetch, free_bytes

    files = link.welcome.base
    lacking, free = bytes_to_fetch(files, base_folder(files)), free_bytes()
    text = f"{8 * rate / 1e6:.0f} Mbit/s down; the base model is {megabytes(sum(f.size for f in files))}"
    if lacking > free:
        return found(
            "fail", "line", f"{text}, {megabytes(free)} are free here", "COCKTAIL_HOME on a larger disk"
        )
    return found("ok", "line", f"{text}, {megabytes(lacking)} of it not here yet")


def base_access(link: PeerLink) -> Finding:
    """Report whether this machine's account may read the gated base of the run."""
    from recipes.config import recipe_from_json
    from recipes.downloads import licence_hint

    name = recipe_from_json(link.welcome.recipe, recipe_type).model.model_name_or_path
    if [*gated_models([name])]:
        return found("fail", "licence", f"the run trains {name}, which is gated {licence_hint(name)}")
    return found("ok", "licence", f"the run trains {name}, which is gated and not refused to this account")


def up_rate(link: PeerLink) -> float | None:
    """Measure the upload rate in bytes per second; None where the hub takes no trial uploads (an
    earlier version).

    A small upload first tells how many bytes fill the line for a moment.
    """
    size, rate = FIRST, 0.0
    for number in range(2):
        started = time.monotonic()

        def in_time(_: object, since: float = started) -> None:
            if time.monotonic() - since > SLOWEST:
                raise TimeoutError

        try:
            if not link.put(f"trial/{number}", bytes(size), in_time):
                return None
        except TimeoutError:
            return rate or size / SLOWEST
        rate = size / max(time.monotonic() - started, 1e-3)
        size = min(SEND, max(FIRST, int(rate * SEND_S)))
    return rate


def sent(rate: float | None) -> Finding:
    """Report the upload rate of packets."""
    if rate is None:
        return found("ok", "line", "the hub takes no trial uploads: how fast this line sends is not known")
    if rate <= FIRST / SLOWEST:
        hint = "packets will be late on this line: take another"
        return found("warn", "line", f"less than {8e-3 * rate:.0f} kbit/s up", hint)
    return found("ok", "line", f"{8 * rate / 1e6:.1f} Mbit/s up")


def pace(status: dict[str, Any], recipe_text: str, up: float, down: float) -> Finding:
    """Report what this line means for the run: seconds of a round, K, and how much of the time is computing.

    Args:
        status: the hub's answer; peers that take part say how long a round's compute takes, and what of the
            hub's line each of them has where that is the bottleneck.
        up, down: bytes a second, as measured.
    """
    from recipes.algorithm import adaptive_rate_of
    from recipes.config import recipe_from_json
    from recipes.planning import LinkSpeed, cost_of_step, packet_bytes

    recipe, steps = recipe_from_json(recipe_text, recipe_type), status.get("local_steps") or 1
    took = [peer["compute_s"] / peer["rounds"] for peer in status["peers"] if peer.get("rounds")]
    packet = packet_bytes(recipe, status["parameters"])
    if not took or not median(took):
        text = f"a packet of {megabytes(packet)} takes {packet / up:.1f} s up and {packet / down:.1f} s down"
        return found("ok", "pace", f"{text}; no peer has trained yet, so its share of a round is not known")
    line = shared_line(status, LinkSpeed(up, down, "this line's up", "this line's down"))
    settings = [one.words for one in recipe.compression.rungs]
    at = settings.index(status["rung"]) if status.get("rung") in settings else recipe.compression.first_rung
    cost = cost_of_step(recipe, packet, median(took) / steps, line, rung=at)
    rate = adaptive_rate_of(recipe.compression).on(at)
    usual = replace(rate, at=rate.usual, size=cost.packet)
    sent = usual.within(cost.packet * cost.fitting) if cost.fitting < 1 else usual
    seconds = steps * cost.compute / cost.computing
    many = f" and {steps} steps" if steps > 1 else ""
    text = f"rounds of {seconds:.1f} s{many}, of which {steps * cost.compute:.1f} s compute"
    text += f" ({cost.computing:.0%}), at {cost.rung}; this line's K is {sent.compressor.topk_ratio:.2g}"
    text += f"; the bottleneck is {cost.slowest}"
    if cost.computing >= ENOUGH:
        return found("ok", "pace", text)
    return found("warn", "pace", text, "another line; or the host: compression.auto=true")


def shared_line(status: dict[str, Any], own: LinkSpeed) -> LinkSpeed:
    """Return what this line carries in the run: at most what each peer has of the hub's, with this one more.

    Where peers pass packets on, what comes from the hub alone says nothing of how fast an aggregate comes.
    """
    from recipes.planning import HUBS_DOWN, HUBS_UP

    count = status["peer_count"]
    rates = zip(*(one.hubs_line(status) for one in everyone()), strict=True)
    up, down = (max(known) * count / (count + 1) for known in rates)
    if up and (any(one.others_send(status) for one in everyone()) or up < own.down):
        return replace(own, down=up, down_line=HUBS_UP)
    return replace(own, up=down, up_line=HUBS_DOWN) if 0 < down < own.up else own


def driver_version() -> str | None:
    """Return the version of the driver; None without one."""
    asked = machine.nvml()
    return None if asked is None else str(asked.nvmlSystemGetDriverVersion())


def users_of(device: str) -> list[str]:
    """Describe the programs that hold memory of a GPU: `python (4711) 3.2 GiB`, those that hold most first.
    Empty where the driver does not tell, as in a container or on Windows."""
    import psutil

    asked = machine.nvml()
    if asked is None:
        return []
    try:
        running = asked.nvmlDeviceGetComputeRunningProcesses(machine.handle_of(asked, device))
    except asked.NVMLError:
        return []
    held = sorted(((process.usedGpuMemory or 0, process.pid) for process in running), reverse=True)
    found = []
    for size, pid in held:
        try:
            name = psutil.Process(pid).name()
        except psutil.Error:  # of another user, or of another container
            name = "a program"
        found.append(f"{name} ({pid}) {size / 2**30:.1f} GiB")
    return found


@dataclass(frozen=True)
class HubAnswer:
    """Result of a request to the hub."""

    endpoint: str
    error: str = ""  # why it did not answer
    token: bool = False  # this machine has a token
    user: str = ""  # the token's user; empty without a token, or where it is refused
    skew: float | None = None  # seconds that this machine's clock is behind


OFFLINE = HubAnswer("")


def ask_hub(timeout: float) -> HubAnswer:
    """Ask the hub for the token's user and the time. OFFLINE where HF_HUB_OFFLINE forbids it."""
    from huggingface_hub import HfApi, constants, get_session, get_token

    if constants.HF_HUB_OFFLINE:
        return OFFLINE
    endpoint, token = constants.ENDPOINT, get_token()
    try:
        answer = get_session().head(endpoint, timeout=timeout)
    except Exception as error:  # HTTP library, transports and system each raise their own
        return HubAnswer(endpoint, error=f"{type(error).__name__}: {error}", token=token is not None)
    date, user = answer.headers.get("date"), ""
    skew = parsedate_to_datetime(date).timestamp() - time.time() if date else None
    if token:
        with suppress(Exception):  # refused, for whatever reason: `user` stays empty
            user = str(HfApi().whoami(token).get("name", ""))
    return HubAnswer(endpoint, token=token is not None, user=user, skew=skew)


def gated_models(models: Sequence[str]) -> Iterator[str]:
    """Yield the hub models whose licence has not been accepted for this machine's token."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError

    for name in models:
        try:
            HfApi().auth_check(name)
        except GatedRepoError:
            yield name
        except Exception:  # missing, renamed, no answer: a launch reports it
            continue
