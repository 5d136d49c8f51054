"""The stages of `scripts/gpu`: a command each, what was estimated, and which figures its output has."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from scripts.report import rows

Figures = dict[str, float | int | str]

PYTHON, COCKTAIL = [sys.executable], [sys.executable, "-m", "cocktail_cli"]
HERE = "scripts.first_gpu.programs"
LORA_MICRO_BATCH, LORA_BATCH = 4, 16  # sequences, where adapters are trained side by side
ENDING = 1.0  # minutes that the study takes to cut a cell short, measure it and write its row


@dataclass(frozen=True)
class Scale:
    """Sizes of the models and vectors."""

    vectors: tuple[str, str] = ("1.3e9", "6.05e9")
    models: tuple[str, str, str] = ("opt-1.3b", "gptj-6b", "llama-8b")
    parity: int = 30_000_000
    planned: str = "gptj-6b"
    length: int = 512
    study: tuple[str, ...] = ("--model", "smollm2")  # where README's rows are, its list of cells


SMALL = "--rows 4 --length 32 --steps 4 --held 8 --cell peers=4,lora=4"
TINY = Scale(
    ("2e5", "3e5"),
    ("tiny", "tiny", "tiny"),
    200_000,
    "opt",
    32,
    ("--model", "{folder}/models/tiny", "--results", "{folder}/quality.jsonl", *SMALL.split()),
)


@dataclass(frozen=True)
class Stage:
    """One command. It may take `seconds`, and fewer where less is left."""

    name: str
    command: Sequence[str]
    estimate: str  # what is expected, in words; figures of the same stage stand beside it
    figures: Callable[[str], Figures]
    environment: dict[str, str] = field(default_factory=dict)
    seconds: float = 90.0
    resumes: bool = False  # stopped at its limit it has kept what it did, and goes on the next time


def last_object(output: str) -> dict[str, Any]:
    """Parse the last line that is a JSON object; {} where there is none."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else {}


def picked(*keys: str) -> Callable[[str], Figures]:
    """Build a reader of these keys of the last JSON object."""

    def read(output: str) -> Figures:
        found = last_object(output)
        return {key: rounded(found[key]) for key in keys if key in found}

    return read


def rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def step_figures(output: str) -> Figures:
    """Read `bench_step --json`, the phases of its exchange too; compare with a plain step."""
    times = "step_s", "compute_s", "optimizer_s", "codec_s", "plain_s"
    found = picked("parameters", "tokens_per_s", *times, "memory_bytes")(output)
    if {"step_s", "plain_s"} <= found.keys():
        found["beyond_plain"] = round(float(found["step_s"]) / float(found["plain_s"]) - 1, 4)
    return found | {name: rounded(took) for name, took in last_object(output).get("phases", {}).items()}


def codec_figures(output: str) -> Figures:
    return {
        key: round(last_object(output)["rows"][0][key], 2) for key in ("encode_ms", "decode_ms", "floor_ms")
    }


def doctor_figures(output: str) -> Figures:
    levels = [finding["level"] for finding in last_object(output)["findings"]]
    return {level: levels.count(level) for level in ("ok", "note", "warn", "fail") if level in levels}


def outcomes(output: str) -> Figures:
    counts = re.findall(r"(\d+) (passed|failed|skipped)", output)
    return {what: int(count) for count, what in counts}


def planned_figures(output: str) -> Figures:
    """Read the last column of bench_memory's table: the whole, planned / measured."""
    rows = [line.split("|") for line in output.splitlines() if "planned / measured" in line]
    return {row[1].split(",")[0].strip(): float(row[-2]) for row in rows}


def run_figures(output: str) -> Figures:
    steps = [json.loads(line) for line in output.splitlines() if '"event": "step"' in line]
    members = {name for step in steps for name in step["accepted"]}
    return {
        "steps": len(steps),
        "peers": len(members),
        "fingerprints": len({s["fingerprint"] for s in steps}),
    }


def study_figures(output: str) -> Figures:
    return {"cells": len(re.findall(r"rate .* seed \d+: ", output))}


