"""Compiles device.cpp once for each version of it and each torch into the user's cache folder (some 10 s)."""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from platformdirs import user_cache_path

SOURCE = Path(__file__).with_name("device.cpp")


class NotHere(Exception):
    """This machine cannot have the fake device; the message says why."""


def built() -> Path:
    """Return the library, compiled if it is not yet there. Raises NotHere."""
    if not sys.platform.startswith("linux"):
        raise NotHere("the fake CUDA device is built on Linux only")
    import torch  # where the caller is to load the library before torch, a process before it has built it

    if torch.version.cuda or torch.version.hip:
        raise NotHere(f"torch {torch.__version__} brings a real CUDA backend, which cannot be replaced")
    return compiled(torch_folder())


def torch_folder() -> Path:
    """Return the folder of the torch that this process would import."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        raise NotHere("torch is not installed")
    return Path(found.origin).parent


def place() -> Path:
    """Return the path of the library, which is linked to the libraries in torch's folder: another checkout,
    with an environment of its own, has another. torch need not be imported for it."""
    built_for = (version("torch"), sysconfig.get_platform(), str(torch_folder()))
    digest = hashlib.sha256(b"\0".join([SOURCE.read_bytes(), *map(str.encode, built_for)])).hexdigest()[:16]
    return user_cache_path("cocktail-tests") / f"fake-cuda-{digest}.so"


def compiled(torch: Path) -> Path:
    library = place()
    if library.exists():
        return library
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise NotHere("no C++ compiler is here (g++ or clang++) to build the fake CUDA device")
    library.parent.mkdir(parents=True, exist_ok=True)
    include, lib = torch / "include", torch / "lib"
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [
            *(compiler, "-O0", "-std=c++20", "-shared", "-fPIC", "-w", "-DAT_PER_OPERATOR_HEADERS"),
            *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", str(SOURCE), "-o", str(made)),
            *(f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            raise NotHere(f"{compiler} cannot build the fake CUDA device: {done.stderr.strip()[:500]}")
        made.replace(library)  # whole or not at all: another process may be building it, too
    return library
