"""Commands of the command line, by the panel of the help they stand in."""
