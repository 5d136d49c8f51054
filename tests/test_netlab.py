"""The network lab does to packets what it says; skipped, with the reason, where namespaces cannot be made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NETLAB = ROOT / "scripts" / "netlab" / "lab.py"

# The hub answers each byte; p1 times one round trip, then how long 250 kB take on their way up.
HUB = """
import socket
listening = socket.create_server(("10.77.0.1", 9000))
print("listening", flush=True)
talk, _ = listening.accept()
talk.sendall(talk.recv(1))
left = 250_000
while left:
    left -= len(talk.recv(left))
talk.sendall(b"!")
"""
PEER = """
import socket, time
talk = socket.create_connection(("10.77.0.1", 9000), timeout=10)
talk.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
started = time.monotonic(); talk.sendall(b"?"); talk.recv(1); rtt = time.monotonic() - started
started = time.monotonic(); talk.sendall(bytes(250_000)); talk.recv(1); whole = time.monotonic() - started
print(rtt, whole)
"""
BOTH = """
import subprocess, sys
hub, peer = sys.argv[1:]
def inside(member, text):
    return ["ip", "netns", "exec", f"lab-{member}", sys.executable, "-c", text]

with subprocess.Popen(inside("hub", hub), stdout=subprocess.PIPE) as server:
    server.stdout.readline()
    done = subprocess.run(inside("p1", peer), timeout=600)
sys.exit(done.returncode)
"""


@pytest.mark.slow
def test_a_link_has_the_round_trip_and_the_rate_it_was_given() -> None:
    line = ["--peers", "1", "--up", "10", "--rtt", "60"]
    inner = [sys.executable, "-c", BOTH, HUB, PEER]
    done = subprocess.run(
        [sys.executable, str(NETLAB), *line, "--", *inner],
        capture_output=True,
        text=True,
        timeout=600,
        env={key: value for key, value in os.environ.items() if key != "NETLAB"},
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())

    assert done.returncode == 0, done.stderr
    rtt, whole = map(float, done.stdout.split())
    assert 0.06 <= rtt < 0.5
    assert 0.2 <= whole < 3  # 250 kB at 10 Mbit/s, each way of writing it
