"""The builtin tokenizer, ranks, a tiny model and its data."""

import pytest
from test_spread_peer import data, ranks  # noqa: F401
from tiny_models import BUILTIN

from recipes.models import open_tokenizer


@pytest.fixture
def tokenizer():
    return open_tokenizer(BUILTIN)
