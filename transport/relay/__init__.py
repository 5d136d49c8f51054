"""The relay, and a hub's side of it. A run without a relay does not load this package."""

from .certificate import Certificate, CertificateError
from .hub_tunnel import HubTunnel, check_relay
from .relay_server import Relay, RelayLimits
