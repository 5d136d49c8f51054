"""The command `cocktail`: wires compress, transport and recipes together and shows what happens."""

__version__ = "0.2.0.dev0"
