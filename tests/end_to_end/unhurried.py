"""A fixture for runs whose results are compared."""

from collections.abc import Iterator

import pytest

from transport.scheduling import LoadBalancer

LATE_S = 60.0  # seconds after which a round goes on without a peer that it knows, or a newcomer


@pytest.fixture(scope="module", autouse=True)
def unhurried() -> Iterator[None]:
    """Shares that follow a clock differ by run, and so does who is late on a busy machine. Both have tests of
    their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadBalancer, "note", lambda *_: None)
        for limit in ("FLOOR", "MOMENT"):
            patch.setattr(f"transport.scheduling.straggler_deadline.{limit}", LATE_S)
        yield
