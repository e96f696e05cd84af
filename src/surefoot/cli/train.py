"""`surefoot train`: run the job that a YAML describes."""

from __future__ import annotations

import os
import sys

import typer

from surefoot.cli.outcome import exit_codes
from surefoot.cli.request import split_request
from surefoot.errors import WorkError


def train(ctx: typer.Context, debug: bool = typer.Option(False, "--debug", help="Show tracebacks.")) -> None:
    """Fine-tune a model; on a machine with several cards, on all of them.

    surefoot train job.yaml [key=value ...] [--key value ...]
    """
    with exit_codes(debug=debug) as crash:
        path, overrides = split_request(ctx.args, "train")

        from surefoot.config import load_config

        cfg = load_config(path, overrides, purpose="train")

        from surefoot.cli.launch import CHECKED, become, check_machine, launch_command, meet_others

        if command := launch_command(cfg, [*ctx.args, *(["--debug"] if debug else [])], os.environ):
            check_machine(cfg, _say)
            meet_others(cfg, os.environ, _say)
            become(command)

        from surefoot.cli.console import make_console
        from surefoot.run.folder import RunFolder
        from surefoot.run.job import run_job
        from surefoot.train.place import Place
        from surefoot.train.ranks import OtherRankError

        folder, place = RunFolder.of(cfg), Place.of(os.environ)
        crash.path = folder.crash_report
        if place.world > 1 and place.local_rank == 0 and CHECKED not in os.environ:  # by a launcher of the person's own
            check_machine(cfg, _say)
        try:
            done = run_job(cfg, make_console(stderr=True, quiet=place.rank > 0))
        except WorkError as error:
            from surefoot.guard.check import NonFiniteStepError

            if place.rank > 0 and isinstance(error, OtherRankError | NonFiniteStepError):
                raise typer.Exit(error.exit_code) from None  # the main process says it
            raise
        if place.rank == 0:
            print("\n".join(done.summary()))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
