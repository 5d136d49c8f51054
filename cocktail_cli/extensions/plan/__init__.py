"""The command `cocktail plan`: memory, bytes and hours of a run."""
