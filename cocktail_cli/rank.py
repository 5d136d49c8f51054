"""`python -m cocktail_cli.rank`: a process of cocktail_cli/ranks.py; recipes/rank.py has what it does.

Whatever goes wrong is its last answer. It never outlives the process that asks.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from typing import IO, Any, NoReturn

from cocktail_cli.errors import EXIT, explain
from cocktail_cli.machine import limit_memory


def main() -> NoReturn:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    questions: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(sys.stdin.buffer, questions), daemon=True).start()
    try:
        serve(questions, answers)
    except BaseException as error:
        traceback.print_exc()
        failure = explain(error)
        print(failure.as_json(), file=answers, flush=True)
        os._exit(failure.exit)  # at once: other ranks may wait in vain, and so would libraries


def listen(stdin: IO[bytes], questions: queue.SimpleQueue[tuple[dict[str, Any], bytes]]) -> None:
    """Take in questions while another is worked on, so that the end of them is known at once."""
    for line in stdin:
        asked = json.loads(line)
        questions.put((asked, stdin.read(asked.pop("bytes"))))
    os._exit(EXIT["lost"])


def serve(questions: queue.SimpleQueue[tuple[dict[str, Any], bytes]], answers: IO[str]) -> NoReturn:
    from recipes.rank import Rank

    asked, _ = questions.get()
    assert asked.pop("do") == "start"
    limit_memory([asked["device"]], asked.pop("vram_limit"))
    rank = Rank(**asked)
    answer: dict[str, Any] = {}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        answer = rank.answer(*questions.get())


if __name__ == "__main__":
    main()
