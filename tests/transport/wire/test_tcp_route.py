import socket
import subprocess
import sys

import pytest

from transport.protocol import CurveKeys, Unreachable
from transport.wire import DealerWire, TcpRoute


@pytest.mark.parametrize(
    ("host", "layer"),
    [("127.0.0.1", "tcp"), ("no-such-host.invalid", "dns"), ("a..b", "dns"), ("a" * 70 + ".org", "dns")],
)
def test_an_address_that_cannot_be_dialled_is_told_by_its_layer(host: str, layer: str) -> None:
    with pytest.raises(Unreachable) as raised:
        TcpRoute(host, 1).probe()

    assert raised.value.layer == layer
    assert host in str(raised.value)


def test_an_address_that_accepts_connections_is_told_as_one_of_ip() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        assert TcpRoute("localhost", there.getsockname()[1]).probe() == "127.0.0.1"


@pytest.mark.parametrize(("after", "layer"), [(1.0, "key"), (5.0, "handshake")])
def test_a_handshake_that_a_hub_breaks_off_late_is_told_as_slow_not_as_another_key(
    after: float, layer: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        wire = DealerWire([TcpRoute("127.0.0.1", there.getsockname()[1])], CurveKeys.generate().public)
        wire.dial(0)
        there.accept()[0].close()  # of the probe
        wire.poll(60.0)  # until it is resolved
        connection, _ = there.accept()
        wire._connecting[0] -= after  # so long ago it was connected

        connection.close()
        while not (events := wire.poll(60.0)):
            pass

        assert events[0].error.layer == layer
        wire.close()


WITHOUT_MEMORY = """
import resource
from transport.protocol import CurveKeys
from transport.wire import DealerWire, TcpRoute

wire = DealerWire([TcpRoute("127.0.0.1", 1)], CurveKeys.generate().public)
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 2**20, now + 2**20))
wire.dial(0)
print(wire.poll(10.0)[0].error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_dial_for_which_there_is_no_thread_fails_instead_of_lasting_for_ever() -> None:
    said = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, timeout=600)

    assert said.stdout == "cannot dial 127.0.0.1:1: this machine has no memory for another thread\n"
