"""Hostile bytes against everything that arrives from somebody else: scripts/fuzz."""
