"""`cocktail plan`: memory, traffic, time and cost of a run, without fetching weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cocktail_cli import options
from cocktail_cli.assembly import crossing, divided
from cocktail_cli.errors import EXIT, Failure
from cocktail_cli.machine import GIB, RUNTIME, check_trust, pick_device
from cocktail_cli.recipe_request import RecipeRequest
from cocktail_cli.ui import counted, megabytes, say, time_left_text

from .gpu_table import Gpu, gpu_of, this_machine
from .measured_loss import Expected, expected_loss

if TYPE_CHECKING:
    from recipes.config import Recipe
    from recipes.planning import LinkSpeed, Machine, MemoryPlan, StepCost

GPU = "Device by name, such as a100-80g (default: this machine)."
PEERS = "Peers (default: swarm.min_peers)."
SPEEDS = (
    "Mbit/s of a peer: 20/100 (default: 100/100); hub=100/40: the hub's (default: bounds nothing); listen=4: "
    "peers that pass packets on (join --listen)."
)
STAGES = "Machines of a peer, each with some layers (join --layers)."
STEP_TIME = "Measured seconds of a peer's step: 8s."
SPREAD = "Spread each peer here over N GPUs."
MBIT = 1e6 / 8  # bytes per second
RATE = 100 * MBIT  # of a peer's line, unless --lines says another
LINES = re.compile(r"(?P<hub>hub=)?(?P<up>\d+(\.\d+)?)(/(?P<down>\d+(\.\d+)?))?|listen=(?P<listen>\d+)")
FREE = ("compression.auto=true", "compression.preset=cocktail")  # leave it to the run
RESULTS = "scripts/RESULTS.md"
MANY = 1000  # steps of a plan whose data do not say how many they are
CARRIES = 0.9  # of a line's rate, in packets: the rows at 20 Mbit/s of RESULTS.md have 0.91 and 0.87
UTILISATION = 0.35  # of a device's peak, as a rule of thumb: `--step-time` replaces it by a measurement
# Changes that save memory, those that hurt the result most last; the first sufficient one is proposed.
SMALLER = (
    "training.activation_checkpointing=true",
    "training.optim=adamw_8bit",
    "compression.state_device=cpu",
    "model.dtype=bfloat16",
)


@dataclass(frozen=True)
class Asked:
    """The question: recipe, device, number of peers, line, price."""

    request: RecipeRequest
    gpu: Gpu
    gpus: int  # GPUs of one peer
    peers: int | None
    line: LinkSpeed
    hub: LinkSpeed | None  # its line; None: it bounds nothing
    micro_batch: int | None
    step_time: float | None  # measured seconds
    price: float | None  # per GPU hour
    listening: int  # peers that others can reach
    stages: int  # machines of one peer

    @property
    def machine(self) -> Machine:
        from recipes.planning import Machine

        return Machine(self.gpu.bytes, self.gpu.name != "cpu", self.gpus, self.gpu.bf16)

    def line_with(self, hub: LinkSpeed | None, recipe: Recipe, peers: int) -> LinkSpeed:
        """Return a peer's share of its own line and the hub's, with the help of reachable peers where the
        recipe says so, or where that is faster."""
        if hub is None:
            return self.line
        alone, way = self.line.behind(hub, peers), crossing(recipe, self.listening, peers)
        helped = alone if way is None else self.line.behind(hub, peers, way.hub, way.peer)
        return helped if helped.down > alone.down or (way is not None and way.always) else alone


@dataclass(frozen=True)
class Plan:
    """The answer: memory, step time, duration, cost, and a hint."""

    asked: Asked
    recipe: Recipe
    peers: int
    micro_batch: int
    memory: MemoryPlan
    step: StepCost
    alike: StepCost  # with the hub on a line as each peer's
    steps: int | None
    hint: str = ""
    stage_line: float = 0.0  # bytes that a machine of several sends to its neighbours in a step
    base: int = 0  # bytes of the base model's weights

    @property
    def fits(self) -> bool:
        return self.memory.bytes + RUNTIME <= self.asked.gpu.bytes

    @property
    def hours(self) -> float | None:
        return self.step.seconds * self.steps / 3600 if self.steps else None

    @property
    def disk(self) -> dict[str, dict[str, int]]:
        """Return the bytes of a run's files at its host, and at a peer that leaves, by what they are of."""
        from cocktail_cli.host import LEAST_LOG

        step, vector, saves = self.step, 4 * self.memory.parameters, self.recipe.checkpoint
        packets = step.packet * step.fitting * (self.steps or MANY) / step.every
        updates = min(self.peers * packets, max(LEAST_LOG, 2 * vector) + vector)
        models = vector * (1 + (saves.save_total_limit if saves.save_steps else 0))
        kept = 2 * vector + self.memory.part("optimizer")
        return {
            "host": {"packets": round(packets), "updates": round(updates), "snapshots and model": models},
            "peer": {"base": self.base, "checkpoint": kept},
        }

    @property
    def over_hub(self) -> float:
        """Aggregates that go over the hub's line in a round."""
        way = crossing(self.recipe, self.asked.listening, self.peers)
        return self.peers if way is None else way.hub

    @property
    def loss(self) -> Expected | None:
        adapters = self.recipe.lora is not None
        return expected_loss(self.step.setting, adapters, self.memory.parameters, self.peers, self.steps)

    @property
    def cost(self) -> float | None:
        price = self.asked.price
        return self.hours * self.peers * price if self.hours and price else None


