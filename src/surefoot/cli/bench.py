"""`surefoot bench`: how fast this machine is, and how near to that a job's step comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.outcome import exit_codes
from surefoot.cli.request import split_request
from surefoot.errors import UserError


def bench(
    ctx: typer.Context,
    steps: Annotated[int, typer.Option(help="Optimizer steps to time, after a warm-up.")] = 5,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N; wins over the YAML's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the plot.")] = Path("surefoot-bench"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Measure this machine, and one job's speed on it.

    surefoot bench [job.yaml] [--steps N] [--out DIR] [key=value ...]
    """
    with exit_codes(debug=debug):
        if steps < 1:
            raise UserError(f"--steps {steps}: there is nothing to time", hint="--steps 1 or more")
        cfg = None
        if ctx.args:
            from surefoot.config import load_config

            path, overrides = split_request(ctx.args, "bench")
            chosen = [] if device is None else [f"device={device}"]
            cfg = load_config(path, [*overrides, *chosen], purpose="train")

        from surefoot.files import only_writer, write_bytes

        with only_writer(out):  # proves now that the plot can be written
            from surefoot.bench.measure import measure
            from surefoot.cli.console import make_console

            figures = measure(cfg, device or "auto", steps, make_console(stderr=True))

            plot = out / "bench.png"
            if as_json:
                print(json.dumps(figures.to_json() | {"plot": str(plot)}, ensure_ascii=False, allow_nan=False))
            else:
                from surefoot.bench.table import lines_of

                print("\n".join([*lines_of(figures), "", f"Plot: {plot}"]))

            from surefoot.bench.plot import draw

            write_bytes(plot, draw(figures))
