"""The content of dashboard and report: sentences, charts with their tables, the recipe.

A pure function of a `RunHistory`: two renderings of an unchanged run are equal to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import median
from xml.etree.ElementTree import Element

from cocktail_cli.ui import accusation, counted, duration_text, megabytes, short, time_left_text, timestamp

from .charts import Bar, Look, Plot, Point, Row, Series, downsample, line_chart, row_chart
from .markup import Child, el, html
from .run_history import Contribution, Generation, Presence, Round, RunHistory

PEERS = 200  # peers in a table by name
SLOWEST = 50  # rows of the table of slow peers
CROSSES = 200  # crosses for one peer: rounds without it

STATES = {
    "running": "is running",
    "waiting": "waits for peers",
    "finished": "is finished",
    "stopped": "was stopped by its host before all steps were done",
    "paused": "is paused by its host, and may go on",
    "failed": "ended without a result",
    "unreachable": "cannot be reached any more",
    "died": "has stopped: its hub is gone, and may be started again",
}


@dataclass(frozen=True)
class Page:
    """The content of a page: of one run, or of several that are compared."""

    title: str  # heading
    headline: str  # one line; the title of the window
    sub: str  # under the heading
    sections: list[Element]


def page_of(c: RunHistory) -> Page:
    """Render the page of one run."""
    sub = f"cocktail · recipe {c.about.recipe}" if c.about.recipe else "cocktail"
    return Page(c.about.run, headline(c), sub, sections(c))


def sections(c: RunHistory) -> list[Element]:
    """Render all sections, top to bottom: figures, curves, and what is said in words behind them."""
    made = [section("summary", "Summary", ending(c), figures(c))]
    if c.losses:
        made.append(section("loss", "Loss", loss(c)))
    if rewarded := [(r.step, r.rewards) for r in c.rounds if r.rewards]:
        made.append(section("rewards", "Rewards", *rewards(c, rewarded)))
    if c.speeds:
        made.append(section("speed", "Speed", speed(c)))
    if points := [(float(r.step), r.lr) for r in c.rounds if r.lr is not None]:
        made.append(section("rate", "Learning rate", rate(points)))
    if points := [(float(r.step), r.grad_norm) for r in c.rounds if r.grad_norm is not None]:
        made.append(section("norm", "Gradient norm", norm(points)))
    if c.samples:
        made.append(section("samples", "Samples", *samples(c)))
    if c.rounds:
        titles = (("bytes", "Bytes"), ("ratio", "Below FP16"))
        made += [section(*title, one) for title, one in zip(titles, traffic(c), strict=False)]
        made.append(section("waiting", "Waiting", idle(c)))
    if c.slow:
        made.append(section("slow", "Slow rounds", scrollable(slow_rounds(c), "slow rounds")))
    if c.stays:
        made.append(section("peers", "Peers", timeline(c)))
    if participants(c):
        made.append(section("contributions", "Contributions", shares(c)))
    made.append(section("words", "In words", *(el("p", line) for line in words(c))))
    if participants(c):
        made.append(section("contributors", "Contributors", *contributors(c)))
    if c.about.recipe_text:
        made.append(section("recipe", "Recipe", *recipe(c)))
    return made


def document(page: Page, head: Sequence[Element], top: Sequence[Element], *body: Element) -> str:
    """Render a whole page; `head` and `top` are added to its head and to its header."""
    charset, title = el("meta", charset="utf-8"), el("title", page.headline)
    viewport = el("meta", name="viewport", content="width=device-width, initial-scale=1")
    header = el("header", el("h1", page.title), el("p", page.sub, class_="sub"), *top)
    whole = el("html", el("head", charset, title, viewport, *head), el("body", header, *body), lang="en")
    return "<!doctype html>\n" + html(whole)


def section(name: str, title: str, *children: Child) -> Element:
    return el("section", el("h2", title, id=f"{name}-h"), *children, id=name, aria_labelledby=f"{name}-h")


# ---- in words ----------------------------------------------------------------------------------------------


def headline(c: RunHistory) -> str:
    """Summarize the run in one line; a screen reader announces it when it changes."""
    return f"{c.about.run} {STATES.get(c.state, c.state)}, step {c.step:,} of {c.steps:,}"


def words(c: RunHistory) -> Iterator[str]:
    """Describe the run in sentences."""
    about, losses = c.about, c.losses
    if about.model:
        size = f" ({about.parameters:,} trained parameters)" if about.parameters else ""
        data = ", ".join(about.data)
        yield f"{about.method} of {about.model}{size} on {data}, by the recipe {about.recipe}."
    took = f" in {duration_text(duration(c))}" if c.rounds else ""
    ended = f": {c.reason}" if c.reason else ""
    rounds = counted(c.rounds[-1].round + 1 if c.rounds else 0, "round")
    yield f"{headline(c)}: {rounds}{took}{ended}."
    if losses:
        held = f"; on held-out data {trend([e.loss for e in c.evaluations])}" if c.evaluations else ""
        best = (
            f", best {c.best.loss:.4f} at step {c.best.step:,}" if c.best and len(c.evaluations) > 1 else ""
        )
        unit = "nats a pair" if any(r.rewards for r in c.rounds) else "nats a token"
        yield f"The loss in training {trend([losses[0][1], losses[-1][1]])}{held}{best} ({unit})."
    if up := sum(r.up for r in c.rounds):
        down, times = sum(r.down for r in c.rounds), ratio_of(c)
        below = f", {times:,.0f} times less than all parameters in FP16" if times else ""
        yield f"In the rounds the peers sent {megabytes(up)} and received {megabytes(down)}{below}."
    if fetched := sum(one.fetched for one in c.contributions):
        yield f"To join they fetched another {megabytes(fetched)}: the model, and the packets they lacked."
    if (share := idle_of(c.rounds)) is not None:
        yield f"Their devices waited {share:.1%} of their time for an exchange."
    if did := participants(c):
        missed, packets = sum(one.left_out for one in did), sum(one.rounds + one.left_out for one in did)
        late = f"; {missed:,} of {packets:,} packets were late or refused" if missed else ""
        are = "is" if len(c.present) == 1 else "are"
        yield f"{counted(len(did), 'peer')} took part, {len(c.present)} {are} there now{late}."
    if c.bottleneck:
        yield f"The bottleneck of the newest rounds is {c.bottleneck}."
    for line in c.stages:
        yield f"{line[0].upper()}{line[1:]}."
    for one in c.slow[-1:]:
        yield f"Newest of {counted(len(c.slow), 'finding')} on slow rounds: {accusation(asdict(one))}."
    if c.note:
        yield c.note
    if c.seen:
        yield f"Newest entry: {utc(c.seen)}."


def ending(c: RunHistory) -> Element | None:
    """Say above all figures why a run does not go on, unless it is finished."""
    if c.state in ("running", "waiting", "finished"):
        return None
    why = f": {c.reason}" if c.reason else ""
    return el("p", f"{headline(c)}{why}.", class_="ending")


def participants(c: RunHistory) -> list[Contribution]:
    """Peers that took part in at least one round; excludes joiners and `cocktail doctor`."""
    return [one for one in c.contributions if one.rounds or one.left_out]


def trend(values: Sequence[float]) -> str:
    """Describe first and last value: `fell from 4.70 to 2.61`."""
    if len(values) == 1 or values[0] == values[-1]:
        return f"is {values[-1]:.4f}"
    return f"{'fell' if values[-1] < values[0] else 'rose'} from {values[0]:.4f} to {values[-1]:.4f}"


def figures(c: RunHistory) -> Element:
    """Render the key figures."""
    losses = [loss for _, loss in c.losses]
    share, times = idle_of(c.rounds), ratio_of(c)
    running = c.state == "running"
    rates, norms = (
        [r.lr for r in c.rounds if r.lr is not None],
        [r.grad_norm for r in c.rounds if r.grad_norm],
    )
    shown = [
        ("state", "no answer" if c.state == "unreachable" else c.state),
        ("step", f"{c.step:,} / {c.steps:,}"),
        ("loss", f"{losses[-1]:.4f}" if losses else "-"),
        ("held-out", f"{c.evaluations[-1].loss:.4f}" if c.evaluations else "-"),
        ("best", f"{c.best.loss:.4f} at {c.best.step:,}" if c.best else "-"),
        ("tokens/s", short(c.recent_speed) if c.speeds else "-"),
        ("learning rate", f"{rates[-1]:.2g}" if rates else "-"),
        ("gradient norm", f"{norms[-1]:.2f}" if norms else "-"),
        ("peers now", f"{len(c.present)}"),
        ("below FP16", f"{times:,.0f}x" if times else "-"),
        ("idle", f"{share:.1%}" if share is not None else "-"),
        ("bottleneck", c.bottleneck or "-"),
        ("left" if running else "took", time_left(c) if running else duration_text(duration(c))),
    ]
    return el("dl", *(el("div", el("dt", name), el("dd", value)) for name, value in shown), class_="figures")


def time_left(c: RunHistory) -> str:
    """Estimate the time left from the pace of the last twenty steps."""
    recent = c.rounds[-21:]
    steps = recent[-1].step - recent[0].step if recent else 0
    if not steps:
        return "-"
    return time_left_text((recent[-1].at - recent[0].at) / steps * (c.steps - c.step))


def duration(c: RunHistory) -> float:
    return max(0.0, (c.seen or 0.0) - (c.started or 0.0)) if c.started else 0.0


def ratio_of(c: RunHistory) -> float | None:
    """Compute the compression ratio against FP16 over all rounds whose bytes are known."""
    known = [r for r in c.rounds if r.up + r.down]
    full = sum(r.fp16(c.about.parameters) for r in known)
    return full / sum(r.up + r.down for r in known) if full else None


def idle_of(rounds: Sequence[Round] | Sequence[Contribution]) -> float | None:
    wait, compute = sum(r.wait_s for r in rounds), sum(r.compute_s for r in rounds)
    return wait / (wait + compute) if wait + compute else None


def utc(seconds: float) -> str:
    return timestamp(datetime.fromtimestamp(seconds, UTC)).replace("T", " ").replace("Z", " UTC")


# ---- charts ------------------------------------------------------------------------------------------------


def loss(c: RunHistory) -> Element:
    held = [(float(e.step), e.loss) for e in c.evaluations]
    series = [Series("training", c.losses, "a"), Series("held-out", held, "b")]
    said = f"Loss in training {trend([y for _, y in c.losses])}."
    return curves(Plot("curve", "Loss by step", said, series, "step", "{:.4g}".format))


def rewards(c: RunHistory, points: Sequence[tuple[int, Mapping[str, float]]]) -> Iterator[Element]:
    """Render the rewards of chosen and rejected answers, and how often the chosen one has more."""
    held = [(e.step, e.rewards) for e in c.evaluations if e.rewards]

    def series(label: str, of: Sequence[tuple[int, Mapping[str, float]]], name: str, look: Look) -> Series:
        return Series(label, [(float(step), values[f"rewards/{name}"]) for step, values in of], look)

    newest = (held or points)[-1][1]
    said = f"Of late the chosen answer has {newest['rewards/margins']:.3g} more than the rejected one."
    both = [series("chosen", points, "chosen", "a"), series("rejected", points, "rejected", "b")]
    yield curves(Plot("reward", "Rewards in training by step", said, both, "step", "{:.3g}".format))
    said = f"Of late the chosen answer has more in {newest['rewards/accuracies']:.0%} of the pairs."
    right = [series("training", points, "accuracies", "a"), series("held-out", held, "accuracies", "b")]
    title = "Pairs whose chosen answer has the higher reward"
    yield curves(Plot("accuracy", title, said, right, "step", "{:.0%}".format, zero=True))


def speed(c: RunHistory) -> Element:
    said = f"Of late {c.recent_speed:,.0f} tokens a second, all peers together."
    series = [Series("trained tokens a second", c.speeds, "a")]
    return curves(Plot("speeds", "Tokens a second by step", said, series, "step", short_count, zero=True))


def rate(points: Sequence[Point]) -> Element:
    said = f"At the newest step {points[-1][1]:.2g}."
    series = [Series("learning rate", points, "a")]
    return curves(Plot("rates", "Learning rate by step", said, series, "step", "{:.2g}".format, zero=True))


def norm(points: Sequence[Point]) -> Element:
    said = f"At the newest step {points[-1][1]:.3g}, before clipping; the median over the peers."
    series = [Series("gradient norm before clipping", points, "a")]
    log = min(value for _, value in points) > 0 and max(value for _, value in points) > 50 * points[-1][1]
    title = "Gradient norm by step"
    return curves(Plot("norms", title, said, series, "step", "{:.3g}".format, log=log, zero=not log))


def samples(c: RunHistory) -> Iterator[Element]:
    """Render how the model continues held-out texts: the newest words first, earlier ones behind them."""
    by_prompt: dict[str, list[Generation]] = {}
    for one in c.samples:
        by_prompt.setdefault(one.prompt, []).append(one)
    yield el(
        "p",
        "The model goes on from texts that it was not trained on; it takes the likeliest token each time.",
    )
    for number, (prompt, made) in enumerate(by_prompt.items()):
        newest = made[-1]
        quoted = [el("p", el("span", prompt, class_="prompt"), newest.text, class_="said")]
        if newest.reference:
            quoted.append(el("p", f"The held-out text goes on: {newest.reference}", class_="sub"))
        numbers = table(
            "The same at earlier steps", ["step", "text"], [[f"{o.step:,}", o.text] for o in made[::-1]]
        )
        earlier = el(
            "details", el("summary", "Earlier"), scrollable(numbers, "earlier"), id=f"sample-{number}"
        )
        title = el("figcaption", f"step {newest.step:,}")
        yield el("figure", title, *quoted, earlier if len(made) > 1 else None, class_="sample")


def short_count(value: float) -> str:
    return short(value).replace(".0", "")


def traffic(c: RunHistory) -> Iterator[Element]:
    """Render bytes per peer and round, and the ratio against FP16."""
    known = [r for r in c.rounds if r.up + r.down]
    if not known:
        yield el("p", "How many bytes went over the lines is not known.")
        return
    up = [(float(r.round), r.up / len(r.members)) for r in known]
    down = [(float(r.round), r.down / len(r.members)) for r in known]
    said = f"In the newest round a peer sent {megabytes(up[-1][1])} and received {megabytes(down[-1][1])}."
    series = [Series("sent by a peer", up, "a"), Series("received by a peer", down, "c")]
    wide = [value for _, value in (*up, *down) if value > 0]
    log = max(wide) > 20 * min(wide) and len(wide) == 2 * len(known)
    title = "Bytes of a peer by round"
    yield curves(Plot("moved", title, said, series, "round", short_bytes, log=log, zero=not log))
    ratios = [(float(r.round), ratio) for r in known if (ratio := r.ratio(c.about.parameters))]
    if ratios:
        title, said = "Times fewer bytes than FP16", f"In the newest round {ratios[-1][1]:,.0f} times fewer."
        series, times = [Series("times fewer bytes than FP16", ratios, "a")], [ratio for _, ratio in ratios]
        log = max(times) > 5 * median(times)  # the first round has almost nothing to send
        yield curves(Plot("times", title, said, series, "round", "{:,.0f}x".format, log=log, zero=not log))


def idle(c: RunHistory) -> Element:
    points = [(float(r.round), 100 * share) for r in c.rounds if (share := r.idle) is not None]
    if not points:
        return el("p", "How long devices waited is not known.")
    said = f"All rounds together: {idle_of(c.rounds) or 0:.1%}. The mean over the peers of each round."
    series = [Series("share of a step spent waiting", points, "a")]
    return curves(Plot("idle", "Idle share by round", said, series, "round", "{:.3g} %".format, zero=True))


def slow_rounds(c: RunHistory) -> Element:
    """Render who has lengthened rounds, why, and what helps; newest first."""
    head = ["peer", "cause", "evidence", "remedy", "longer", "round"]
    body = [
        [one.peer, one.cause, one.evidence, one.remedy, f"{one.lengthened:.0%}", f"{one.round:,}"]
        for one in c.slow[: -SLOWEST - 1 : -1]
    ]
    return table("Who has made rounds longer, newest first", head, body)


def short_bytes(value: float) -> str:
    return megabytes(value).replace(".0 ", " ")


def curves(plot: Plot) -> Element:
    """Render a chart and the table with its numbers."""
    shown = [one for one in plot.series if one.points]
    columns = [dict(downsample(one.points)) for one in shown]
    xs = sorted({x for column in columns for x in column})
    body = [[f"{x:,.0f}", *(plot.text(column[x]) if x in column else "" for column in columns)] for x in xs]
    many = max(len(one.points) for one in shown)
    averaged = f" ({many:,} points, neighbours averaged)" if many > len(xs) else ""
    numbers = table(plot.title + averaged, [plot.x_name, *(one.name for one in shown)], body)
    return el("figure", line_chart(plot), collapsible(f"{plot.name}-table", numbers))


def timeline(c: RunHistory) -> Element:
    """Render when each peer was present, with the rounds that went on without it."""
    start, end = c.started or 0.0, c.seen or 0.0
    bars: dict[str, list[Bar]] = {}
    for stay in c.stays:
        bars.setdefault(stay.peer, []).extend(bars_of(stay, start, end))
    missed: dict[str, list[Bar]] = {}
    for r in c.rounds:
        for peer in r.left_out:
            mark = Bar(r.at - start, r.at - start, f"{peer}: round {r.round} without it")
            missed.setdefault(peer, []).append(mark)
    drawn = [Row(peer, parts, missed.get(peer, [])[-CROSSES:]) for peer, parts in bars.items()]
    said = f"{len(bars)} peers came, {len(c.present)} are there. Time runs from the start of the run."
    body = [
        [s.peer, utc(s.joined), utc(s.left) if s.left else "", s.reason] for s in reversed(c.stays[-PEERS:])
    ]
    stays = table("Who came and went, newest first", ["peer", "joined", "left", "why"], body)
    chart = row_chart("timeline", "Peers over time", said, drawn, timed=True)
    return el("figure", chart, collapsible("timeline-table", stays))


def bars_of(stay: Presence, start: float, end: float) -> Iterator[Bar]:
    """Yield bars from joining to leaving; the bar is pale while the peer fetches the model."""
    gone = f"left {utc(stay.left)}: {stay.reason}" if stay.left else "still there"
    title = f"{stay.peer}: joined {utc(stay.joined)}, {gone}"
    joined, ready, left = (max(0.0, (at or end) - start) for at in (stay.joined, stay.ready, stay.left))
    if stay.ready is not None:
        yield Bar(joined, ready, f"{stay.peer}: fetched the model until {utc(stay.ready)}", pale=True)
        joined = ready
    yield Bar(joined, max(joined, left), title)


def shares(c: RunHistory) -> Element:
    """Render each peer's share of the work."""
    first = c.contributions[0]
    drawn = [
        Row(one.peer, [Bar(0, one.part, f"{one.peer}: {one.part:.1%}")], text=f"{one.part:.0%}")
        for one in participants(c)
    ]
    said = f"{first.peer} did most: {first.part:.0%}."
    return el("figure", row_chart("shares", "Share of the work", said, drawn))


