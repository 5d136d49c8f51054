"""The command `cocktail doctor`: whether this machine can train, host a run, and join one."""
