"""Commands that start, join and steer a run."""
