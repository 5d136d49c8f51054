"""This process beside others: its arguments, its memory, and the code that comes with a model.

Other users of a machine can read the arguments of a running command. So a command that is given a run URL
starts itself again with the URL in its environment, which only its own user can read, and without the join
token in its arguments.

glibc gives each thread a heap, and returns of it only what lies above the last block in use. A session of a
peer has threads of its own, so each left megabytes in heaps that no later session used (recipes/LOG.md).

At a hub each round allocates N packets in chunks and frees them at its close. By default glibc returns such
memory to the system, which maps and clears it again in the next round, page by page: a third of the time that
a hub spends beside ZeroMQ (recipes/LOG.md). So up to KEPT bytes of freed memory stay in its process. What one
crowd of peers has needed goes back nevertheless: every TRIM_S seconds all free pages do, which costs the next
round a few milliseconds of page faults. That concerns the first heap. Each thread would have further heaps of
64 MB, returned to the system whenever empty: a sixth of the time for decoding packets. So all threads of a
hub share the first heap.

A recipe may ask to run code that comes with a model (`model.trust_remote_code`), and a host may serve it;
neither is enough: `--trust-remote-code` on this machine is.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cocktail_cli.errors import Failure

if TYPE_CHECKING:
    from recipes.config import Recipe

SCHEME = "cocktail://"  # of a run URL
TYPED = "COCKTAIL_TYPED_URL"  # the URL that was an argument
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
KEPT = 256 << 20  # bytes, at the end of a heap
TRIM_S = 30.0
LARGEST = 32 << 20  # bytes of an allocation that a heap serves; glibc's maximum


def hide_token() -> None:
    """Start this process anew without the token; in the new process put the URL back into sys.argv.

    Call it first. It does nothing on Windows, which does not show arguments to other users, or where sys.argv
    is not what was typed.
    """
    if url := os.environ.pop(TYPED, ""):
        sys.argv[:] = [url if argument == masked(url) else argument for argument in sys.argv]
        delay_interrupts(False)
        return
    given, typed = sys.argv[1:], sys.orig_argv
    urls = {argument for argument in given if SCHEME in argument}
    if os.name != "posix" or len(urls) != 1 or typed[-len(given) :] != given or not sys.executable:
        return
    (url,) = urls
    delay_interrupts(True)  # until the new process has come this far: Python's start prints a traceback
    shown = [masked(argument) if argument == url else argument for argument in typed]
    os.execve(sys.executable, shown, {**os.environ, TYPED: url})


def delay_interrupts(wanted: bool) -> None:
    """Have Ctrl-C wait, also in a process that takes this one's place; or let it through again."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK if wanted else signal.SIG_UNBLOCK, {signal.SIGINT})


def masked(url: str) -> str:
    return f"{SCHEME}***@{url.rpartition('@')[2]}" if "@" in url else f"{SCHEME}***"


def in_child(work: Callable[[], object], patience: float) -> None:
    """Do `work`, of one thread, in a child process that outlives this one; wait for it for up to `patience`
    seconds. Raises OSError where it has failed by then. Windows forks no process: it is done here."""
    if not hasattr(os, "fork"):
        work()
        return
    if (child := os.fork()) == 0:
        import torch

        try:
            os.setsid()
            for stream in range(3):  # a reader of this process's output is not to wait for the child
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)
            torch.set_num_threads(1)  # those of the parent are not here
            work()
            os._exit(0)
        finally:
            os._exit(1)
    end, ended = time.monotonic() + patience, (0, 0)
    while not ended[0] and time.monotonic() < end:
        time.sleep(0.02)
        ended = os.waitpid(child, os.WNOHANG)
    if ended[1]:
        raise OSError("the process that wrote it has failed, perhaps as the disk is full")


def return_freed_memory() -> bool:
    """Return to the system the free pages of all heaps. False where the C library is not glibc."""
    library = glibc()
    if library is not None:
        library.malloc_trim(0)
    return library is not None


def keep_freed_memory() -> bool:
    """Keep the memory that is freed in this process. False where the C library is not glibc."""
    library = glibc()
    if library is None:
        return False

    def return_pages() -> None:
        while True:
            time.sleep(TRIM_S)
            library.malloc_trim(0)

    options = (M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, KEPT), (M_ARENA_MAX, 1)
    applied = [library.mallopt(*option) for option in options]
    threading.Thread(target=return_pages, name="cocktail-malloc", daemon=True).start()
    return all(applied)


def glibc() -> ctypes.CDLL | None:
    """Return the C library, where it is glibc: musl has no thresholds, and no pages to trim."""
    try:
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
    except OSError:
        return None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


FLAG = "--trust-remote-code"


def check_trust(recipe: Recipe, trusted: bool, code: str = "usage") -> None:
    """Raise Failure where the recipe's model brings code that may not run here."""
    if recipe.model.trust_remote_code and not trusted:
        raise Failure(
            code,
            f"{recipe.model.model_name_or_path} comes with Python code, which this recipe wants to run here",
            hints=(f"{FLAG}, if you trust whoever wrote it with this machine",),
        )


def isolate_model_code(trusted: bool) -> None:
    """Have transformers copy such code to a temporary folder of this process, before transformers is
    imported.

    In its shared folder, processes that start together read files that another has half written.
    """
    if trusted:
        place = tempfile.mkdtemp(prefix="cocktail-code-")
        os.environ["HF_MODULES_CACHE"] = place
        atexit.register(shutil.rmtree, place, ignore_errors=True)
