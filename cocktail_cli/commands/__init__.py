"""The commands of the command line; some are beside those that have much in common with them."""
