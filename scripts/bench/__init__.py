"""Measurements of single parts: the hub, joining, memory, packets, growth of costs."""
