"""Other users of a machine see no secret of a command that was given a run's URL."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from cocktail_cli.machine.own_process import masked

URL = "cocktail://KEY.TOKEN@127.0.0.1:29400/amber-otter-42"
COMMAND = """
import json, sys
from cocktail_cli.machine.own_process import hide_token
hide_token()
print(json.dumps(sys.argv), flush=True)
input()
"""


@pytest.mark.skipif(os.name != "posix" or not shutil.which("ps"), reason="no exec, or no ps")
@pytest.mark.parametrize("url", [URL, "cocktail://KEY.TOK", f"cocktail join '{URL}'"])
def test_a_command_with_a_run_url_hides_its_token_from_argv(url: str) -> None:
    arguments = ["-c", COMMAND, "join", url, "--name", "ann"]
    with subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        heard = json.loads(process.stdout.readline())
        asked = ["ps", "-ww", "-o", "args=", "-p", str(process.pid)]
        seen = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        process.stdin.write("\n")

    assert heard == ["-c", "join", url, "--name", "ann"]
    assert "KEY" not in seen
    assert f"join {masked(url)} --name ann" in seen
