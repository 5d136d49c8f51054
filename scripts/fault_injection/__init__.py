"""A real run under random faults, and the promises it must keep: scripts/chaos."""
