"""A fixture for runs whose losses are compared."""

from collections.abc import Iterator

import pytest

from transport.scheduling import LoadBalancer


@pytest.fixture(scope="module", autouse=True)
def even_shares() -> Iterator[None]:
    """Shares that follow a clock differ by run, and losses with them. They have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadBalancer, "note", lambda *_: None)
        yield
