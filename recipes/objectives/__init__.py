"""Objectives, which a run minimizes: the loss of the next token, or of preference pairs."""

from .next_tokens import NextTokens
from .objective import BatchLoss, Measured, Objective, evaluate, measured
from .recipe_objective import objective_of
