"""`cocktail generate`: let a model write text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cocktail_cli.completion import run_names
from cocktail_cli.errors import Failure
from cocktail_cli.machine import load_run, read_run
from cocktail_cli.options import Json, TrustCode, argument, flag, value
from cocktail_cli.ui import say, say_json, say_text


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
