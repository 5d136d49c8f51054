"""Note every function of this project that a process enters, in all its threads: for test_walk.py.

The process imports this before all of the project, or is a fork of one that did. SIGUSR1: what was entered so
far is forgotten; SIGUSR2: it is written to $WALK_TO/<process>.json, with the modules that are loaded.
"""

import inspect
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

ROOT = str(Path(__file__).parents[1]) + os.sep
ROOMS = tuple(ROOT + room + os.sep for room in ("compress", "transport", "recipes", "cocktail_cli"))
entered: set[CodeType] = set()


def trace(frame: FrameType, event: str, _: object) -> None:  # so that lines are not traced
    if event == "call":
        entered.add(frame.f_code)


def forget(*_: object) -> None:
    entered.clear()


def write(*_: object) -> None:
    found = {code for code in [*entered] if code.co_filename.startswith(ROOMS)}
    functions = [
        f"{code.co_filename.removeprefix(ROOT)}:{code.co_qualname}"
        for code in found
        if code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")  # no class, no lambda
    ]
    modules = [name for name in [*sys.modules] if name.split(".")[0] in {Path(room).name for room in ROOMS}]
    to = Path(os.environ["WALK_TO"], f"{os.getpid()}.json")
    part = to.with_suffix(".part")
    part.write_text(json.dumps({"functions": sorted(functions), "modules": sorted(modules)}))
    part.rename(to)


signal.signal(signal.SIGUSR1, forget)
signal.signal(signal.SIGUSR2, write)
threading.settrace(trace)
sys.settrace(trace)
