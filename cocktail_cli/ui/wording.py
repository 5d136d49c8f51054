"""Figures and events in words, for terminals and logs."""

from __future__ import annotations

from shlex import quote
from typing import TextIO

from . import events
from .metrics_lines import step_numbers
from .output import put, put_own


def megabytes(count: float) -> str:
    """Format bytes in decimal units, as links are sold: `812 B`, `34.1 kB`, `2.1 GB`."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def short(count: float) -> str:
    """Format a count in three digits: `812`, `34k`, `2.1M`."""
    for unit in ("", "k", "M", "G"):
        if count < 999.5 or unit == "G":
            break
        count /= 1000
    return f"{count:.0f}{unit}" if count >= 99.5 or unit == "" else f"{count:.1f}{unit}"


def counted(count: int, what: str) -> str:
    """Format a count with its noun: `1 peer`, `2 peers`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def rung_text(rung: str, need: float) -> str:
    """Format the setting of a run's rounds with the reason for it."""
    return f"{rung}: an exchange of the recipe's packets takes {need:.1f} steps' compute"


def amount(count: float, unit: str) -> str:
    return megabytes(count) if unit == "bytes" else f"{count:,.0f} {unit}".rstrip()


def progress_text(event: events.Progressed) -> str:
    """Format progress as ` 3.1 MB of 12.1 GB, 11.8 MB/s, 3 min left`, as far as it is known."""
    done = megabytes(event.done) if event.unit == "bytes" else f"{event.done:,}"
    if event.total:
        said = f" {done} of {amount(event.total, event.unit)}"
    else:
        said = f" {amount(event.done, event.unit)}" if event.rate else ""
    if event.rate and not event.done >= event.total > 0:
        said += f", {amount(event.rate, event.unit)}/s"
        said += "" if event.eta is None else f", {duration_text(event.eta)} left"
    return said


def duration_text(seconds: float) -> str:
    """Format a duration: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def time_left_text(seconds: float) -> str:
    """Format the time left, to the second below an hour: `34 s`, `12 min 05 s`, `3 h 20 min`."""
    minutes, left = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{left} s"
    return f"{minutes} min {left:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def departed(how: str, reason: str) -> str:
    """Say how a peer went, once: `left: preempted`, `is lost: silent for 30 s`."""
    why = reason.removeprefix("left: ")
    why = "" if why in ("left on request", "asked to leave") else why
    return {"lost": "is lost", "removed": "was removed"}.get(how, "left") + (f": {why}" if why else "")


def invitation(event: events.RunStarted, out: TextIO, err: TextIO) -> None:
    """Print a run's first words. The run URL stands alone on stdout, unwrapped."""
    million = event.parameters / 1e6
    size = f"{million:,.2f} M" if million < 1e3 else f"{million / 1e3:,.2f} B"
    put(f"recipe    {event.recipe}  sha256 {event.recipe_hash[:8]}", err)
    put(f"training  {size} parameters, {event.steps} steps", err)
    if event.round:
        put(f"resumed   {event.round} rounds are committed; peers that were here come back", err)
    put(f"reach     {event.reach}", err)
    if event.guests:
        put(f"waiting   the first step waits for {counted(event.guests, 'peer')} from elsewhere", err)
    if event.invitation:
        put(f"peers     {event.invitation}", err)
    put("", err)
    second = "is the run URL" if event.invitation else "joins"
    two = f"these two lines. The first installs cocktail, the second {second}:"
    one = "this line. Tell them where they get cocktail: no address is known here."
    put(f"Invite others with {two if event.install else one}", err)
    put("", err)
    if event.install:
        put(event.install, err)
    if not event.invitation:
        put("cocktail join ", err, end="")  # in a terminal the URL completes the line
    put_own(event.url, out)
    put("", err)
    useful = f"cocktail status {event.run} · cocktail stop {event.run} · log: {event.output_dir}/cocktail.log"
    put(f"Useful: {useful}", err)
    put("", err)


def farewell(event: events.RunFinished, out: TextIO, err: TextIO) -> None:
    """Print a run's last words: where the model is, and the command to type next."""
    before = "" if event.base_loss is None else f"{event.base_loss:.4f} -> "
    loss = "" if event.eval_loss is None else f", held-out loss {before}{event.eval_loss:.4f}"
    if event.planned > event.steps:
        how = f"stopped at step {event.steps} of {event.planned} ({event.reason.removeprefix('stopped ')})"
    else:
        how = f"is finished: {counted(event.steps, 'step')}"
    put(f"{event.run} {how}{loss}. The model:", err)
    put_own(event.model, out)
    if command := generate_command(event.model, event.prompt):
        put(f"Next: {command}", err)


