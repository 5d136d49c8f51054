"""Measurements of single parts: the hub, transfers, faults in a round, joining, memory, packets, growth of
costs."""
