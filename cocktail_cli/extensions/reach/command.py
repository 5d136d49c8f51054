"""`cocktail relay`: join hubs and peers that cannot reach each other, on any small server; and a check of
`cocktail doctor`."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cocktail_cli import options
from cocktail_cli.errors import Failure
from cocktail_cli.machine import BIND, ListenAddress, free_address, joined
from cocktail_cli.signals import leave_on_signal
from cocktail_cli.ui import counted, found, say, say_json

if TYPE_CHECKING:
    from recipes.errors import Finding

    from .relay_server import Certificate, Relay

RELAY_PORT = 29399
LOOK_S = 2.0  # seconds between two looks at what has changed
NETWORK = options.NETWORK
PORT = options.port("TCP port that hubs and peers dial; 0: any.", rich_help_panel=NETWORK)
LIMIT = "Limit what a run may send and receive: 100mbit."
RATE = options.parsed("--max-rate", "RATE", options.parse_rate, LIMIT, rich_help_panel=NETWORK)
RUNS = "Runs at the same time; each machine of a ring that nobody can dial is one more."
CONNECTIONS = "Connections of a run's peers; each has up to 5."
CERTIFICATE = "Certificate (PEM, with its chain): also serve WebSockets over TLS, at the same port."
KEY = "Its private key (PEM)."


def relay(
    bind: options.Bind = BIND,
    port: Annotated[int, PORT] = RELAY_PORT,
    max_rate: Annotated[float | None, RATE] = None,
    max_runs: Annotated[int, options.value("--max-runs", "N", RUNS, NETWORK, min=1)] = 64,
    max_connections: Annotated[
        int, options.value("--max-connections", "N", CONNECTIONS, NETWORK, min=1)
    ] = 4096,
    tls_cert: Annotated[Path | None, options.value("--tls-cert", "FILE", CERTIFICATE, NETWORK)] = None,
    tls_key: Annotated[Path | None, options.value("--tls-key", "FILE", KEY, NETWORK)] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Relay runs between hosts and volunteers, until Ctrl-C.

    It is for those who cannot reach each other: both dial out to it. It forwards what they encrypt for each
    other, stores nothing, and wants no account. The host of a run launches it with --relay and the name of
    this machine.

    Examples: cocktail relay
    cocktail relay --port 443 --max-rate 200mbit
    cocktail relay --port 443 --tls-cert fullchain.pem --tls-key privkey.pem

    With --tls-cert it is also reached from where only HTTPS gets out. A renewed certificate is read again.

    With --json each line is an object: address, runs, connections, refused.
    """
    from .relay_server import Relay, RelayLimits

    free_address(ListenAddress(bind, port))
    over, certificate = threading.Event(), certificate_of(tls_cert, tls_key)
    tls = certificate.context if certificate else None
    server = Relay(bind, port, RelayLimits(max_runs, max_connections, max_rate), tls)
    with closing(server), leave_on_signal(lambda _: over.set()):
        if not as_json:
            say(joined(bind, server.port))
        said: tuple[int, int] | None = None
        while not over.wait(LOOK_S if said else 0.0):
            now = server.runs, server.connections
            if now != said:
                tell(server, bind, as_json, quiet)
            said = now
            if certificate and (wrong := certificate.renewed()) and not quiet:
                say(f"warning: the renewed certificate is not used: {wrong}", err=True)


def certificate_of(cert: Path | None, key: Path | None) -> Certificate | None:
    """Read the files that --tls-cert and --tls-key name. Raises Failure (usage)."""
    from .relay_server import Certificate, CertificateError

    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise Failure("usage", "--tls-cert and --tls-key go together: a certificate and its private key")
    try:
        return Certificate(cert, key)
    except CertificateError as error:
        hints = ("a certificate in PEM, with the private key that belongs to it",)
        raise Failure("usage", f"--tls-cert {cert}, --tls-key {key}: {error}", hints=hints) from None


def tell(server: Relay, bind: str, as_json: bool, quiet: bool) -> None:
    """Print what the relay carries."""
    if as_json:
        carried = {"runs": server.runs, "connections": server.connections, "refused": server.refused}
        say_json({"address": joined(bind, server.port), **carried})
    elif not quiet:
        carries = f"{counted(server.runs, 'run')}, {counted(server.connections, 'connection')}"
        say(f"{carries}, {server.refused} refused by limits", err=True)
    sys.stdout.flush()


def proxy_finding() -> Finding:
    """Report the proxies that the environment names."""
    from .proxies import proxies_of

    proxies = proxies_of(os.environ)
    named = {"HTTPS_PROXY": proxies.https, "ALL_PROXY": proxies.every}
    said = ", ".join(f"{name} {proxy}" for name, proxy in named.items() if proxy)
    if proxies.every:
        return found("ok", "proxy", f"{said}: runs are dialled through it, but for those of NO_PROXY")
    return found(
        "ok", "proxy", f"{said}: runs are dialled through it where nothing else works" if said else "none"
    )
