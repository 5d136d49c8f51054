"""`cocktail validate`: check a recipe, its data and its model before anything large is fetched; `cocktail
preview`: show the tokens that its rows become, before anything is trained.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby, repeat
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cocktail_cli import options
from cocktail_cli.machine import check_trust
from cocktail_cli.recipe_request import RecipeRequest, room_for
from cocktail_cli.ui import Style, print_findings, say, say_json, say_styled, say_text
from recipes.errors import Finding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from recipes.config import Resolved
    from recipes.data import Preview, Sample

BINS = 8  # bins of the histogram
BAR = 40  # columns of the longest bar


def preview(
    recipe: options.RecipeOrModel = None,
    overrides: options.Overrides = None,
    count: Annotated[int, options.value("-n", "N", "Samples to show from each data set.", min=0)] = 3,
    data: options.DataPath = None,
    model: options.ModelName = None,
    trust_remote_code: options.TrustCode = False,
    as_json: options.Json = False,
    no_color: options.NoColor = False,
) -> None:
    """Show samples as the model gets them.

    Trained tokens are green, the others dim; without colours in [ ]. Reads the first 1,024 rows of each
    data set and fetches no weights.

    Examples: cocktail preview smoke
    cocktail preview my.yaml --data rows.jsonl -n 1

    With --json one object: {"v": 1, "recipe", "data": [{"path", "type", "rows", "samples", "tokens",
    "trained", "dropped", "cut", "left_out", "full", "lengths", "warnings", "not_used", "shown":
    [{"documents", "parts": [{"text", "tokens", "trained"}]}]}]}
    """
    from recipes.data import preview_data
    from recipes.models import check_fit, config_folder, load_tokenizer, vocabulary_of

    request = RecipeRequest.of(recipe, overrides, data, model)
    check_trust(request.load(), trust_remote_code)
    request, said = request.choose(room_for(["auto"]) if request.is_own else None)
    resolved = request.load()
    folder = config_folder(resolved.model)
    tokenizer = load_tokenizer(resolved.model, folder)
    check_fit(resolved, folder)
    seen = preview_data(resolved, tokenizer, vocabulary=vocabulary_of(folder))
    longest = resolved.data.max_length
    if as_json:
        rows = [described(one, tokenizer, longest, count) for one in seen]
        say_json({"recipe": resolved.name, "data": rows})
        return
    say(*said, err=True)
    color = sys.stdout.isatty() and not no_color and not os.environ.get("NO_COLOR")
    for one in seen:
        for line in lines(one, tokenizer, longest, count, color):
            say(line) if isinstance(line, str) else say_styled(line)
    say(f"Next: cocktail launch {request.typed(trust_remote_code=trust_remote_code)}", err=True)


def described(one: Preview, tokenizer: PreTrainedTokenizerBase, longest: int, count: int) -> dict[str, Any]:
    """Describe a data set as a JSON object."""
    samples, dropped = one.packed.samples, one.packed.dropped
    tokens = sum(len(sample.tokens) for sample in samples)
    several = len(one.sequences) > 1
    lengths = [n for sample in samples for n in (sample.lengths if several else (len(sample.tokens),))]
    return {
        "path": one.path,
        "type": one.row_type,
        "rows": dropped.documents,
        "samples": len(samples),
        "tokens": tokens,
        "trained": sum(sample.count for sample in samples),
        "dropped": dropped.tokens,
        "cut": dropped.truncated,
        "left_out": dropped.samples,
        "full": round(tokens / (len(lengths) * longest), 4) if lengths else 0.0,
        "lengths": histogram(lengths, longest),
        "warnings": list(one.warnings),
        "not_used": list(one.unused),
        "shown": [{"documents": len(s.lengths), "parts": list(parts(s, tokenizer))} for s in samples[:count]],
    }


def parts(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """Split a sample into stretches of one document that are all trained or all masked."""
    start = 0
    for length in sample.lengths:
        places = range(start, start + length)
        for trained, run in groupby(places, key=lambda place: bool(sample.trained[place])):
            ids = sample.tokens[list(run)]
            text = tokenizer.decode(ids)
            yield {"text": text, "tokens": len(ids), "trained": trained, "document": start}
        start += length


def lines(
    one: Preview, tokenizer: PreTrainedTokenizerBase, longest: int, count: int, color: bool
) -> Iterator[str | list[tuple[str, Style]]]:
    """Describe a data set in lines of text; those of a sample have several, in parts with their styles."""
    told = described(one, tokenizer, longest, count)
    yield f"{one.path}: {one.row_type}, the first {told['rows']:,} rows are {told['samples']:,} samples"
    for number, (sample, shown) in enumerate(zip(one.packed.samples, told["shown"], strict=False), start=1):
        names: Iterator[str] = repeat("")
        several = f" in {shown['documents']} documents" if shown["documents"] > 1 else ""
        if len(one.sequences) > 1:
            names = (name.ljust(10) for name in one.sequences)
            several = ", a pair" if len(one.sequences) == 2 else f", {len(one.sequences)} sequences"
        yield ""
        yield f"sample {number}: {len(sample.tokens):,} tokens{several}, {sample.count:,} trained"
        for _, document in groupby(shown["parts"], key=lambda part: part["document"]):
            yield [(next(names), {}), *(painted(part["text"], part["trained"], color) for part in document)]
    yield ""
    yield f"lengths, in tokens (max_length {longest:,})"
    top = max((row["samples"] for row in told["lengths"]), default=1) or 1
    for row in told["lengths"]:
        bar = "▇" * round(BAR * row["samples"] / top)
        yield f"  {row['from']:>6,} - {row['to']:<6,} {row['samples']:>6,} {bar}"
    share = 100 * told["trained"] / max(told["tokens"], 1)
    every = told["tokens"] + told["dropped"]
    yield f"trained   {share:.1f} % of {told['tokens']:,} tokens"
    yield f"full      {100 * told['full']:.1f} % of max_length, on average"
    yield (
        f"dropped   {told['dropped']:,} tokens ({100 * told['dropped'] / max(every, 1):.1f} %): "
        f"{told['cut']:,} rows cut, {told['left_out']:,} samples without a trained token"
    )
    if one.unused:
        yield f"not used  {', '.join(one.unused)}"
    for warning in one.warnings:
        yield f"warn      {warning}"


def painted(text: str, trained: bool, color: bool) -> tuple[str, Style]:
    """Give a stretch the style of whether it is trained; without colours, brackets where it is not."""
    if color:
        return text, {"fg": "green"} if trained else {"dim": True}
    return text if trained else f"[{text}]", {}


def histogram(lengths: list[int], longest: int) -> list[dict[str, int]]:
    """Count samples, of several sequences each, by length, in equal ranges from 1 to max_length."""
    edges = [longest * bin // BINS for bin in range(BINS + 1)]
    counts = [0] * BINS
    for length in lengths:
        counts[next(bin for bin in range(BINS) if length <= edges[bin + 1])] += 1
    return [
        {"from": low + 1, "to": high, "samples": n}
        for low, high, n in zip(edges[:-1], edges[1:], counts, strict=True)
    ]


COLUMN = 56  # column of the origins


def validate(
    recipe: options.RecipeOrModel = None,
    overrides: options.Overrides = None,
    data: options.DataPath = None,
    model: options.ModelName = None,
    offline: Annotated[
        bool,
        options.flag(
            "--offline", "Do not contact the Hugging Face hub; files missing from the cache are not checked."
        ),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as failures.")] = False,
    print_: Annotated[
        bool, options.flag("--print", "Print every value with its origin, and check nothing else.")
    ] = False,
    trust_remote_code: options.TrustCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check a recipe: keys, model, data, and the first 1,000 rows.

    Of a model on the hub only config and tokenizer are fetched, of its data sets the first rows.

    Examples: cocktail validate my.yaml learning_rate=1e-4 --data rows.jsonl
    cocktail validate smoke --print
    cocktail validate --model ./my-model --data rows.jsonl

    With --json one object: {"v": 1, "recipe", "hash", "findings": [{"level", "about", "text", "hint"}]}
    """
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub and datasets are first imported
    request = RecipeRequest.of(recipe, overrides, data, model)
    check_trust(request.load(), trust_remote_code)
    request, said = request.choose(room_for(["auto"]) if request.is_own else None)
    resolved = request.resolve()
    if print_:
        say_text(printed(resolved, as_json))
        return
    checked = resolved.recipe
    told, beside = findings(resolved, said, offline), {"recipe": checked.name, "hash": checked.recipe_hash}
    print_findings(told, as_json, quiet, "recipe_invalid", strict, **beside)
    if not as_json and not quiet:
        again = request.typed(trust_remote_code=trust_remote_code)
        say(f"Next: cocktail plan {again}", f"      cocktail launch {again}", err=True)


