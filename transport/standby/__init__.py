"""The hub's side of a standby, a machine that has what a hub needs to go on. A run without one does not load
this package."""

from .replica_source import ReplicaSource
from .replication import Replication
