"""The process that coordinates a run: the server thread and its state machine."""

from .handshake import Extend, HubParts, Late
from .hub_state import HubState
from .server import Hub
