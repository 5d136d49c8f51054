"""A peer that is several machines, each holding consecutive layers (pipeline stages)."""

from .replica_loading import load_replica
from .ring_head import RingHead
from .ring_request import LineLost, StageLines
from .stage_machine import CONFIG, StageMachine
from .stage_part import StagePart, check_staged
from .stage_server import StageServer
from .staged_peer import StagedWorker, build_staged_peer, mend
