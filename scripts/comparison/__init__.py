"""Cocktail beside torch DDP, PowerSGD, DiLoCo and hivemind on the same work: scripts/rivals."""
