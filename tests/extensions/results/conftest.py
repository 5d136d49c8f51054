"""Fixtures: a run's folder with a base model."""

from test_snapshot_thread import base, story  # noqa: F401
