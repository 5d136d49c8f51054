"""Optional capabilities, a folder each, as `cocktail_cli.assembly` lists them."""