def plan(
    recipe: options.RecipeOrModel = None,
    overrides: options.Overrides = None,
    gpu: Annotated[str | None, options.value("--gpu", "NAME", GPU)] = None,
    peers: Annotated[int | None, options.value("--peers", "N", PEERS, min=1)] = None,
    speeds: Annotated[list[str] | None, options.value("--lines", "UP/DOWN", SPEEDS)] = None,
    stages: Annotated[int, options.value("--stages", "N", STAGES, min=1)] = 1,
    price: Annotated[float | None, options.value("--price", "PRICE", "Price of one GPU hour.", min=0)] = None,
    step_time: Annotated[float | None, options.duration("--step-time", STEP_TIME)] = None,
    data: options.DataPath = None,
    model: options.ModelName = None,
    device: options.Device = "auto",
    gpus: Annotated[int, options.value("--gpus", "N", SPREAD, options.MACHINE, min=1)] = 1,
    micro_batch_size: options.MicroBatch = None,
    trust_remote_code: options.TrustCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Plan a run: memory by part, bytes, seconds, hours, cost. No weights are fetched; speeds are estimates.

    It also says how much of the time devices compute at these lines, and which line is the bottleneck. The
    packets of all peers go over the hub's line, up and down, unless peers pass them on.

    Examples: cocktail plan gptj-6b-lora --gpu rtx-4090 --peers 8 --lines 20/100
    cocktail plan my.yaml max_length=2048 --micro-batch-size 4 --price 1.10

    Exit 4 where it does not fit. With --json one object: {"v": 1, "recipe", "hash", "gpu", "precision",
    "peers", "micro_batch", "parameters", "memory": {"parts": [{"name", "bytes", "how"}], "bytes", "fits",
    ...}, "traffic", "time", "line": {"computing" (share of the time), "over_hub" (aggregates over the hub's
    line in a round), "rung", "bottleneck", "hub_alike": {"computing", "bottleneck"} (hub on such a line)},
    "loss": {"over" (share above all-reduce's), "peers", "beyond"} or null, "disk": {"host", "peer"} (bytes
    by what they are of), "stages": {"machines", "sent" (bytes to neighbours in a step)}, "bottleneck",
    "hint"}
    """
    from recipes.planning import Machine

    wanted = gpu_of(gpu) if gpu else this_machine(pick_device(device))
    line, hub, listening = lines_of(speeds or [])
    request = RecipeRequest.of(recipe, overrides, data, model)
    check_trust(request.load(), trust_remote_code)
    room = Machine(wanted.bytes - RUNTIME, wanted.name != "cpu", gpus, wanted.bf16)
    if stages > 1 and gpus > 1:
        both = "--stages and --gpus: a machine of several takes part with one device; give one of them"
        raise Failure("usage", both)
    request, said = request.choose(room)
    asked = Asked(
        request, wanted, gpus, peers, line, hub, micro_batch_size, step_time, price, listening, stages
    )
    beside: dict[str, Any] = {"micro_batch_size": micro_batch_size, "trust_remote_code": trust_remote_code}
    if gpu is None:  # it is of peers of this machine
        own = device if device != "auto" else None
        beside = {"peers": peers, "device": own, "gpus": gpus if gpus > 1 else None} | beside
    made = make(asked)
    if as_json:
        say(json.dumps(as_object(made)))
    elif quiet:
        say("fits" if made.fits else "does not fit")
    else:
        say(*said, *lines(made))
        say(f"Next: cocktail launch {request.typed(**beside)}", err=True)
    if not made.fits:
        raise typer.Exit(EXIT["preflight"])


def lines_of(given: Sequence[str]) -> tuple[LinkSpeed, LinkSpeed | None, int]:
    """Parse --lines: a peer's line, the hub's where that is given, and how many peers pass packets on.

    Raises Failure (usage).
    """
    from recipes.planning import LinkSpeed

    peer, hub, listening = LinkSpeed(RATE, RATE, carries=CARRIES), None, 0
    for text in given:
        found = LINES.fullmatch(text)
        if found is not None and found["listen"]:
            listening = int(found["listen"])
            continue
        up, down = (float(found["up"]), float(found["down"] or found["up"])) if found else (0.0, 0.0)
        if found is None or not up or not down:
            hints = ("UP/DOWN of a peer in Mbit/s: 20/100; of the hub: hub=100/100; listen=4",)
            raise Failure("usage", f"--lines {text}: no line is written so", hints=hints)
        if found["hub"]:
            hub = LinkSpeed(up * MBIT, down * MBIT)
        else:
            peer = LinkSpeed(up * MBIT, down * MBIT, carries=CARRIES)
    return peer, hub, listening


def make(asked: Asked) -> Plan:
    """Compute the plan.

    Raises:
        the errors of recipes, for a recipe, model or data set that cannot be used.
    """
    from recipes.models import check_fit, config_folder, load_tokenizer
    from recipes.planning import cost_of_step, packet_bytes, survey_data
    from recipes.weight_files import meta_model

    recipe = asked.request.load()
    folder = config_folder(recipe.model)
    tokenizer = load_tokenizer(recipe.model, folder)
    check_fit(recipe, folder)
    peers = asked.peers or recipe.swarm.min_peers
    micro_batch, memory = fitted(asked, recipe)
    known = survey_data(recipe, tokenizer)
    share = recipe.training.global_batch_size / peers
    done = memory.flops / (micro_batch * recipe.data.max_length) * known.length(recipe) * share
    done += memory.step_flops
    devices = asked.gpus * asked.stages
    compute = asked.step_time or done / (UTILISATION * devices * asked.gpu.peak(computes_in(recipe, asked)))
    stage_line = 0.0
    if asked.stages > 1:
        stage_line = divided(recipe, folder, asked.stages).sent * known.length(recipe) * share
        compute = max(compute, stage_line / (asked.line.carries * min(asked.line.up, asked.line.down)))
    packet = packet_bytes(recipe, memory.parameters)
    lines = [asked.line_with(hub, recipe, peers) for hub in (asked.hub, asked.line)]
    step, alike = (cost_of_step(recipe, packet, compute, line, peers) for line in lines)
    samples = known.samples(recipe)
    most = recipe.training.max_steps
    steps = most if most > 0 else recipe.training.total_steps(samples) if samples else None
    base = sum(one.nbytes for one in meta_model(folder, code=recipe.model.trust_remote_code).parameters())
    made = Plan(
        asked, recipe, peers, micro_batch, memory, step, alike, steps, stage_line=stage_line, base=base
    )
    return replace(made, hint=quicker(made) if made.fits else smaller(made))


def fitted(asked: Asked, recipe: Recipe) -> tuple[int, MemoryPlan]:
    """Return the requested micro-batch, or the largest power of two that fits, and the memory it takes."""
    from cocktail_cli.volunteer import micro_batch_of
    from recipes.training import LEAVE, MOST, ON_CPU

    size = micro_batch_of(recipe, asked.micro_batch)
    if size is not None:
        return size, memory_of(asked, recipe, size)
    one, two = memory_of(asked, recipe, 1), memory_of(asked, recipe, 2)
    gpu = asked.machine.gpu
    room = asked.gpu.bytes * (LEAVE if gpu else 1) - RUNTIME - one.bytes
    share = math.ceil(recipe.training.global_batch_size / (asked.peers or recipe.swarm.min_peers))
    most = min(MOST if gpu else ON_CPU, share)
    enough = max(1, min(most, 1 + int(room // max(1, two.bytes - one.bytes))))
    size = 1 << (enough.bit_length() - 1)
    return size, {1: one, 2: two}.get(size) or memory_of(asked, recipe, size)


def memory_of(asked: Asked, recipe: Recipe, size: int) -> MemoryPlan:
    """Plan the memory of a peer, or of that one of its machines which needs most."""
    from recipes.models import config_folder
    from recipes.planning import plan_memory

    folder = config_folder(recipe.model)
    whole = plan_memory(recipe, folder, size, asked.machine)
    if asked.stages == 1:
        return whole
    return divided(recipe, folder, asked.stages).memory(whole)


def computes_in(recipe: Recipe, asked: Asked) -> str:
    """Return the number format of the matrix products."""
    training, dtype = recipe.training, recipe.model.dtype
    if training.fp16 or dtype == "float16":
        return "float16"
    if training.bf16 is True or (training.bf16 is False and dtype == "bfloat16"):
        return "bfloat16"
    if training.bf16 is False or not (asked.machine.gpu or dtype == "bfloat16"):
        return "float32"
    return "bfloat16" if asked.gpu.bf16 else "float16"


# ---- what would be better ----------------------------------------------------------------------------------


def smaller(plan: Plan) -> str:
    """Suggest the first change that makes the model fit, or else the one that saves most."""
    from recipes.errors import RecipeError

    asked, size, least, best = plan.asked, plan.micro_batch, plan.memory.bytes, ""
    while (size := size // 2) >= 1:
        memory = memory_of(asked, plan.recipe, size)
        if memory.bytes + RUNTIME <= asked.gpu.bytes:
            return f"--micro-batch-size {size} needs {gib(memory.bytes + RUNTIME)}"
    last = "model.load_in_4bit=true" if plan.recipe.lora else "lora.lora_r=16"
    for change in (*SMALLER, f"data.max_length={plan.recipe.data.max_length // 2}", last):
        try:
            recipe = asked.request.load(change)
        except RecipeError:
            continue  # changes nothing in this recipe
        size, memory = fitted(asked, recipe)
        if memory.bytes + RUNTIME <= asked.gpu.bytes:
            return f"{change} needs {gib(memory.bytes + RUNTIME)}, with a micro-batch of {size}"
        if memory.bytes < least:
            best, least = change, memory.bytes
    too_much = "a larger GPU or a smaller model is needed"
    return f"{best} needs {gib(least + RUNTIME)}, still too much: {too_much}" if best else too_much


def topk_within(recipe: Recipe, parameters: int, link: LinkSpeed, seconds: float) -> float | None:
    """Find the largest K, of a few round ones, whose exchange takes the line at most `seconds` a step; None:
    none does."""
    from recipes.planning import cost_of_step, packet_bytes

    for keep in (0.2, 0.15, 0.1, 0.08, 0.05, 0.03, 0.02, 0.01):
        if keep < recipe.compression.topk_ratio:
            changed = recipe.model_copy(
                update={"compression": recipe.compression.model_copy(update={"topk_ratio": keep})}
            )
            if cost_of_step(changed, packet_bytes(changed, parameters), seconds, link).whole <= seconds:
                return keep
    return None


def quicker(plan: Plan) -> str:
    """Suggest a change for the bottleneck, compute or network."""
    step, recipe = plan.step, plan.recipe
    if step.bottleneck == "network":
        keep = topk_within(recipe, plan.memory.parameters, step.link, step.compute)
        if keep is not None and step.sparsest == step.packet:  # else the run chooses K by itself
            return f"compression.topk_ratio={keep:g} hides the exchange behind the compute"
        return for_thin_lines(plan) or "a larger training.global_batch_size gives the line more time"
    busy = math.floor(plan.peers * step.compute / max(step.busy, 1e-9))
    most = min(busy, recipe.training.global_batch_size)
    if most > plan.peers:
        return f"more such peers make it faster, up to {most:,}"
    return ""


def for_thin_lines(plan: Plan) -> str:
    """Suggest to leave to the run what it may choose, where devices compute more then."""
    from recipes.errors import RecipeError
    from recipes.planning import cost_of_step, packet_bytes

    asked, step = plan.asked, plan.step
    for change in FREE:
        try:
            recipe = asked.request.load(change)
        except RecipeError:
            continue  # nothing that the recipe does not say
        line = asked.line_with(asked.hub, recipe, plan.peers)
        packet = packet_bytes(recipe, plan.memory.parameters)
        cost = cost_of_step(recipe, packet, step.compute, line, plan.peers)
        if cost.computing >= 1.1 * step.computing:
            now = f"instead of {step.computing:.0%}"
            return f"{change} lets devices compute {cost.computing:.0%} of the time {now}: at {cost.rung}"
    return ""


# ---- text --------------------------------------------------------------------------------------------------


def lines(plan: Plan) -> Iterator[str]:
    from recipes.planning import count_text

    asked, recipe, memory, step = plan.asked, plan.recipe, plan.memory, plan.step
    trained = count_text(memory.parameters)
    yield f"model    {recipe.model.model_name_or_path}: trains {trained} parameters"
    parts = " + ".join(f"{part.name} {in_gib(part.bytes)}" for part in memory.parts if not part.host)
    total = f"{gib(memory.bytes + RUNTIME)} of {gib(asked.gpu.bytes)} of {asked.gpu.name}"
    yield f"memory   {parts} + runtime {in_gib(RUNTIME)} GiB, micro-batch {plan.micro_batch}"
    yield f"         = {total}: {'fits' if plan.fits else 'does not fit'}"
    if asked.stages > 1:
        slow = plan.stage_line / (asked.line.carries * min(asked.line.up, asked.line.down))
        sends = f"each sends {megabytes(plan.stage_line)} a step to its neighbours, {slow:.1f} s"
        yield f"stages   {asked.stages} machines, of which that one is the fullest; {sends}"
    for part in memory.parts:
        if part.host:
            yield f"         in the host's memory: {part.name} {gib(part.bytes)}"
    full = 2 * memory.parameters
    rate = f"{8 * step.link.up / 1e6:g} and {8 * step.link.down / 1e6:g} Mbit/s"
    ratio = f"{megabytes(full)} a step as FP16: {full * step.every / step.packet:.0f}x"
    every = f" every {step.every} steps" if step.every > 1 else ""
    ways = f"up {step.up:.1f} s, down {step.down:.1f} s at {rate}"
    yield f"traffic  packet {megabytes(step.packet)}{every} ({ratio}); {ways}"
    received = plan.peers * step.packet * step.fitting / step.every
    passed = plan.over_hub < plan.peers
    way = f"{plan.over_hub:.1f} packets a round, which peers pass on" if passed else "as much"
    yield f"         the hub receives {megabytes(received)} a step, and sends {way}"
    yield f"line     {line_words(step)}"
    if asked.hub is None:
        yield f"         with the hub on such a line: {line_words(plan.alike)}"
    how = "the longer of" if step.staleness else "both:"
    dtype = computes_in(recipe, asked)
    dtype += ", which it only emulates" if dtype == "bfloat16" and not asked.gpu.bf16 else ""
    compute = f"compute ~{step.compute:.1f} s ({dtype})"
    each = f"{step.seconds:.1f} s, {how} {compute} and exchange {step.busy:.1f} s"
    yield f"step     {each}; {counted(plan.peers, 'peer')}, waits for the {step.bottleneck}"
    if plan.hours is None:
        yield "time     not known: the data set does not say how many rows it has (training.max_steps does)"
    else:
        cost = f", ~{plan.cost:.2f} at {asked.price:g} a GPU hour" if plan.cost is not None else ""
        yield f"time     {plan.steps:,} steps = {time_left_text(3600 * plan.hours)}{cost}"
    if plan.loss is None:
        yield f"loss     not known: this method was not measured; see {RESULTS}"
    else:
        over = f"{plan.loss.over:+.1%} over all-reduce, as measured with {counted(plan.loss.peers, 'peer')}"
        beyond = f"; not measured: {', '.join(plan.loss.beyond)}" if plan.loss.beyond else ""
        yield f"loss     {over}{beyond}; see {RESULTS}"
    for name, (place, files) in zip(("disk", ""), plan.disk.items(), strict=True):
        sizes = " + ".join(f"{what} {megabytes(size)}" for what, size in files.items())
        over = "" if plan.steps or not name else f", in {MANY:,} steps"
        yield f"{name:<9}{place} {megabytes(sum(files.values()))}: {sizes}{over}"
    if plan.hint:
        yield f"hint     {plan.hint}"


def line_words(step: StepCost) -> str:
    """Say how much of the time devices compute at a line, and what bounds the rounds."""
    sparser = f", with packets of {megabytes(step.packet * step.fitting)}" if step.fitting < 1 else ""
    computing = f"devices compute {step.computing:.0%} of the time{sparser}"
    return f"{computing}; the bottleneck is {step.slowest}; {step.rung}"


def as_object(plan: Plan) -> dict[str, Any]:
    memory, step = plan.memory, plan.step
    return {
        "v": 1,
        "recipe": plan.recipe.name,
        "hash": plan.recipe.recipe_hash,
        "gpu": plan.asked.gpu.name,
        "precision": computes_in(plan.recipe, plan.asked),
        "peers": plan.peers,
        "micro_batch": plan.micro_batch,
        "parameters": memory.parameters,
        "memory": {
            "parts": [asdict(part) for part in memory.parts],
            "runtime": RUNTIME,
            "bytes": memory.bytes + RUNTIME,
            "available": plan.asked.gpu.bytes,
            "fits": plan.fits,
        },
        "traffic": {
            "packet": step.packet,
            "every": step.every,
            "fp16": 2 * memory.parameters,
            "up_s": step.up,
            "down_s": step.down,
        },
        "time": {
            "compute_s": step.compute,
            "exchange_s": step.busy,
            "step_s": step.seconds,
            "steps": plan.steps,
            "hours": plan.hours,
            "cost": plan.cost,
        },
        "line": {
            "computing": step.computing,
            "over_hub": plan.over_hub,
            "rung": step.rung,
            "bottleneck": step.slowest,
            "hub_alike": {"computing": plan.alike.computing, "bottleneck": plan.alike.slowest},
        },
        "loss": None if plan.loss is None else asdict(plan.loss),
        "disk": plan.disk,
        "stages": {"machines": plan.asked.stages, "sent": plan.stage_line},
        "bottleneck": step.bottleneck,
        "hint": plan.hint,
    }


def in_gib(count: float) -> str:
    return f"{count / GIB:.1f}" if count >= 0.1 * GIB else f"{count / GIB:.3f}"


def gib(count: float) -> str:
    return f"{in_gib(count)} GiB"
