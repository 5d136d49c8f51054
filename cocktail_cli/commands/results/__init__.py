"""Commands for the results of a run: model, report, text."""
