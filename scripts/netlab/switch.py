"""An ethernet switch in user space, with a delay and a loss of its own for each port. Started by lab.py.

    python switch.py PORTS.json      SIGHUP reads all but device and mac again, SIGTERM ends it

PORTS.json is a list of {"device", "mac", "delay_s", "loss", "loss_to", "up", "down", "up_queue_s",
"down_queue_s", "forgotten", "nat", "to"}. What comes from port i passes at most `up` bytes a second (0: all),
behind at most up_queue_s seconds of others; what goes to it passes `down`; and from it to the port of a mac
in `to` the rate there, behind a queue of the seconds there. A frame from port i to port j is
delay_i + delay_j on its way between the two lines, and is lost with probability loss_i, then loss_to_j.
Whenever `forgotten` of a port changes, the TCP connections it has had so far are dropped from then on. To a
port with `nat` only TCP passes that belongs to a connection begun from it; addresses are not rewritten.

This stands in for tc's netem, which many kernels lack, and for tbf: after a pause a token bucket lets some
packets through at once, which TCP (BBR) takes for the rate of the line. PACKET_VNET_HDR lets the kernel hand
over 64 KiB segments whole, so that Python can keep up with a gigabit.
"""

from __future__ import annotations

import contextlib
import json
import random
import select
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
EVERY_PROTOCOL = 3  # ETH_P_ALL
VNET_HEADER = 10  # bytes before the frame
LARGEST = 65536 + 64
BUFFER = 64 << 20
SEGMENT, HEADERS = 1448, 66  # of TCP over IPv4 on ethernet
AT_ONCE = 64  # frames taken from a port before the others have their turn


@dataclass(frozen=True)
class Frame:
    due: float  # monotonic seconds
    data: bytes


@dataclass
class SerialLine:
    """One direction of a line: a frame begins when the one before has ended, also after a pause."""

    rate: float = 0.0  # bytes a second; 0: no limit
    queue_s: float = 0.0
    busy: float = 0.0  # until when it is occupied

    def carry(self, data: bytes, at: float) -> float | None:
        """Return when a frame that comes at `at` is through; None: the queue is full, and it is lost."""
        if not self.rate:
            return at
        if self.busy > at + self.queue_s:
            return None
        self.busy = max(self.busy, at) + on_wire(data) / self.rate
        return self.busy


@dataclass
class Port:
    device: str
    mac: bytes
    socket: socket.socket
    delay_s: float = 0.0
    loss: float = 0.0  # 0 .. 1, of what comes from it
    loss_to: float = 0.0
    up: SerialLine = field(default_factory=SerialLine)
    down: SerialLine = field(default_factory=SerialLine)
    forgotten: int = 0
    nat: bool = False
    to: dict[bytes, SerialLine] = field(default_factory=dict)  # by the other port's mac
    connections: set[bytes] = field(default_factory=set)  # seen from this port
    # One queue for each port that frames come from: their delay is constant, so each is in order of `due`.
    queues: list[deque[Frame]] = field(default_factory=list)
    leaving: deque[Frame] = field(default_factory=deque)  # on its line down, or through it


def mac_bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def open_port(device: str) -> socket.socket:
    """A raw socket that sees what arrives on `device` and not what we send there ourselves."""
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL))
    for option in (33, 32, socket.SO_RCVBUF, socket.SO_SNDBUF):  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
        with contextlib.suppress(PermissionError):  # the FORCE ones need a privilege
            raw.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    raw.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    raw.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    raw.bind((device, EVERY_PROTOCOL))
    raw.setblocking(False)
    return raw


