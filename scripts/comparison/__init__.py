"""Cocktail beside torch DDP, PowerSGD, DiLoCo, torchft and hivemind on the same work: scripts/rivals."""
