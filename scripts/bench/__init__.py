"""Measurements of single parts: the hub, joining, packets, growth of costs."""
