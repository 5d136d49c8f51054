"""Every claim about a GPU (claims_*.py, and the tests of the kernels), in a process that has a fake one."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from build_fake_cuda import NotHere, built

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
FOLDER = Path(__file__).parent
KERNELS = FOLDER.parent / "compress/backends/test_triton_kernels.py"


def test_all_that_is_claimed_of_a_gpu_holds_on_the_fake_one() -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton, whose interpreter runs the kernels, has no build for this platform")
    try:
        built()
    except NotHere as reason:
        pytest.skip(str(reason))
    claims = sorted(map(str, FOLDER.glob("claims_*.py")))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]),
    }
    options = [
        "-p",
        "fake_cuda",
        "-p",
        "fake_triton",
        "-q",
        "-x",
        "--durations=5",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-o", "python_files=claims_*.py", *claims, str(KERNELS)],
        capture_output=True, text=True, timeout=1100, env=environment, cwd=FOLDER.parents[1],
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
