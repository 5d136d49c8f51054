"""A network in a box: a hub and peers, each in a network namespace of its own, with the links people have at
home.

    lab.py up LAB --peers 3 --up 20 --down 100 [--rtt 40] [--loss 0.5] [--peer p2:up=5,rtt=200 ...]
    lab.py set LAB p1 [--up M] [--down M] [--rtt MS] [--loss PERCENT]
    lab.py link LAB p1 down|up|deaf|pulled    down: packets vanish both ways and the carrier stays (a
    dark link); deaf: those to it vanish; pulled: its own end is set down, as with a cable that is pulled out
    lab.py nat LAB p1 on|off             nobody can dial this member; `up --nat p1` from the start
    lab.py forget LAB p1                 what a NAT does that lost its table: TCP connections of this
    moment are swallowed for ever, without a word to either end; new ones work
    lab.py exec LAB p1 -- COMMAND ...
    lab.py show LAB
    lab.py down LAB
    lab.py rootless [options of up] -- COMMAND ...    no root: the lab is called `lab`, and ends with
    COMMAND

Rates are Mbit/s (0: unlimited) on the wire; a round trip in ms is split over the two directions of the
member's own link; loss is per packet and direction. Down is a token bucket (tc tbf) at the switch; delay,
loss and the rate up are the user-space switch's (switch.py): in the member's own kernel a queue
would stay short, as its TCP sees it, while a router's fills up. Where packets are lost, or a line is slower
than 10 Mbit/s, each travels alone instead of in segments of up to 64 KiB. Addresses: hub 10.77.0.1, p1
10.77.0.11, p2 10.77.0.12 ...
Exit 77 and a reason where the kernel, the rights or the tools for it are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

NET = "10.77.0."
SWITCH = Path(__file__).resolve().with_name("switch.py")
SLOW = 10.0  # Mbit/s; on a slower line a segment of 64 KiB would take 50 ms and more
UNAVAILABLE = 77  # the exit status that test harnesses read as "skipped"


@dataclass(frozen=True)
class Line:
    """The link of one member."""

    up: float = 0.0  # Mbit/s, 0: unlimited
    down: float = 0.0
    rtt: float = 0.0  # ms
    loss: float = 0.0  # percent of the packets, each direction
    dark: bool = False  # everything is lost
    deaf: bool = False  # everything is lost that goes to it
    forgotten: int = 0  # how often its connections were forgotten
    nat: bool = False  # it can dial, and not be dialled


@dataclass
class Lab:
    name: str
    lines: dict[str, Line] = field(default_factory=dict)  # member -> its link; "hub", "p1", "p2" ...
    queue_ms: float = 50.0  # depth of the bucket's queue, at its rate
    switch_pid: int = 0

    @property
    def packet_by_packet(self) -> bool:
        lines = self.lines.values()
        return any(line.loss or 0 < line.up < SLOW or 0 < line.down < SLOW for line in lines)

    @property
    def least_queue(self) -> int:
        """The bytes that a queue holds however slow its line is."""
        return 16_000 if self.packet_by_packet else 64_000

    def namespace(self, member: str) -> str:
        return f"{self.name}-{member}"


def number_of(member: str) -> int:
    return 1 if member == "hub" else 10 + int(member[1:])


def mac_of(member: str) -> str:
    return f"02:77:00:00:00:{number_of(member):02x}"


def device_of(member: str) -> str:
    """The switch's end of the member's cable."""
    return f"s{number_of(member)}"


# ---- state -------------------------------------------------------------------------------------------------


def state_file(name: str, suffix: str = ".json") -> Path:
    return Path(os.environ.get("NETLAB_STATE", "/run/netlab")) / (name + suffix)


def save(lab: Lab) -> None:
    path = state_file(lab.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(lab), indent=1))


def load(name: str) -> Lab:
    path = state_file(name)
    if not path.is_file():
        raise SystemExit(f"netlab: there is no lab {name!r}; lab.py up {name} makes one")
    found = json.loads(path.read_text())
    lines = {member: Line(**line) for member, line in found.pop("lines").items()}
    return Lab(lines=lines, **found)


# ---- the kernel's part -------------------------------------------------------------------------------------


def tell(*command: str, check: bool = True) -> str:
    """Run a command of iproute2; return its output, or end with its own words."""
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f"netlab: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def plug_in(lab: Lab, member: str) -> None:
    """Make a namespace for the member and a cable from it to the switch."""
    inside, switch, device = lab.namespace(member), lab.namespace("sw"), device_of(member)
    tell("ip", "netns", "add", inside)
    tell("ip", "-n", inside, "link", "set", "lo", "up")
    cable = ["ip", "link", "add", "eth0", "netns", inside, "address", mac_of(member), "type", "veth"]
    tell(*cable, "peer", "name", device, "netns", switch)
    tell("ip", "-n", inside, "addr", "add", f"{NET}{number_of(member)}/24", "dev", "eth0")
    tell("ip", "-n", inside, "link", "set", "eth0", "up")
    tell("ip", "-n", switch, "link", "set", device, "up")


def shape(lab: Lab, member: str) -> None:
    """Set the rate down of a member's link, at the switch's end, and the size of the segments that it
    sends."""
    segments = "1" if lab.packet_by_packet else "65535"
    own = ["ip", "-n", lab.namespace(member), "link", "set", "eth0", "gso_max_segs", segments]
    tell(*own, check=False)
    line, namespace, device = lab.lines[member], lab.namespace("sw"), device_of(member)
    tell("tc", "-n", namespace, "qdisc", "del", "dev", device, "root", check=False)
    if line.down:
        bytes_per_ms = line.down * 1e6 / 8 / 1000
        least = 4_000 if lab.packet_by_packet else 70_000  # a whole segment fits
        burst = max(least, int(bytes_per_ms * 2))
        limit = burst + max(lab.least_queue, int(bytes_per_ms * lab.queue_ms))
        bucket = ["tbf", "rate", f"{line.down}mbit", "burst", str(burst), "limit", str(limit)]
        tell("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)


# ---- the switch's part -------------------------------------------------------------------------------------


def write_ports(lab: Lab) -> Path:
    """Tell the switch delay, loss and rate of each port."""
    rows = [
        {
            "device": device_of(member),
            "mac": mac_of(member),
            "delay_s": line.rtt / 2 / 1000,
            "loss": 1.0 if line.dark else line.loss / 100,
            "loss_to": 1.0 if line.dark or line.deaf else line.loss / 100,
            "forgotten": line.forgotten,
            "nat": line.nat,
            "up": line.up * 1e6 / 8,
            "queue_s": max(lab.queue_ms / 1000, lab.least_queue / (line.up * 1e6 / 8)) if line.up else 0.0,
        }
        for member, line in lab.lines.items()
    ]
    path, temporary = state_file(lab.name, ".ports"), state_file(lab.name, ".ports.tmp")
    temporary.write_text(json.dumps(rows))
    os.replace(temporary, path)
    if lab.switch_pid:
        os.kill(lab.switch_pid, signal.SIGHUP)
    return path


def start_switch(lab: Lab) -> None:
    ports = write_ports(lab)
    ready = ports.with_suffix(".ready")
    with state_file(lab.name, ".log").open("w") as log:
        switch = subprocess.Popen(
            ["ip", "netns", "exec", lab.namespace("sw"), sys.executable, str(SWITCH), str(ports)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + 10
    while not ready.exists():
        if switch.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("netlab: the switch did not start: " + state_file(lab.name, ".log").read_text())
        time.sleep(0.01)
    lab.switch_pid = switch.pid


# ---- commands ----------------------------------------------------------------------------------------------


def up(args: argparse.Namespace) -> None:
    require()
    lab = Lab(args.lab, queue_ms=args.queue)
    lab.lines["hub"] = Line(up=args.hub_up, down=args.hub_down)
    for number in range(1, args.peers + 1):
        lab.lines[f"p{number}"] = Line(args.up, args.down, args.rtt, args.loss)
    for text in args.peer:
        member, _, settings = text.partition(":")
        changed = {key: float(value) for key, value in (s.split("=") for s in settings.split(","))}
        lab.lines[member] = replace(lab.lines[member], **changed)
    for member in args.nat:
        lab.lines[member] = replace(lab.lines[member], nat=True)
    tell("ip", "netns", "add", lab.namespace("sw"))
    for member in lab.lines:
        plug_in(lab, member)
    for member in lab.lines:  # static neighbours: no ARP, which loss and delay would slow down
        for other in lab.lines.keys() - {member}:
            address = [f"{NET}{number_of(other)}", "lladdr", mac_of(other), "dev", "eth0", "nud", "permanent"]
            tell("ip", "-n", lab.namespace(member), "neigh", "replace", *address)
        shape(lab, member)
    save(lab)
    start_switch(lab)
    save(lab)


def change(args: argparse.Namespace) -> None:
    lab = load(args.lab)
    names = {f.name for f in fields(Line)} - {"dark", "deaf", "forgotten", "nat"}
    changed = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    was = lab.packet_by_packet
    alter(lab, args.member, **changed)
    for member in [args.member] if lab.packet_by_packet == was else lab.lines:
        shape(lab, member)


def link(args: argparse.Namespace) -> None:
    lab = load(args.lab)
    alter(lab, args.member, dark=args.state == "down", deaf=args.state == "deaf")
    carrier = "down" if args.state == "pulled" else "up"
    tell("ip", "-n", lab.namespace(args.member), "link", "set", "eth0", carrier)


def nat(args: argparse.Namespace) -> None:
    alter(load(args.lab), args.member, nat=args.state == "on")


def forget(args: argparse.Namespace) -> None:
    lab = load(args.lab)
    alter(lab, args.member, forgotten=lab.lines[args.member].forgotten + 1)


def alter(lab: Lab, member: str, **changed: float) -> None:
    """Change a member's link, and tell the switch."""
    lab.lines[member] = replace(lab.lines[member], **changed)  # type: ignore[arg-type]
    write_ports(lab)
    save(lab)


