"""A headless Chromium, driven through chromedriver by WebDriver: HTTP and JSON, no library."""

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TAB, ENTER = "\ue004", "\ue007"


def missing() -> str:
    """Name the programs that this machine lacks, or return ""."""
    names = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(names)} here" if names else ""


class Browser:
    def __init__(self, port: int, folder: Path) -> None:
        self.address = f"http://127.0.0.1:{port}"
        arguments = [*FLAGS, f"--user-data-dir={folder}"]
        options = {"binary": shutil.which("chromium"), "args": arguments}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        self.session = ""
        self.session = self.ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        head = f"{self.address}/session" + (f"/{self.session}" if self.session else "")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(head + path, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]

    def open(self, url: str) -> None:
        """Anew, also where only what follows the # differs."""
        self.ask("POST", "/url", {"url": "about:blank"})
        self.ask("POST", "/url", {"url": url})
        self.wait("return location.href !== 'about:blank' && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Evaluate JavaScript in the page; a promise is awaited."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": []})

    def wait(self, script: str, seconds: float = 15.0) -> None:
        """Until a JavaScript returns something true."""
        until = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < until, f"still not so: {script}"
            time.sleep(0.05)

    def press(self, *keys: str) -> None:
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})

    def click(self, css: str) -> None:
        found = self.ask("POST", "/element", {"using": "css selector", "value": css})
        self.ask("POST", f"/element/{next(iter(found.values()))}/click", {})

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def look_like(self, width: int, height: int, scheme: str) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.devtools(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def complaints(self) -> list[str]:
        """Errors and warnings of the page since they were last asked for."""
        entries = self.ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}", "--log-level=OFF"], stdout=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < until, "chromedriver does not answer"
                time.sleep(0.05)
        made = Browser(port, folder)
        try:
            yield made
        finally:
            made.ask("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(120)
