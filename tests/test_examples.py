"""The files of scripts/examples are what their readers expect, and use what the command has."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from forked import Forked, needs_fork

from cocktail_cli.errors import EXIT
from cocktail_cli.main import command_table
from cocktail_cli.signals import LEAVE_WITHIN, PAUSE_WITHIN

HERE = Path(__file__).resolve().parent.parent / "scripts" / "examples"
AGAIN = str(EXIT["lost"])
ROOMS = ("cocktail_cli", "compress", "recipes", "transport")
UNIX = pytest.mark.skipif(os.name == "nt", reason="bash")

# What Kubernetes documents of an object (batch/v1, core/v1): its fields, and what they hold. None: any value.
CONTAINER = {
    "name": None,
    "image": None,
    "command": None,
    "env": {
        "name": None,
        "value": None,
        "valueFrom": {"fieldRef": {"fieldPath": None}, "secretKeyRef": None},
    },
    "resources": {"limits": None, "requests": None},
    "securityContext": {"allowPrivilegeEscalation": None},
    "volumeMounts": {"name": None, "mountPath": None},
}
POD = {
    "restartPolicy": None,
    "terminationGracePeriodSeconds": None,
    "automountServiceAccountToken": None,
    "securityContext": {"runAsNonRoot": None, "runAsUser": None, "fsGroup": None},
    "tolerations": {"key": None, "operator": None, "value": None, "effect": None},
    "containers": CONTAINER,
    "volumes": {"name": None, "emptyDir": {"medium": None, "sizeLimit": None}},
}
JOB = {
    "apiVersion": None,
    "kind": None,
    "metadata": {"name": None, "labels": None},
    "spec": {
        "parallelism": None,
        "completions": None,
        "completionMode": None,
        "backoffLimitPerIndex": None,
        "maxFailedIndexes": None,
        "podFailurePolicy": {
            "rules": {
                "action": None,
                "onExitCodes": {"containerName": None, "operator": None, "values": None},
                "onPodConditions": {"type": None, "status": None},
            }
        },
        "template": {"metadata": {"labels": None}, "spec": POD},
    },
}
# What SkyPilot documents of a task.
TASK = {
    "name": None,
    "workdir": None,
    "resources": {
        "accelerators": None,
        "use_spot": None,
        "disk_size": None,
        "job_recovery": {"strategy": None, "max_restarts_on_errors": None, "recover_on_exit_codes": None},
    },
    "envs": None,
    "secrets": None,
    "setup": None,
    "run": None,
}


def text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def loaded(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load(text(name)))


def strangers(found: Any, known: Mapping[str, Any] | None, at: str = "") -> Iterator[str]:
    """Fields that nobody documents."""
    if known is None:
        return
    for item in found if isinstance(found, list) else [found]:
        assert isinstance(item, dict), at
        for key, value in item.items():
            if key not in known:
                yield f"{at}.{key}"
            else:
                yield from strangers(value, known[key], f"{at}.{key}")


EXAMPLES = sorted(path for path in HERE.iterdir() if path.is_file() and path.suffix != ".md")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_every_option_of_an_example_is_one_of_its_command(path: Path) -> None:
    commands = command_table([]).commands
    lines = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith(("#", "rem", "<"))
    ]
    for line in lines:
        for name, options in re.findall(r"cocktail,? (join|launch|stop)\b([^;]*)", line):
            known = {option for parameter in commands[name].params for option in parameter.opts}
            used = set(re.findall(r"(?<=[\s,])--?[a-z][a-z-]*", options))
            assert used - known == set()
            assert name != "join" or used & {"-y", "--yes"}, "nobody is there to be asked"


def test_the_systemd_unit_starts_again_on_exit_75_alone_and_leaves_time_for_the_goodbye() -> None:
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text("cocktail-join.service"))
    service = unit["Service"]

    assert (service["Restart"], service["RestartForceExitStatus"]) == ("no", AGAIN)
    assert float(service["TimeoutStopSec"]) > LEAVE_WITHIN
    assert service["KillMode"] == "mixed"


@UNIX
@pytest.mark.parametrize("resumed", [False, True])
def test_the_hosts_unit_resumes_a_run_that_is_there_and_its_stop_waits_for_the_pause(
    tmp_path: Path, resumed: bool
) -> None:
    """systemd sends SIGTERM, which ends a run, as soon as ExecStop ends."""
    cocktail = tmp_path / ".local" / "bin" / "cocktail"
    cocktail.parent.mkdir(parents=True)
    cocktail.write_text('#!/bin/sh\necho "$@"\n[ "$1" = stop ] || sleep 0.3\n')
    cocktail.chmod(0o755)
    (tmp_path / "my-run").mkdir()
    if resumed:
        (tmp_path / "my-run" / "run.json").touch()
    unit = ConfigParser(interpolation=None)
    unit.read_string(text("cocktail-host.service"))
    start, stop = (
        shlex.split(unit["Service"][key].replace("%h", str(tmp_path)).replace("$$", "$"))
        for key in ("ExecStart", "ExecStop")
    )

    with subprocess.Popen(start, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as launch:
        assert launch.stdout is not None
        said = launch.stdout.readline()  # it runs
        reaper = threading.Thread(target=launch.wait)  # as systemd does, else it stays as a zombie
        reaper.start()
        subprocess.run(stop, cwd=tmp_path, env=os.environ | {"MAINPID": str(launch.pid)}, check=True)

        assert launch.poll() == 0
        reaper.join()
    assert said.startswith("resume my-run " if resumed else "launch my.yaml -o my-run ")
    assert float(unit["Service"]["TimeoutStopSec"]) > PAUSE_WITHIN
    final = {EXIT[code] for code in ("usage", "recipe_invalid", "preflight", "no_result")}
    assert set(map(int, unit["Service"]["RestartPreventExitStatus"].split())) == final


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("name", ["cocktail-host.service", "cocktail-join.service"])
def test_systemd_finds_nothing_wrong_with_a_unit(name: str, tmp_path: Path) -> None:
    unit = tmp_path / name
    unit.write_text(text(unit.name).replace("%h/.local/bin/cocktail", "/bin/true"), encoding="utf-8")
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}

    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)], env=environment, capture_output=True, text=True
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_the_scheduled_task_runs_the_script_that_starts_again_on_exit_75() -> None:
    space = {"t": "http://schemas.microsoft.com/windows/2004/02/mit/task"}
    task = ElementTree.fromstring(text("cocktail-join-task.xml"))
    command = task.findtext("t:Actions/t:Exec/t:Command", namespaces=space)
    script = (HERE / "cocktail-join.cmd").read_bytes()

    assert task.tag == f"{{{space['t']}}}Task"
    assert task.findtext("t:Settings/t:ExecutionTimeLimit", namespaces=space) == "PT0S", "no end after 3 days"
    assert command is not None
    assert command.endswith("cocktail-join.cmd")
    assert f"if not %ERRORLEVEL%=={AGAIN} exit /b".encode() in script
    assert script.count(b"\n") == script.count(b"\r\n")


def test_the_kubernetes_job_has_documented_fields_and_starts_again_unless_it_is_of_no_use() -> None:
    job = loaded("kubernetes.yaml")

    assert list(strangers(job, JOB)) == []
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    refused = job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert refused == sorted({EXIT["usage"], EXIT["recipe_invalid"], EXIT["rejected"]})
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "a policy by exit codes wants it"
    assert pod["terminationGracePeriodSeconds"] > LEAVE_WITHIN
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_kubectl_reads_the_job() -> None:
    command = ["kubectl", "set", "env", "--local", "-f", str(HERE / "kubernetes.yaml"), "A=B", "-o", "name"]

    assert subprocess.run(command, capture_output=True, text=True).stdout == "job.batch/cocktail-peers\n"


@UNIX
def test_the_dockerfile_has_shell_lines_that_bash_reads_and_is_given_what_it_installs() -> None:
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text("Dockerfile"), flags=re.MULTILINE)).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line]

    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL"}
    assert {word for word, _ in steps} == known | {"ENTRYPOINT", "CMD"}
    for word, script in steps:
        if word == "RUN":
            subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    given = {line[1:] for line in text("Dockerfile.dockerignore").splitlines() if line.startswith("!")}
    assert given == {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", *ROOMS}
    assert all((HERE.parent.parent / path).exists() for path in given)


@UNIX
def test_the_skypilot_task_has_documented_fields_and_scripts_that_bash_reads() -> None:
    task = loaded("skypilot.yaml")

    assert list(strangers(task, TASK)) == []
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT["lost"]]
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.slow
@needs_fork
def test_the_notebook_launches_joins_stops_early_and_loads_the_model(tmp_path: Path, forked: Forked) -> None:
    here = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}"
    notebook = forked.start(tmp_path, module="scripts.examples.notebook", before=here, forks=True)
    status = notebook.process.wait(200)
    printed = (tmp_path / "told").read_text()

    assert status == 0, notebook.said
    assert "can be joined at cocktail://" in printed
    assert "guest trains from round" in printed
    assert re.search(r"stopped by its host \(stopped from Python\): \d+ of 60 steps ->", printed)
    assert "recipe_invalid ['  override  learning_rat  did you mean" in printed
    assert "\nThe import statement" in printed


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Stand-ins: a cocktail that ends as CODE says, after it was told to where CODE is empty; a scontrol."""
    peer = '#!/bin/sh\ntrap "echo left; exit 75" TERM\necho "$@"\n[ -n "$CODE" ] && exit "$CODE"\n'
    peer += "while :; do sleep 0.02; done\n"
    for name, script in (("cocktail", peer), ("scontrol", '#!/bin/sh\necho "scontrol $@"\n')):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    return os.environ | array | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}


@UNIX
@pytest.mark.parametrize(("code", "again"), [("75", True), ("0", False), ("6", False)])
def test_a_slurm_task_is_queued_again_where_its_peer_ends_with_75(
    cluster: dict[str, str], code: str, again: bool
) -> None:
    done = subprocess.run(
        ["bash", str(HERE / "slurm.sh")], env=cluster | {"CODE": code}, capture_output=True, text=True
    )

    assert done.returncode == int(code)
    assert ("scontrol requeue 7_3" in done.stdout) == again
    assert done.stdout.startswith("join @")


@UNIX
def test_a_slurm_task_whose_node_is_taken_lets_its_peer_leave_first(cluster: dict[str, str]) -> None:
    command = ["bash", str(HERE / "slurm.sh")]
    with subprocess.Popen(command, env=cluster | {"CODE": ""}, stdout=subprocess.PIPE, text=True) as task:
        assert task.stdout is not None
        assert task.stdout.readline().startswith("join @")
        task.send_signal(signal.SIGTERM)
        said = task.stdout.read()

    assert said.splitlines() == ["left", "scontrol requeue 7_3"]
    assert task.returncode == EXIT["lost"]
