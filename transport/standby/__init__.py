"""A standby: a machine that has what a hub needs to go on. A run without one does not load this package."""

from .follower import Follower
from .lookout import Lookout
from .replica_source import ReplicaSource
from .replication import Replication
from .succession import Succession
