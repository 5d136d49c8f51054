"""A communication hook of torch's DistributedDataParallel: `CocktailState`, `cocktail_hook`."""

from .gradient_hook import CocktailState, cocktail_hook
