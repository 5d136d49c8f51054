"""The commands `launch`, `relay`, `join` and `doctor` say what they know of relays and proxies."""

import json
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from in_this_process import Run
from stalling_hub import Material, stalling_hub
from tls_only import Firewall, server_context

from cocktail_cli.assembly import Server, url_to_dial
from cocktail_cli.errors import Failure
from cocktail_cli.extensions.reach.hub_tunnel import HubTunnel
from cocktail_cli.extensions.reach.relay_server import Relay
from transport import RunKeys
from transport.wire import routes_to

HERE, SHUT = "127.0.0.1", 1  # a port of the loopback at which nothing listens


@pytest.mark.parametrize(
    ("line", "exit", "cause", "remedy"),
    [
        ("launch smoke --relay a+b", 2, "--relay 'a+b'", "HOST or HOST:PORT"),
        ("launch smoke --relay 127.0.0.1:1", 5, "no connection to the relay 127.0.0.1:1", "`cocktail relay`"),
        ("relay --port 0 --tls-cert a.pem", 2, "--tls-cert and --tls-key go together", "private key"),
        ("relay --port 0 --tls-cert a.pem --tls-key b.pem", 2, "--tls-cert a.pem", "a.pem: no such file"),
    ],
)
def test_a_relay_that_cannot_be_had_ends_with_cause_and_remedy(
    cocktail: Run, line: str, exit: int, cause: str, remedy: str
) -> None:
    said = cocktail(*line.split())

    assert (said.exit, cause in said.err, remedy in said.err) == (exit, True, True), said.err


READS = """
import sys
from cocktail_cli.assembly import url_to_dial
from transport.wire import routes_to

print([str(route) for route in routes_to(url_to_dial(sys.argv[1]))])
print(any(name.startswith("cocktail_cli.extensions") for name in sys.modules))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "environment", "ways"),
    [
        ((), {}, 1),
        ((), {"NO_PROXY": "a.org"}, 1),
        (("relay:29399",), {}, 3),
        ((), {"https_proxy": "proxy:3128"}, 2),
    ],
)
def test_a_run_that_is_dialled_directly_imports_nothing_of_it(
    places: tuple[str, ...], environment: dict[str, str], ways: int
) -> None:
    url = str(RunKeys.generate().url("hub.example.org", 29400, "a-run", *places))
    done = subprocess.run([sys.executable, "-c", READS, url], capture_output=True, text=True, env=environment)
    routes, loaded = done.stdout.splitlines()

    assert len(json.loads(routes.replace("'", '"'))) == ways
    assert loaded == str(ways > 1)


def test_a_standby_behind_a_relay_is_dialled_by_who_has_read_a_url_without_one() -> None:
    url = url_to_dial(str(RunKeys.generate().url("127.0.0.1", 29400, "a-run")))

    assert len(routes_to(url)) == 1
    assert len(routes_to(url.at("127.0.0.2:29400+relay:29399", url.key))) == 3


def test_a_proxy_that_is_none_is_told_before_anything_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://")
    with pytest.raises(Failure, match="HTTPS_PROXY names no proxy"):
        url_to_dial(str(RunKeys.generate().url("127.0.0.1", 29400, "a-run")))


def test_doctor_names_the_proxies(cocktail: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [cocktail("doctor", "--device", "cpu")]
    monkeypatch.setenv("HTTPS_PROXY", "http://me:s3cret@proxy:3128")
    said.append(cocktail("doctor", "--device", "cpu"))
    lines = [line for one in said for line in one.out.splitlines() if line.split()[1] == "proxy"]

    assert [line.split()[2] for line in lines] == ["none", "HTTPS_PROXY"]
    assert "http://proxy:3128: runs are dialled through it where nothing else works" in lines[1]


@pytest.mark.slow
def test_doctor_tries_each_way_to_a_run(cocktail: Run, tmp_path: Path) -> None:
    material = Material.prepare(tmp_path / "base")
    with (
        stalling_hub(material, tmp_path / "ledger") as running,
        closing(Relay("127.0.0.1", 0, tls=server_context())) as relay,
        closing(Firewall(relay.port)) as firewall,
        closing(HubTunnel(f"{HERE}:{relay.port}", Server(running.keys.pair, HERE, running.hub.port))),
    ):
        only_443 = replace(running.url, port=SHUT, places=(f"127.0.0.1:{firewall.port}",))
        ways = cocktail("doctor", str(only_443), "--json")
        relay.close()
        none = cocktail("doctor", str(only_443), "--json")

    assert running.left("doctor") == ["left: the doctor has seen enough"]
    assert ways.exit == 0, ways.out
    found = {about: of(ways.out, about) for about in ("direct", "relay", "tls", "run")}
    assert [one["level"] for one in found.values()] == ["warn", "warn", "ok", "ok"]
    assert f"no connection to 127.0.0.1:{SHUT}" in found["direct"]["text"]
    assert "is no relay" in found["relay"]["text"]
    assert "its certificate is not trusted here (self-signed certificate)" in found["tls"]["text"]
    assert f"at the relay 127.0.0.1:{firewall.port} by TLS" in found["run"]["text"]
    assert none.exit == 4
    assert "none of 3 ways" in of(none.out, "run")["text"]
    assert of(none.out, "tls")["level"] == "warn"


def of(findings: str, about: str) -> dict[str, str]:
    return next(f for f in json.loads(findings)["findings"] if f["about"] == about)
