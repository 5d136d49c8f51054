"""Run a command in a network lab: a hub and peers in network namespaces, with the links people have at home.

    lab.py --peers 3 --up 20 --down 100 [--rtt 40] [--loss 0.5] [--peer p2:up=5,rtt=200] -- COMMAND ...
    lab.py --peers 2 --nat p1 -- bash          nobody can dial p1; `ip netns exec lab-p1 ...` is its machine

No root is needed: the lab is made in a user namespace of its own, and vanishes when COMMAND ends. Inside it,
the functions `change`, `between`, `link`, `nat` and `forget` alter a member's line.

Rates are Mbit/s (0: unlimited) on the wire; a round trip in ms is split over the two directions of the
member's own link; loss is per packet and direction. All of it is the user-space switch's (switch.py): in the
member's own kernel a queue would stay short, as its TCP sees it, while a router's fills up. Where packets
are lost, or a line is slower than 10 Mbit/s, each travels alone instead of in segments of up to 64 KiB.
Addresses: hub 10.77.0.1, p1 10.77.0.11, p2 10.77.0.12 ...
Exit 77 and a reason where the kernel or the tools for it are missing.
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

NET = "10.77.0."
HERE = Path(__file__).resolve()
SWITCH = HERE.with_name("switch.py")
STATE = Path("/run/netlab")  # on a tmpfs that this lab alone sees
SLOW = 10.0  # Mbit/s; on a slower line a segment of 64 KiB would take 50 ms and more
LEAST_QUEUE = 64_000  # bytes
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
    """The network that this process is in."""

    lines: dict[str, Line] = field(default_factory=dict)  # member -> its link; "hub", "p1", "p2" ...
    between: dict[str, float] = field(default_factory=dict)  # "p1 p2" -> Mbit/s from p1 to p2 at most
    queue_ms: float = 50.0  # depth of a line's queue, at its rate
    switch_pid: int = 0

    @property
    def packet_by_packet(self) -> bool:
        lines = self.lines.values()
        slow = any(line.loss or 0 < line.up < SLOW or 0 < line.down < SLOW for line in lines)
        return slow or any(0 < rate < SLOW for rate in self.between.values())

    def queue_s(self, mbit: float) -> float:
        """Return the seconds that the queue of a line takes; a slow one's are those of a modem's memory."""
        return max(self.queue_ms / 1000, LEAST_QUEUE / (mbit * 1e6 / 8)) if mbit else 0.0


def namespace(member: str) -> str:
    return f"lab-{member}"


def number_of(member: str) -> int:
    return 1 if member == "hub" else 10 + int(member[1:])


def mac_of(member: str) -> str:
    return f"02:77:00:00:00:{number_of(member):02x}"


def device_of(member: str) -> str:
    """The switch's end of the member's cable."""
    return f"s{number_of(member)}"


# ---- state -------------------------------------------------------------------------------------------------


def save(lab: Lab) -> None:
    STATE.mkdir(exist_ok=True)
    (STATE / "lab.json").write_text(json.dumps(asdict(lab), indent=1))


def load() -> Lab:
    found = json.loads((STATE / "lab.json").read_text())
    lines = {member: Line(**line) for member, line in found.pop("lines").items()}
    return Lab(lines=lines, **found)


# ---- the kernel's part -------------------------------------------------------------------------------------


def run_iproute(*command: str, check: bool = True) -> str:
    """Run a command of iproute2; return its output, or end with its own words."""
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f"netlab: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def plug_in(member: str) -> None:
    """Make a namespace for the member and a cable from it to the switch."""
    inside, switch, device = namespace(member), namespace("sw"), device_of(member)
    run_iproute("ip", "netns", "add", inside)
    run_iproute("ip", "-n", inside, "link", "set", "lo", "up")
    cable = ["ip", "link", "add", "eth0", "netns", inside, "address", mac_of(member), "type", "veth"]
    run_iproute(*cable, "peer", "name", device, "netns", switch)
    run_iproute("ip", "-n", inside, "addr", "add", f"{NET}{number_of(member)}/24", "dev", "eth0")
    run_iproute("ip", "-n", inside, "link", "set", "eth0", "up")
    run_iproute("ip", "-n", switch, "link", "set", device, "up")


def cut_segments(lab: Lab, member: str) -> None:
    """Set the size of the segments that a member hands to its link."""
    segments = "1" if lab.packet_by_packet else "65535"
    own = ["ip", "-n", namespace(member), "link", "set", "eth0", "gso_max_segs", segments]
    run_iproute(*own, check=False)


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
            "down": line.down * 1e6 / 8,
            "up_queue_s": lab.queue_s(line.up),
            "down_queue_s": lab.queue_s(line.down),
            "to": {
                mac_of(other): [rate * 1e6 / 8, lab.queue_s(rate)]
                for other in lab.lines
                if (rate := lab.between.get(f"{member} {other}", 0.0))
            },
        }
        for member, line in lab.lines.items()
    ]
    path, temporary = STATE / "ports", STATE / "ports.tmp"
    temporary.write_text(json.dumps(rows))
    os.replace(temporary, path)
    if lab.switch_pid:
        os.kill(lab.switch_pid, signal.SIGHUP)
    return path


def start_switch(lab: Lab) -> None:
    ports = write_ports(lab)
    ready, log = ports.with_suffix(".ready"), STATE / "log"
    with log.open("w") as file:
        switch = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                namespace("sw"),
                sys.executable,
                str(SWITCH),
                str(ports),
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    deadline = time.monotonic() + 10
    while not ready.exists():
        if switch.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("netlab: the switch did not start: " + log.read_text())
        time.sleep(0.01)
    lab.switch_pid = switch.pid


# ---- inside a lab ------------------------------------------------------------------------------------------


def change(member: str, **changed: float) -> None:
    """Change a member's link: `up`, `down`, `rtt`, `loss`."""
    before, lab = load().packet_by_packet, alter(member, **changed)
    for other in [member] if lab.packet_by_packet == before else lab.lines:
        cut_segments(lab, other)


