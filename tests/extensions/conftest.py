"""Fixtures: what runs a command in this process, and a stand-in for the Hugging Face hub."""

from in_this_process import cocktail  # noqa: F401
from pushing_hub import hub  # noqa: F401