def execute(args: argparse.Namespace) -> None:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    os.execvp("ip", ["ip", "netns", "exec", Lab(args.lab).namespace(args.member), *command])


def show(args: argparse.Namespace) -> None:
    lab = load(args.lab)
    for member, line in lab.lines.items():
        link_is = "dark" if line.dark else f"rtt {line.rtt:g} ms, loss {line.loss:g} %"
        print(f"{member:<5} {NET}{number_of(member):<4} up {line.up:g}, down {line.down:g} Mbit/s, {link_is}")
        print(tell("tc", "-n", lab.namespace("sw"), "-s", "qdisc", "show", "dev", device_of(member)), end="")


def down(args: argparse.Namespace) -> None:
    lab = load(args.lab)
    if lab.switch_pid:
        try:
            os.kill(lab.switch_pid, signal.SIGTERM)
        except ProcessLookupError:
            print("netlab: the switch had already ended", file=sys.stderr)
    for member in [*lab.lines, "sw"]:
        tell("ip", "netns", "del", lab.namespace(member), check=False)
    for suffix in (".json", ".ports", ".ready", ".log"):
        state_file(lab.name, suffix).unlink(missing_ok=True)


# ---- without root ------------------------------------------------------------------------------------------

UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--mount-proc"]


TRIAL = "ip link add t0 type veth peer name t1 && tc qdisc add dev t0 root tbf rate 1mbit burst 4k limit 64k"