def contributors(c: RunHistory) -> Iterator[Element]:
    """Render the table of contributions; a run whose ledger lies elsewhere has fewer columns."""
    columns: dict[str, Callable[[Contribution], str]] = {
        "hardware": lambda one: one.hardware,
        "share": lambda one: f"{one.part:.1%}",
        "samples": lambda one: f"{one.samples:,}",
        "rounds": lambda one: f"{one.rounds:,}",
        "left out": lambda one: f"{one.left_out:,}",
        "idle": lambda one: "-" if (idle := idle_of([one])) is None else f"{idle:.1%}",
        "sent": lambda one: megabytes(one.up),
        "received": lambda one: megabytes(one.down),
    }
    did = participants(c)
    if not any(one.samples for one in did):
        del columns["samples"]
    body = [[one.peer, *(of(one) for of in columns.values())] for one in did[:PEERS]]
    yield scrollable(table("What each gave", ["peer", *columns], body), "what each gave")
    if len(did) > PEERS:
        yield el("p", f"and {len(did) - PEERS:,} more.")


def recipe(c: RunHistory) -> Iterator[Element]:
    yield el("p", "sha256 of the recipe in full: ", el("code", c.about.recipe_hash))
    code = el("pre", el("code", c.about.recipe_text), tabindex="0", aria_label="the recipe")
    yield el("details", el("summary", f"{c.about.recipe}.yaml"), code, id="recipe-text")


# ---- tables ------------------------------------------------------------------------------------------------


def table(caption: str, head: Sequence[str], body: Iterable[Sequence[str]]) -> Element:
    """Render a table whose first column holds row headers."""
    top = el("tr", *(el("th", name, scope="col") for name in head))
    under = (
        el("tr", el("th", first, scope="row"), *(el("td", cell) for cell in cells)) for first, *cells in body
    )
    return el("table", el("caption", caption), el("thead", top), el("tbody", *under))


def collapsible(name: str, numbers: Element) -> Element:
    """Wrap a table in <details>, closed at first."""
    return el("details", el("summary", "The numbers"), scrollable(numbers, name), id=name)


def scrollable(numbers: Element, name: str) -> Element:
    """Wrap a table in a box that the keyboard can scroll."""
    return el("div", numbers, class_="scroll", tabindex="0", role="region", aria_label=name.replace("-", " "))