def link(member: str, state: str) -> None:
    """Set a line dark ("down", or "deaf" where its member still can send), pull its cable ("pulled"), or mend
    it ("up"). The carrier of a dark line stays."""
    alter(member, dark=state == "down", deaf=state == "deaf")
    carrier = "down" if state == "pulled" else "up"
    run_iproute("ip", "-n", namespace(member), "link", "set", "eth0", carrier)


def between(one: str, other: str, mbit: float) -> None:
    """Limit the rate between two members, each way, beside that of their links; 0: not at all."""
    lab = load()
    lab.between |= {f"{one} {other}": mbit, f"{other} {one}": mbit}
    write_ports(lab)
    save(lab)
    for member in lab.lines:
        cut_segments(lab, member)


def nat(member: str, on: bool) -> None:
    """Put a member behind a NAT, so that nobody can dial it, or before it."""
    alter(member, nat=on)


def forget(member: str) -> None:
    """Swallow the member's present connections for ever, as a NAT does that lost its table; new ones work."""
    alter(member, forgotten=load().lines[member].forgotten + 1)


def alter(member: str, **changed: float) -> Lab:
    """Change a member's line, and tell the switch."""
    lab = load()
    lab.lines[member] = replace(lab.lines[member], **changed)  # type: ignore[arg-type]
    write_ports(lab)
    save(lab)
    return lab


# ---- making a lab ------------------------------------------------------------------------------------------


def up(args: argparse.Namespace) -> None:
    """Make the namespaces, cables and the switch."""
    lab = Lab(queue_ms=args.queue)
    lab.lines["hub"] = Line(up=args.hub_up, down=args.hub_down)
    for number in range(1, args.peers + 1):
        lab.lines[f"p{number}"] = Line(args.up, args.down, args.rtt, args.loss)
    for text in args.peer:
        member, _, settings = text.partition(":")
        changed = {key: float(value) for key, value in (s.split("=") for s in settings.split(","))}
        lab.lines[member] = replace(lab.lines[member], **changed)
    for member in args.nat:
        lab.lines[member] = replace(lab.lines[member], nat=True)
    run_iproute("ip", "netns", "add", namespace("sw"))
    for member in lab.lines:
        plug_in(member)
    for member in lab.lines:  # static neighbours: no ARP, which loss and delay would slow down
        for other in lab.lines.keys() - {member}:
            address = [f"{NET}{number_of(other)}", "lladdr", mac_of(other), "dev", "eth0", "nud", "permanent"]
            run_iproute("ip", "-n", namespace(member), "neigh", "replace", *address)
        cut_segments(lab, member)
    save(lab)
    start_switch(lab)
    save(lab)


UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--mount-proc"]
TRIAL = "ip link add t0 type veth peer name t1"


def why_not() -> str:
    """Find why a lab cannot be made on this machine; "" where it can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, this is {sys.platform}"
    for tool in ("ip", "unshare", "mount"):
        if not shutil.which(tool):
            package = "iproute2" if tool == "ip" else "util-linux"
            return f"the command `{tool}` is missing (package {package})"
    done = subprocess.run([*UNSHARE, "sh", "-c", TRIAL], capture_output=True, text=True)
    return f"a namespace of one's own is refused: {done.stderr.strip()}" if done.returncode else ""


def parser() -> argparse.ArgumentParser:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--peers", type=int, default=2)
    for option in ("--up", "--down", "--hub-up", "--hub-down", "--rtt", "--loss"):
        asked.add_argument(option, type=float, default=0.0)
    asked.add_argument("--queue", type=float, default=50.0, help="ms of queue at the rate")
    asked.add_argument("--nat", action="append", default=[], help="a member that nobody can dial")
    asked.add_argument("--peer", action="append", default=[], help="p2:up=5,rtt=200")
    asked.add_argument("command", nargs="+")
    return asked


def main() -> None:
    """Enter namespaces of our own, make the lab there, run the command, and let all of it vanish."""
    args = parser().parse_args()
    if os.environ.get("NETLAB") != "lab":
        if reason := why_not():
            print(f"netlab: no lab here: {reason}", file=sys.stderr)
            raise SystemExit(UNAVAILABLE)
        os.environ["NETLAB"] = "lab"
        os.execvp("unshare", [*UNSHARE, "--kill-child", sys.executable, str(HERE), *sys.argv[1:]])
    run_iproute("mount", "-t", "tmpfs", "tmpfs", "/run")  # ours alone: `ip netns` keeps its names there
    up(args)
    raise SystemExit(subprocess.run(args.command).returncode)


if __name__ == "__main__":
    main()
