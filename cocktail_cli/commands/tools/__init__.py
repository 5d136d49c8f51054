"""Commands beside a run: shipped recipes and benchmarks."""
