"""`cocktail bench compress`: bytes and milliseconds of the packets on this machine, beside the
reference's.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cocktail_cli.options import Json

app = typer.Typer(no_args_is_help=True, help="Measure this machine.")


@app.callback()
def root() -> None:
    """Measure this machine."""


@app.command("compress")
def compress(
    params: Annotated[
        float, typer.Option("--params", min=1000, help="Size of the vector: 40e6, 6.05e9.")
    ] = 40e6,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Encode and decode as a run would, and print bytes, times and errors.

    Example: cocktail bench compress

    With --json one object: {"v": 1, "rows": [{"data", "p", "K", "bits", "bits_per_param", "ratio_fp16",
    "encode_ms", "decode_ms", ...}]}
    """
    from cocktail_cli.machine import pick_device
    from compress.bench import bench, table

    rows = bench(int(params), pick_device(device))
    typer.echo(json.dumps({"v": 1, "rows": rows}) if as_json else table(rows))
