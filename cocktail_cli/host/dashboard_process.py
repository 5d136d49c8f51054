"""The dashboard beside a launch (`--dashboard`), in its own process: visitors cannot slow the hub down."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cocktail_cli.ui import Event, PageOpened, Warning

from .command_process import start_command


@dataclass
class DashboardProcess:
    """Runs `cocktail dashboard` until its stdin is closed, and a little longer."""

    process: subprocess.Popen[str] | None = None
    line: str = ""  # the first line that it printed; empty until then

    def start(self, folder: Path) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = start_command(["dashboard", str(folder), "--life-line", "--json"], **pipes)
        threading.Thread(target=self._listen, name="page", daemon=True).start()

    def _listen(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline() or "\n"

    def news(self) -> Iterator[Event]:
        """Yield once where the page is, or why there is none."""
        if not self.line:
            return
        said, self.line = json.loads(self.line.strip() or "{}"), ""
        if "url" in said:
            yield PageOpened(said["url"])
        else:
            yield Warning(f"there is no page: {said.get('error', {}).get('message', 'its process ended')}")

    def close(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError):  # it has ended
                self.process.stdin.close()
