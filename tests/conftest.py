"""Rules of all tests: nothing reaches the internet, nothing writes outside its own folder."""

import gc
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Forked
from hypothesis import settings

MEMORY = Path("/dev/shm")  # a file system in memory
LARGEST = 2 << 30  # bytes, several times the files of all tests

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported by any test
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if shutil.which("nvidia-smi") is None:  # no GPU: kernels are interpreted; read when Triton is first imported
    os.environ["TRITON_INTERPRET"] = "1"

if MEMORY.is_dir():
    room = os.statvfs(MEMORY)
    if not room.f_flag & os.ST_NOEXEC and room.f_bavail * room.f_frsize > LARGEST:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # a disk takes 5 ms for each fsync

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy a machine is. Each run draws others, so many runs try many examples.
settings.register_profile("patient", deadline=None, max_examples=40)
settings.load_profile("patient")
ROOT = Path(__file__).resolve().parent.parent


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with slow files where workers share them: none starts a long test when the others are done."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_collectstart() -> None:
    """Collect no garbage while tests and libraries are imported, as that takes half as long as they do."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage again, but not in what the libraries have made."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders that are not there yet: pytest would look through all of them to number one more."""
    folder = tmp_path_factory.mktemp("homes")
    return map(folder.joinpath, map(str, itertools.count()))


@pytest.fixture(autouse=True)
def own_home(homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry of runs and the cache of a test are its own."""
    home = next(homes)
    home.mkdir()
    monkeypatch.setenv("COCKTAIL_HOME", str(home))
    monkeypatch.setenv("COCKTAIL_CONFIG", str(home / "config.toml"))
    for name in (
        "COCKTAIL_RUN_URL",
        "COCKTAIL_DEBUG",
        "COCKTAIL_CACHE",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Starts commands in processes of their own, fast."""
    with Forked() as process:
        yield process


@pytest.fixture(scope="module")
def fast_starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork what a test starts as `python -m MODULE`, where that can be."""
    if sys.platform.startswith("linux"):
        forked: Forked = request.getfixturevalue("forked")
        with forked.forker.forking():
            yield
    else:
        yield


@pytest.fixture
def root() -> Path:
    """The repository."""
    return ROOT
