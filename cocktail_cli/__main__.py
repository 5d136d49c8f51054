"""`python -m cocktail_cli`: the command where the script is not on the path (local peers are started so)."""

from cocktail_cli.main import main

main()
