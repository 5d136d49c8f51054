"""A peer of a hub that floods it: flooded_peer.py FLOW BUSY SECONDS HUB KEY

Prints by how many MiB it has grown, how many messages it has read, and what has ended its connection. It
reads nothing for BUSY seconds, as where its thread has no turn, and then what comes, for SECONDS or until its
connection has ended.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from transport.protocol import parse_address
from transport.wire import Connected, DealerWire, Disconnected, TcpRoute


def resident() -> int:
    """Return the most bytes that this process has had in memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(line.split()[1]) << 10


def main(flow: int, busy: float, seconds: float, hub: str, key: str) -> None:
    wire, before, ended, said = DealerWire([TcpRoute(*parse_address(hub))], key), resident(), "", 0
    wire.dial(flow)
    until = time.monotonic() + seconds
    while time.monotonic() < until and not ended:
        for event in wire.poll(0.5):
            if isinstance(event, Connected):
                wire.send(flow, [b"here I am"])
                time.sleep(busy)
            elif isinstance(event, Disconnected):
                ended = str(event.error)
            else:
                said += 1
    print(f"{(resident() - before) >> 20} {said} {ended}")
    wire.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