def require(rootless: bool = False) -> None:
    """End with exit 77 and the reason where a lab cannot be made on this machine."""
    if reason := why_not(rootless):
        print(f"netlab: no lab here: {reason}", file=sys.stderr)
        raise SystemExit(UNAVAILABLE)


def why_not(rootless: bool) -> str:
    """Find why a lab cannot be made on this machine; "" where it can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, this is {sys.platform}"
    for tool in ("ip", "tc", *(["unshare", "mount"] if rootless else [])):
        if not shutil.which(tool):
            package = "iproute2" if tool in ("ip", "tc") else "util-linux"
            return f"the command `{tool}` is missing (package {package})"
    if rootless:
        done = subprocess.run([*UNSHARE, "sh", "-c", TRIAL], capture_output=True, text=True)
        return f"a namespace of one's own is refused: {done.stderr.strip()}" if done.returncode else ""
    return "" if os.geteuid() == 0 else "not root; `lab.py rootless` may work"


def rootless(arguments: list[str]) -> None:
    """Build the lab inside namespaces of one's own, run a command there, and let all of it vanish."""
    if "--" not in arguments:
        raise SystemExit("netlab: rootless wants -- and a command")
    cut = arguments.index("--")
    options, command = arguments[:cut], arguments[cut + 1 :]
    if os.environ.get("NETLAB") != "lab":
        require(rootless=True)
        os.environ["NETLAB"] = "lab"
        again = [sys.executable, str(Path(__file__).resolve()), "rootless", *arguments]
        os.execvp("unshare", [*UNSHARE, "--kill-child", *again])
    tell("mount", "-t", "tmpfs", "tmpfs", "/run")  # ours alone: `ip netns` keeps its names there
    up(parser().parse_args(["up", "lab", *options]))
    raise SystemExit(subprocess.run(command).returncode)


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = root.add_subparsers(required=True)

    def command(name: str, does: object, *arguments: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name)
        for argument in ("lab", *arguments):
            added.add_argument(argument)
        added.set_defaults(does=does)
        return added

    make = command("up", up)
    make.add_argument("--peers", type=int, default=2)
    for option in ("--up", "--down", "--hub-up", "--hub-down", "--rtt", "--loss"):
        make.add_argument(option, type=float, default=0.0)
    make.add_argument("--queue", type=float, default=50.0, help="ms of queue at the rate")
    make.add_argument("--nat", action="append", default=[], help="a member that nobody can dial")
    make.add_argument("--peer", action="append", default=[], help="p2:up=5,rtt=200")
    changed = command("set", change, "member")
    for option in ("--up", "--down", "--rtt", "--loss"):
        changed.add_argument(option, type=float)
    command("link", link, "member").add_argument("state", choices=["up", "down", "deaf", "pulled"])
    command("nat", nat, "member").add_argument("state", choices=["on", "off"])
    command("forget", forget, "member")
    command("exec", execute, "member").add_argument("command", nargs=argparse.REMAINDER)
    command("show", show)
    command("down", down)
    return root


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["rootless"]:
        rootless(given[1:])
    args = parser().parse_args(given)
    args.does(args)


if __name__ == "__main__":
    main()
