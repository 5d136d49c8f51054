"""`cocktail preview`: show the tokens that a recipe's rows become, before anything is trained."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import groupby, repeat
from typing import TYPE_CHECKING, Annotated, Any

from cocktail_cli.machine import check_trust
from cocktail_cli.options import (
    DataPath,
    Json,
    ModelName,
    NoColor,
    Overrides,
    RecipeOrModel,
    TrustCode,
    value,
)
from cocktail_cli.recipe_request import RecipeRequest, room_for
from cocktail_cli.ui import Style, say, say_json, say_styled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from recipes.data import Preview, Sample

BINS = 8  # bins of the histogram
BAR = 40  # columns of the longest bar


def preview(
    recipe: RecipeOrModel = None,
    overrides: Overrides = None,
    count: Annotated[int, value("-n", "N", "Samples to show from each data set.", min=0)] = 3,
    data: DataPath = None,
    model: ModelName = None,
    trust_remote_code: TrustCode = False,
    as_json: Json = False,
    no_color: NoColor = False,
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
    from recipes.models import check_fit, config_folder, load_tokenizer

    request = RecipeRequest.of(recipe, overrides, data, model)
    check_trust(request.load(), trust_remote_code)
    request, said = request.choose(room_for(["auto"]) if request.is_own else None)
    resolved = request.load()
    folder = config_folder(resolved.model)
    tokenizer = load_tokenizer(resolved.model, folder)
    check_fit(resolved, folder, tokenizer)
    seen = preview_data(resolved, tokenizer)
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
    say(f"Next: cocktail launch {request.typed()}", err=True)


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
