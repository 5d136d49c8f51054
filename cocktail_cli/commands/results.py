"""`cocktail export`: write the model of a run, from its ledger, as a folder that transformers loads;
`cocktail generate`: let a model write text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from cocktail_cli.assembly import files_of
from cocktail_cli.errors import Failure
from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.machine import check_trust, load_run, read_run
from cocktail_cli.options import (
    Json,
    ProgressOption,
    Quiet,
    RunArgument,
    TrustCode,
    argument,
    flag,
    run_names,
    value,
)
from cocktail_cli.ui import (
    Display,
    ProgressMeter,
    Warning,
    generate_command,
    open_view,
    say,
    say_json,
    say_own,
    say_text,
)


def export(
    run: RunArgument,
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", metavar="DIR", help="Folder to create.")],
    checkpoint: Annotated[
        str | None,
        value(
            "--checkpoint", "N|best", "Export the model after N rounds; best: at the lowest held-out loss."
        ),
    ] = None,
    merge_lora: Annotated[
        bool, flag("--merge-lora", "Merge the adapters into the base: the model then needs no peft.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        value("--dtype", "DTYPE", "float32, bfloat16 or float16 (default: the base's; adapters: float32)."),
    ] = None,
    push: Annotated[
        str | None,
        value("--push", "ORG/NAME", "Upload the model to this repository of the Hugging Face hub."),
    ] = None,
    private: Annotated[
        bool | None, flag("--private/--public", "Visibility of a new repository (default: your account's).")
    ] = None,
    trust_remote_code: TrustCode = False,
    as_json: Json = False,
    quiet: Quiet = False,
    progress: ProgressOption = "auto",
) -> None:
    """Write a run's model: all that is committed, while it runs or after.

    Any round can be had again: the ledger has them all.

    Examples: cocktail export RUN -o model
    cocktail export RUN -o best --checkpoint best
    cocktail export RUN -o model --merge-lora --dtype bfloat16 --push me/my-model
    """
    from cocktail_cli.host import CommittedModel, checked_recipe
    from recipes.downloads import Repository

    record = load_run(run)
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise Failure(
            "output_in_use", f"{output_dir} is not an empty folder", hints=("choose another: -o DIR",)
        )
    source = Path(record.output_dir)
    recipe = checked_recipe(record)
    check_trust(recipe, trust_remote_code)
    if merge_lora and recipe.lora is None:
        said = f"--merge-lora: {record.run} trains the whole model, there are no adapters"
        raise Failure("usage", said, hints=("leave it out",))
    round = None if checkpoint is None else round_of(checkpoint, source / in_folder.LEDGER)
    repository = Repository(push, private) if push else None
    if repository is not None:
        repository.open()  # before anything is written, as a missing token is the most frequent error
    with open_view(Display(quiet=quiet or as_json, progress=progress)) as view:
        place = CommittedModel(recipe, Path(record.base), source, lambda what: view.show(Warning(what)))
        meter = ProgressMeter(view.show, "writing the model", "bytes")
        merged = place.write_merged(output_dir, dtype, round) if merge_lora else None
        rounds = merged if merged is not None else place.write_model(output_dir, dtype, meter, round)
    told: dict[str, object] = {"run": record.run, "model": str(output_dir), "rounds": rounds}
    if repository is not None:
        told["pushed"] = repository.push(output_dir, f"{record.run}, {rounds} rounds", files_of(recipe))
    if as_json:
        say_json(told)
        return
    say_own(str(output_dir))
    if not quiet:
        if checkpoint == "best":
            say(f"best: after {rounds} rounds", err=True)
        if repository is not None:
            say(f"pushed: {told['pushed']}", err=True)
        if command := generate_command(str(output_dir), record.prompt):
            say(f"Next: {command}", err=True)


def round_of(checkpoint: str, ledger: Path) -> int:
    """Return the number of rounds in the model that --checkpoint names.

    Raises:
        Failure: usage.
    """
    from transport import Ledger

    with Ledger(ledger, write=False) as opened:
        committed, evaluations = len(opened.rounds()), opened.evaluations()
    if checkpoint == "best":
        if not evaluations:
            hint = "with checkpoint.eval_steps and held-out data a recipe has it measured"
            raise Failure(
                "usage", "--checkpoint best: held-out loss was not measured in this run", hints=(hint,)
            )
        return min(evaluations, key=lambda row: row.loss).round
    if not checkpoint.isdecimal() or int(checkpoint) > committed:
        hint = f"0 (the base) to {committed}, or best"
        raise Failure("usage", f"--checkpoint {checkpoint}: {committed} rounds are committed", hints=(hint,))
    return int(checkpoint)


def generate(
    model: Annotated[str, argument("DIR|RUN", "A model's folder, or a finished run's name.", run_names)],
    prompt: Annotated[
        str | None, argument("PROMPT", "Question, or text to continue (default: stdin).", show_default=False)
    ] = None,
    max_new_tokens: Annotated[int, value("--max-new-tokens", "N", "Most tokens to generate.", min=1)] = 128,
    temperature: Annotated[float, value("--temperature", "T", "0 takes the likeliest token.", min=0.0)] = 0.0,
    seed: Annotated[int | None, value("--seed", "N", "Seed, to sample the same text again.")] = None,
    base: Annotated[bool, flag("--base", "Print the base model's text first, to compare.")] = False,
    raw: Annotated[bool, flag("--raw", "Continue the prompt as it is, without the chat template.")] = False,
    interactive: Annotated[bool, flag("-i", "Chat: one prompt after the other, until Ctrl-D.")] = False,
    trust_remote_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Let a model answer a question, or go on from a text.

    A run that trained conversations answers, by its chat template; one that trained texts goes on.

    Examples: cocktail generate outputs/mine "When does the harbour office open?" --base
    cocktail generate outputs/smoke "The import statement"
    cocktail generate RUN -i
    """
    from recipes.models import TextGenerator

    if interactive and (base or raw):
        raise Failure("usage", f"one of {'--base' if base else '--raw'} and -i at a time")
    if "/" in model and not Path(model).exists():
        hint = "a run, or the folder of a model; `cocktail runs` lists the runs of this machine"
        raise Failure("run_unknown", f"no folder {model} here, and generate fetches nothing", hints=(hint,))
    start = Path(load_run(model).base) if base else None
    folder = Path(model) if Path(model).is_dir() else Path(load_run(model).output_dir)
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        hint = "of a run that was cut short: cocktail export RUN -o DIR"
        raise Failure("model_invalid", f"{folder} holds no model (no config.json)", hints=(hint,))
    settings = (max_new_tokens, temperature, seed)
    if interactive:
        writer = TextGenerator(folder, trust_remote_code)
        said: list[dict[str, str]] = []
        for asked in prompts(prompt):
            said.append({"role": "user", "content": asked})
            text = writer.reply(said, *settings)
            said.append({"role": "assistant", "content": text})
            if as_json:
                say_json({"model": str(folder), "prompt": asked, "text": text})
            else:
                say_text(text)
        return
    if prompt is None:
        if sys.stdin.isatty():
            raise Failure("usage", "no prompt", hints=('cocktail generate DIR "a prompt"',))
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise Failure("usage", "the prompt is empty", hints=('cocktail generate DIR "a prompt"',))
    record = read_run(folder)
    plain = raw or (record is not None and record.chats is False)

    def written(place: Path) -> str:
        writer = TextGenerator(place, trust_remote_code, tokenizer=folder)
        if plain or not writer.chats:
            return prompt + writer.generate(prompt, *settings)
        return writer.reply([{"role": "user", "content": prompt}], *settings)

    # one after the other, as two models may not fit; both use the run's tokenizer
    before = written(start) if start else None
    text = written(folder)
    if as_json:
        compared = {} if before is None else {"base": str(start), "base_text": before.removeprefix(prompt)}
        say_json({"model": str(folder), "prompt": prompt, "text": text.removeprefix(prompt)} | compared)
    else:
        say_text(text if before is None else f"base:\n{before}\n\n{model}:\n{text}")
    if not text.removeprefix(prompt).strip():
        say(f"{model} ended at once, without a word", err=True)


def prompts(first: str | None) -> Iterator[str]:
    """Yield what the user types, line by line, until the end of the input."""
    if first is not None:
        yield first
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line
