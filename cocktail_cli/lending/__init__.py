"""A machine that lends its memory for some layers; loaded by `join --layers` alone."""

from .lent_machine import LentMachine