def generate_command(folder: str, prompt: str | None) -> str:
    """Write the command that lets the model of this folder answer `prompt`, which may be empty; None: it
    answers none, and there is no command."""
    asked = quote(prompt or "Once upon a time")
    return "" if prompt is None else f"cocktail generate {quote(folder)} {asked}"


def sentence(event: events.Event) -> str | None:
    """Format an event as a line; None for steps and for events that other functions print."""
    match event:
        case events.Joined():
            fetch = f", {megabytes(event.download_bytes)} to download" if event.download_bytes else ""
            return f"joined {event.run} as {event.peer}: recipe {event.recipe}{fetch}"
        case events.PeerDeciding():
            what = f" ({event.hardware})" if event.hardware else ""
            return f"{event.peer}{what} looks at the run and is deciding whether to join"
        case events.PeerDeclined():
            return f"{event.peer} did not join"
        case events.PeerJoined():
            return f"{event.peer} joined" + (f" ({event.hardware})" if event.hardware else "")
        case events.Reached():
            return f"reach: confirmed by {event.peer}, from {event.where}"
        case events.PeerReady():
            return f"{event.peer} is ready, after {event.joining_s:.1f} s"
        case events.PeerAsks():
            what = f" ({event.hardware})" if event.hardware else ""
            return f"{event.peer}{what} asks to join: cocktail peers RUN --approve {event.key}, or --deny"
        case events.PeerLeft():
            return f"{event.peer} {departed(event.how, event.reason)}"
        case events.Eval():
            figures = "".join(
                f" {name}={value:.3f}" for name, value in events.figures_of(event.extra).items()
            )
            return f"eval step={event.step} loss={event.loss:.4f}{figures}"
        case events.Checkpoint():
            return f"snapshot of round {event.round} in {event.model}: {megabytes(event.bytes)}"
        case events.RunPaused():
            return f"{event.run} is paused after {event.steps} of {event.planned} steps"
        case events.OfExtension():
            return event.sentence()
        case events.Warning():
            return f"warning: {event.message}"
        case events.Left():
            return thanks(event)
        case _:
            return None


def thanks(event: events.Left) -> str:
    """Say how a volunteer's part in a run ended, what it gave, and how to return."""
    how = f"{event.run}{'' if event.returns else ' is over'}: {event.reason}"
    if event.reason.startswith("left ("):
        how = event.reason.replace("left", f"left {event.run}", 1)
    gave = ""
    if event.steps:
        share = "" if event.share is None else f", {event.share:.0%} of all that was trained"
        gave = f" You gave {counted(event.steps, 'step')}{share}, in {duration_text(event.seconds)}"
        gave += f" (sent {megabytes(event.up_bytes)}, received {megabytes(event.down_bytes)}). Thank you!"
    return f"{how}.{gave}" + (" The same command returns." if event.returns else "")


def step_line(event: events.Step, verbose: int) -> str:
    """Format a step as `step=131/452 round=131 loss=1.8420 peers=2 ...`, for `cut` and `awk`."""
    numbers, members = step_numbers(event), max(len(event.up_bytes), 1)
    left = event.eta_s if event.step < event.steps else None
    figures = [
        ("loss", event.loss, ".4f"),
        ("lr", event.lr, ".1e"),
        ("grad_norm", event.grad_norm, ".2f"),
        ("peers", event.peers, ""),
        ("tok_s", numbers["tokens_per_s"] or None, ".0f"),
        ("step_s", numbers["step_s"] or None, ".2f"),
        ("sync_s", numbers["sync_s"] or None, ".2f"),
        ("up_kb", sum(event.up_bytes.values()) / members / 1e3, ".1f"),
        ("down_kb", sum(event.down_bytes.values()) / max(len(event.down_bytes), 1) / 1e3, ".1f"),
        ("ratio_fp16", event.ratio_fp16 or None, ".1f"),
        ("eta_s", left, ".0f"),
    ]
    fields = [f"step={event.step}/{event.steps}", f"round={event.round}"]
    fields += [f"{name}={value:{digits}}" for name, value, digits in figures if value is not None]
    if verbose:
        fields.append(f"fingerprint={event.fingerprint}")
        fields += [f"{peer}={up}/{event.down_bytes.get(peer, 0)}" for peer, up in event.up_bytes.items()]
    return " ".join(fields)