def findings(resolved: Resolved, notes: Sequence[str], offline: bool = False) -> Iterator[Finding]:
    """Check the recipe itself first, as that needs no torch, then its model and data."""
    said = sum(origin is not None for _, _, origin in values(resolved))
    digest = resolved.recipe.recipe_hash[:8]
    yield Finding("ok", "recipe", f"schema {resolved.recipe.version}, {said} keys set, sha256 {digest}")
    yield from (Finding("ok", "recipe", note) for note in notes)
    from recipes.planning import examine

    yield from examine(resolved.recipe, offline)


def values(resolved: Resolved) -> Iterator[tuple[tuple[str | int, ...], Any, str | None]]:
    """Yield (key, value, origin) in the order of the schema; a mapping inside a section is one value."""
    for name, held in resolved.recipe.model_dump(mode="json").items():
        inner: list[tuple[str | int, ...]] = [(name,)]
        if isinstance(held, dict):
            inner = [(name, leaf) for leaf in held]
        elif isinstance(held, list) and isinstance(next(iter(held), None), dict):
            inner = [(name, place, leaf) for place, item in enumerate(held) for leaf in item]
        for key in inner:
            leaf = held
            for part in key[1:]:
                leaf = leaf[part]
            yield key, leaf, resolved.document.origin(key)


def printed(resolved: Resolved, as_json: bool) -> str:
    """Format the recipe with all its keys as YAML, with the origin of each value as a comment."""
    if as_json:
        origins = {".".join(map(str, key)): origin or "default" for key, _, origin in values(resolved)}
        checked = resolved.recipe
        keys = checked.model_dump(mode="json")
        return json.dumps({"v": 1, "hash": checked.recipe_hash, "recipe": keys, "origins": origins})
    lines: list[str] = []
    above: tuple[str | int, ...] = ()
    for key, shown, origin in values(resolved):
        if len(key) > 1 and key[:1] != above[:1]:
            lines.append(f"{key[0]}:")
        first = len(key) == 3 and key[:2] != above[:2]  # first key of a list entry
        indent = "" if len(key) == 1 else "  - " if first else "    " if len(key) == 3 else "  "
        lines.append(f"{indent + written(str(key[-1]), shown):<{COLUMN}}  # {origin or 'default'}")
        above = key
    return "\n".join(lines)


def written(name: str, value: Any) -> str:
    """Format `name: value` on one line."""
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return f"{name}: {text.removesuffix(chr(10)).removesuffix('...').strip()}"
