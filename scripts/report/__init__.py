"""RESULTS.md from the rows in scripts/measured: scripts/results."""
