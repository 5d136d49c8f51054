"""Held-out loss of compression against all-reduce, cell by cell: scripts/bench_quality."""