def stages(device: str, folder: Path, scale: Scale, minutes: float = 8.0) -> list[Stage]:
    """List the stages, the most telling first: times of what people train, then proofs, then the study, whose
    cells take what there is of `minutes`."""
    on = ["--device", device]
    json_on = [*on, "--json"]
    words = ["--data", "builtin:python-docs", f"max_length={scale.length}"]

    def program(*words: str) -> list[str]:
        return [*PYTHON, "-m", HERE, *words, *on]

    def step(recipe: str, model: str, *more: str) -> list[str]:
        place = str(folder / "models" / model)
        command = [*PYTHON, "-m", "scripts.bench.step", recipe, "--model", place, "--steps", "3"]
        return [*command, *words, *more, *json_on]

    def codec(parameters: str) -> list[str]:
        return [*PYTHON, "-m", "scripts.bench.compress", "--params", parameters, *json_on]

    def memory(*models: str) -> list[str]:
        return [*PYTHON, "-m", "scripts.bench.memory", *on, "--only", ",".join(models)]

    tests = ("tests/compress/backends", "tests/compress/test_fingerprint.py")
    kernels = ["-m", "pytest", "-p", "no:cacheprovider", *tests]
    no_compiler = {"CC": "/bin/false", "TRITON_CACHE_DIR": str(folder / "no-triton-cache")}
    swarm = ["launch", "smoke", "--peers", "2", *json_on, "--port", "0", "--bind", "127.0.0.1", "-o"]
    small, large, larger = scale.models
    clock = ["--minutes", f"{max(min(9.0, minutes) - ENDING, 0.5):g}"]
    clock += ["--results", str(rows.FOLDER / "quality.jsonl")]
    study = [*PYTHON, "-m", "scripts.study.run", *on, *clock]
    study += [word.format(folder=folder) for word in scale.study]
    llama = partial(step, "llama-3.1-8b-lora", larger)
    everything = "gpt-neox", "gptj", "llama", "opt", "qwen3"
    left = picked("handoff", "keep", "restore", "equal")
    equal = f"global_batch_size={LORA_BATCH}", f"per_device_train_batch_size={LORA_MICRO_BATCH}"
    adapters = *equal, "optim=adamw_torch_fused", "--peers", "1"
    speed = picked("tokens_per_s", "step_s", "memory_bytes")
    with_trl = "trl", str(folder / "models" / larger), str(scale.length)

    def model(name: str) -> Stage:
        return Stage(
            f"model {name}", program("models", str(folder / "models"), name), "", picked("gigabytes")
        )

    every = [
        Stage("doctor", [*COCKTAIL, "doctor", *json_on], "no fail", doctor_figures),
        Stage("codec 1.3 B", codec(scale.vectors[0]), "GPU's part of encoding < 50 ms", codec_figures),
        model(small),
        Stage("step 1.3 B", step("opt-1.3b", small), "beyond plain < .03", step_figures),
        Stage("codec 6 B", codec(scale.vectors[1]), "difference 2 ms, host 1 to 4 s", codec_figures),
        model(large),
        Stage("step 6 B", step("gptj-6b-full", large), "beyond plain < .03", step_figures),
        Stage("leaving", program("leaving", str(folder / "models" / small)), "< .5 byte a parameter", left),
        Stage("parity", program("parity", str(scale.parity)), "equal", picked("equal", "packets")),
        Stage(
            "two peers", [*COCKTAIL, *swarm, str(folder / "swarm"), "max_steps=20"], "2 peers", run_figures
        ),
        Stage("no compiler", codec("3e6"), "the host encodes", codec_figures, no_compiler),
        Stage("kernels", [*PYTHON, *kernels], "all pass", outcomes),
        model(larger),
        Stage("8 B LoRA, TRL", program(*with_trl), "", speed),
        Stage("8 B LoRA, TRL with liger", program(*with_trl, "liger"), "faster, and smaller", speed),
        Stage("8 B LoRA, cocktail", llama(*adapters), "as TRL with liger", step_figures),
        Stage("8 B load_in_4bit=true", llama("load_in_4bit=true"), "a step", step_figures),
        Stage("8 B load_in_8bit=true", llama("load_in_8bit=true"), "a step", step_figures),
        Stage("8 B dtype=float16", llama("dtype=float16"), "a step", step_figures),
        *(Stage(f"memory {name}", memory(name), "within .1 of 1", planned_figures) for name in everything),
        Stage("memory 6 B", memory(scale.planned), "within .1 of 1", planned_figures),
        Stage("study", study, "", study_figures, seconds=540.0, resumes=True),
    ]
    return list({stage.name: stage for stage in every}.values())
