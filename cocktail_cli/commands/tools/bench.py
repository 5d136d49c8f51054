"""`cocktail bench`: measure the codec, a line or a training step on this machine."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from cocktail_cli import options
from cocktail_cli.help_pages import CommandTable
from cocktail_cli.machine import check_trust, isolate_model_code, pick_device, url_to_dial
from cocktail_cli.recipe_request import RecipeRequest, room_for
from cocktail_cli.ui import Display, megabytes, open_view, say, say_json, say_text
from cocktail_cli.volunteer import read_url

app = CommandTable(help="Measure this machine.")


@app.command("compress")
def compress(
    params: Annotated[
        float, typer.Option("--params", metavar="N", min=1000, help="Size of the vector: 40e6, 6.05e9.")
    ] = 40e6,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")
    ] = "cpu",
    as_json: options.Json = False,
) -> None:
    """Encode and decode as a run would: bytes, times and errors.

    Example: cocktail bench compress

    With --json one object: {"v": 1, "rows": [{"data", "p", "K", "bits", "bits_per_param", "ratio_fp16",
    "encode_ms", "decode_ms", ...}]}
    """
    from .bench_codec import bench, table

    rows = bench(int(params), pick_device(device))
    if as_json:
        say_json({"rows": rows})
    else:
        say_text(table(rows))


@app.command("net")
def net(
    run_url: Annotated[
        str,
        typer.Argument(metavar="RUN_URL", help="The run URL; @FILE or - reads it from a file or stdin."),
    ],
    as_json: options.Json = False,
) -> None:
    """Measure the line to a run.

    Measures round trip, both directions, and a packet of the run. Joins for a few seconds under the
    name doctor, and gets no work.

    Example: cocktail bench net cocktail://...

    With --json one object: {"v": 1, "run", "rtt_ms", "slowest_rtt_ms", "down_bytes_per_s",
    "up_bytes_per_s" (null: an old hub), "packet_bytes", "packet_down_s", "packet_up_s"}
    """
    from cocktail_cli.commands.check.doctor_run_url import ANSWER, down_rate, round_trips, up_rate, visiting
    from recipes.config import recipe_from_json
    from recipes.planning import packet_bytes
    from transport import ask_status

    url = url_to_dial(read_url(run_url))
    trips = [1000 * seconds for seconds in round_trips(url)]
    parameters = ask_status(url, ANSWER)["parameters"]
    with visiting(url) as link:
        recipe, down, up = recipe_from_json(link.welcome.recipe), down_rate(link), up_rate(link)
    packet = packet_bytes(recipe, parameters)
    if as_json:
        found = {
            "run": url.run,
            "rtt_ms": round(min(trips), 2),
            "slowest_rtt_ms": round(max(trips), 2),
            "down_bytes_per_s": round(down),
            "up_bytes_per_s": None if up is None else round(up),
            "packet_bytes": packet,
            "packet_down_s": round(packet / down, 4) if down else None,
            "packet_up_s": round(packet / up, 4) if up else None,
        }
        say_json(found)
        return
    say(f"rtt     {min(trips):.1f} ms, the slowest of {len(trips)} {max(trips):.1f} ms")
    for way, rate in (("down", down), ("up", up)):
        took = f", a packet of {megabytes(packet)} in {packet / rate:.2f} s" if rate else ""
        say(f"{way:<7} {megabit(rate)}{took}")


def megabit(rate: float | None) -> str:
    return "not known: the hub takes no trial uploads" if rate is None else f"{8e-6 * rate:.1f} Mbit/s"


@app.command("step")
def step(
    recipe: options.RecipeOrModel = None,
    overrides: options.Overrides = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Steps to measure, after one to warm up.")
    ] = 5,
    peers: Annotated[
        int | None,
        typer.Option(
            "--peers", metavar="N", min=1, help="Peers that share a batch (default: swarm.min_peers)."
        ),
    ] = None,
    data: options.DataPath = None,
    model: options.ModelName = None,
    device: options.Device = "auto",
    micro_batch_size: options.MicroBatch = None,
    trust_remote_code: options.TrustCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    progress: options.ProgressOption = "auto",
) -> None:
    """Train alone for a few steps, and print what a step takes here.

    The model is fetched as for a launch; of the data only the first rows are read.

    Examples: cocktail bench step smoke
    cocktail bench step my.yaml --steps 10 --peers 8 --device cuda

    With --json one object: {"v": 1, "recipe", "device", "parameters", "micro_batch", "samples", "tokens",
    "step_s", "compute_s", "codec_s", "join_s", "tokens_per_s", "packet_bytes", "slowest_s", "memory_bytes"}
    """
    from .bench_step import measured, table

    isolate_model_code(trust_remote_code)
    request = RecipeRequest.of(recipe, overrides, data, model)
    check_trust(request.load(), trust_remote_code)
    request, said = request.choose(room_for([device]) if request.is_own else None)
    loaded = request.load()
    many = peers or loaded.swarm.min_peers
    with open_view(Display(quiet=quiet or as_json, progress=progress)) as view:
        row = measured(loaded, pick_device(device), micro_batch_size, steps, many, view.show)
    if as_json:
        say_json(row)
    elif quiet:
        say(f"{row['step_s']:.3f}")
    else:
        say(*said, *table(row))
        took = math.ceil(100 * row["compute_s"]) / 100
        say(f"Next: cocktail plan {request.typed()} --peers {many} --step-time {took:g}s", err=True)
