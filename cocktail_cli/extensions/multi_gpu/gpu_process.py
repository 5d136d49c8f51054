"""`python -m cocktail_cli.extensions.multi_gpu.gpu_process`: one process of a peer on several.

Its last answer is any error. It never outlives the process that asks.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, NoReturn

from cocktail_cli.errors import EXIT, explain
from cocktail_cli.machine import limit_memory
from cocktail_cli.ui import guarded_output

if TYPE_CHECKING:
    from recipes.config import Recipe
    from recipes.training import ModelExtension

    from .fsdp_worker import FsdpWorker

BESIDE = ("save", "difference", "bring")


def main() -> NoReturn:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that no library prints between the answers
    process = Process(answers)
    threading.Thread(target=process.listen, args=(sys.stdin.buffer,), daemon=True).start()
    threading.Thread(target=process.serve_beside, daemon=True).start()
    with guarded_output(), process.telling():
        process.serve()
    raise AssertionError("it serves until it is ended")


class Process:
    """Answers in one thread, which may wait for other ranks, and `beside` in another; a third listens."""

    def __init__(self, answers: IO[str]) -> None:
        self.answers, self.writing = answers, threading.Lock()
        self.questions: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
        self.beside: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.rank: FsdpWorker | None = None

    def listen(self, stdin: IO[bytes]) -> None:
        """Read requests while another is worked on, so that the end of stdin is noticed at once."""
        for line in stdin:
            asked = json.loads(line)
            data = stdin.read(asked.pop("bytes"))
            if asked["do"] in BESIDE:
                self.beside.put(asked)
            else:
                self.questions.put((asked, data))
        os._exit(EXIT["lost"])

    def serve_beside(self) -> NoReturn:
        """Answer what needs no other rank, while this one computes."""
        with self.telling():
            while True:
                asked = self.beside.get()
                assert self.rank is not None
                self.rank.answer_beside(asked)
                self.say({"beside": True})
        raise AssertionError("it serves until it is ended")

    def serve(self) -> NoReturn:
        from .fsdp_worker import FsdpWorker

        asked, _ = self.questions.get()
        assert asked.pop("do") == "start"
        limit_memory([asked["device"]], asked.pop("vram_limit"))
        self.rank = FsdpWorker(**asked, read_recipe=recipe_and_extensions)
        answer: dict[str, Any] = {}
        while True:
            self.say(answer)
            answer = self.rank.answer(*self.questions.get())

    def say(self, answer: dict[str, Any]) -> None:
        with self.writing:
            print(json.dumps(answer), file=self.answers, flush=True)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Send any error inside as the last answer, and exit."""
        try:
            yield
        except BaseException as error:
            traceback.print_exc()
            failure = explain(error)
            self.say(json.loads(failure.as_json()))
            os._exit(failure.exit)  # at once: other ranks may wait in vain, and so would libraries


def recipe_and_extensions(text: str) -> tuple[Recipe, list[ModelExtension]]:
    """Read a recipe, and make the extensions of its training."""
    from cocktail_cli.assembly import model_extensions, recipe_type
    from recipes.config import recipe_from_json

    recipe = recipe_from_json(text, recipe_type)
    return recipe, model_extensions(recipe)


if __name__ == "__main__":
    main()
