"""Objectives, which a run minimizes: the loss of the next token, or that of an extension."""

from .next_tokens import NextTokens, objective_of
from .objective import BatchLoss, Bounds, Measured, Objective, evaluate, measured
