"""`surefoot replay`: run an incident of the guard again, on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.outcome import exit_codes
from surefoot.errors import UserError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")


def replay(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="<output_dir>/surefoot/incidents/step-N.")],
    device: Annotated[str, typer.Option(help="auto (the kind that it happened on), cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="Compute in float32, bfloat16 or float16 instead of as the run did.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Where the base model is on this machine.")] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Checkpoint with the trained weights, if the incident does not hold them.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Apply this precision plan instead of the one that was in force.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the YAML run code of the model's folder.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Run a bad step again and say whether it happens here too.

    surefoot replay DIR [--device cpu] [--dtype float32] [key=value ...]

    Exit code 0: it ran, and the answer is printed; 1: it could not run, or running it cannot tell; 2: the folder or the
    request is wrong.
    """
    with exit_codes(debug=debug):
        from surefoot.use.replay_settings import Request

        if device not in DEVICES and not device.startswith("cuda:"):
            raise UserError(f"there is no device {device!r}", hint="--device auto, cpu, cuda or cuda:N")
        if dtype is not None and dtype not in DTYPES:
            raise UserError(f"there is no dtype {dtype!r}", hint=f"--dtype {', '.join(DTYPES)}")
        request = Request(device, dtype, model, weights, plan, trust_remote_code, tuple(ctx.args))  # type: ignore[arg-type]

        from surefoot.use.replay import replay as run_again

        found = run_again(folder, request, lambda message: print(message, file=sys.stderr))
        if as_json:
            print(json.dumps(found.to_json(), ensure_ascii=False, allow_nan=False))
        else:
            print("\n".join(found.lines()))
        if found.happens is None:
            raise typer.Exit(1)
