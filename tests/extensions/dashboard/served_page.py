"""A page served by a thread of this process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cocktail_cli.extensions.dashboard.web_server import PATIENCE, Page, PageServer, listen


@contextmanager
def served_page(page: Page, patience: float = PATIENCE) -> Iterator[int]:
    """Serve a page inside; yield its port."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(PageServer(page, patience).serve(sock))

    def end() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()

    with listen("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield sock.getsockname()[1]
        loop.call_soon_threadsafe(end)
        thread.join(120)
