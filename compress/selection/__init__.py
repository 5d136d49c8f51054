"""Top-K by magnitude."""
