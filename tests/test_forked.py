"""A python that is forked is what `subprocess` would have started: its child, with its files and status."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Forked, needs_fork

pytestmark = [pytest.mark.slow, needs_fork]
TOOL = [sys.executable, "-m", "json.tool", "--compact"]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_module_that_subprocess_runs_is_forked_and_is_a_child_of_who_started_it(forked: Forked) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with forked.forker.forking():
        tool = subprocess.Popen(TOOL, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
        command = Path(f"/proc/{tool.pid}/cmdline").read_bytes()
        parent, session = parent_of(tool.pid), os.getsid(tool.pid)
        printed = tool.communicate('{"a": [1, 2]}')
        broken = subprocess.run(TOOL, input="{", capture_output=True, text=True, check=False)

    assert b"scripts.swarms.forked" in command
    assert (parent, session) == (os.getpid(), tool.pid)
    assert (printed, tool.returncode) == (('{"a":[1,2]}\n', ""), 0)
    assert (broken.returncode, broken.stdout) == (1, "")
    assert "Expecting" in broken.stderr


def test_it_has_the_folder_and_the_open_files_that_it_is_given(forked: Forked, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("[3]")
    come, go = os.pipe()
    with forked.forker.forking():
        subprocess.run([*TOOL, "here", f"/dev/fd/{go}"], cwd=tmp_path, pass_fds=[go], check=True)
    os.close(go)

    assert os.read(come, 1000) == b"[3]\n"
    os.close(come)


def test_what_a_forked_command_starts_is_forked_too(forked: Forked, tmp_path: Path) -> None:
    code = (
        f"import subprocess; print(subprocess.run({TOOL!r}, input=b'[1]', capture_output=True), flush=True)"
    )
    (tmp_path / "starts.py").write_text(code)
    where = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    command = forked.start(tmp_path / "run", module="starts", before=where, forks=True)

    assert command.wait() == 0, command.said
    assert "returncode=0, stdout=b'[1]\\n', stderr=b''" in (tmp_path / "run" / "told").read_text()