class Switch:
    """All ports and what is on its way between them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dead: set[bytes] = set()  # connections, each way
        self.ports = [
            Port(row["device"], mac_bytes(row["mac"]), open_port(row["device"]))
            for row in json.loads(path.read_text())
        ]
        self.reread()
        self.by_mac = {port.mac: port for port in self.ports}
        for port in self.ports:
            port.queues = [deque() for _ in self.ports]

    def reread(self) -> None:
        """Take over what each line is like, which may change while it runs; ports may not."""
        for port, row in zip(self.ports, json.loads(self.path.read_text()), strict=True):
            port.delay_s, port.loss, port.loss_to = row["delay_s"], row["loss"], row["loss_to"]
            port.up.rate, port.up.queue_s = row["up"], row["up_queue_s"]
            port.down.rate, port.down.queue_s = row["down"], row["down_queue_s"]
            port.nat = row["nat"]
            port.to = {mac_bytes(mac): SerialLine(*line) for mac, line in row["to"].items()}
            if row["forgotten"] != port.forgotten:
                port.forgotten = row["forgotten"]
                self.dead |= port.connections | {reverse(c) for c in port.connections}

    def run(self) -> None:
        sockets = {port.socket: number for number, port in enumerate(self.ports)}
        while True:
            heads = [q[0].due for port in self.ports for q in (*port.queues, port.leaving) if q]
            wait = max(0.0, min(heads) - time.monotonic()) if heads else None
            ready, _, _ = select.select(list(sockets), [], [], wait)
            for raw in ready:
                self.take(sockets[raw])
            self.give(time.monotonic())

    def take(self, number: int) -> None:
        """Read what has arrived at one port and queue it at the port it goes to."""
        source = self.ports[number]
        now = time.monotonic()
        for _ in range(AT_ONCE):
            try:
                data = source.socket.recv(LARGEST)
            except BlockingIOError:
                return
            if random.random() < source.loss:
                continue
            if (connection := connection_of(data)) is not None:
                source.connections.add(connection)
                if connection in self.dead:
                    continue
            if (sent := source.up.carry(data, now)) is None:
                continue
            known = self.by_mac.get(data[VNET_HEADER : VNET_HEADER + 6])
            for target in [known] if known else [port for port in self.ports if port is not source]:
                if target.nat and connection and reverse(connection) not in target.connections:
                    continue
                line = source.to.get(target.mac)
                passed = sent if line is None else line.carry(data, sent)
                if passed is not None and random.random() >= target.loss_to:
                    due = passed + source.delay_s + target.delay_s
                    target.queues[number].append(Frame(due, data))

    def give(self, now: float) -> None:
        """Pass what is due to its line down, and send what is through; a full device loses it."""
        for port in self.ports:
            while due := [queue for queue in port.queues if queue and queue[0].due <= now]:
                frame = min(due, key=lambda queue: queue[0].due).popleft()
                if (through := port.down.carry(frame.data, frame.due)) is not None:
                    port.leaving.append(Frame(through, frame.data))
            while port.leaving and port.leaving[0].due <= now:
                with contextlib.suppress(OSError):
                    port.socket.send(port.leaving.popleft().data)


def on_wire(data: bytes) -> int:
    """Count the bytes of the packets that a segment of up to 64 KiB is cut into, each with its own
    headers."""
    size = len(data) - VNET_HEADER
    return size + HEADERS * ((size - HEADERS - 1) // SEGMENT) if size > HEADERS + SEGMENT else size


def connection_of(data: bytes) -> bytes | None:
    """Find addresses and ports of a TCP segment over IPv4, sender's first; None for any other frame."""
    ip = VNET_HEADER + 14  # after the ethernet header
    if data[ip - 2 : ip] != b"\x08\0" or data[ip + 9 : ip + 10] != b"\6":
        return None
    tcp = ip + 4 * (data[ip] & 15)
    return data[ip + 12 : ip + 16] + data[tcp : tcp + 2] + data[ip + 16 : ip + 20] + data[tcp + 2 : tcp + 4]


def reverse(connection: bytes) -> bytes:
    return connection[6:] + connection[:6]


def main() -> None:
    switch = Switch(Path(sys.argv[1]))
    signal.signal(signal.SIGHUP, lambda *_: switch.reread())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    switch.path.with_suffix(".ready").touch()
    switch.run()


if __name__ == "__main__":
    main()
