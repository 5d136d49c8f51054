"""Commands for what a run has made."""
