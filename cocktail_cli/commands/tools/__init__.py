"""Tools: shipped recipes and benchmarks."""
