"""Commands that check a recipe, a machine or a line before a run."""
