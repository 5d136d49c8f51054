"""The process that coordinates a run: the server thread and its state machine."""

from .hub_state import Extend, HubParts, HubState, Late
from .malloc_tuning import keep_freed_memory
from .server import Hub
