"""`surefoot train`: run the job that a YAML describes."""

from __future__ import annotations

import typer

from surefoot.cli.outcome import exit_codes
from surefoot.cli.request import split_request


def train(ctx: typer.Context, debug: bool = typer.Option(False, "--debug", help="Show tracebacks.")) -> None:
    """Fine-tune a model.

    surefoot train job.yaml [key=value ...] [--key value ...]
    """
    with exit_codes(debug=debug) as crash:
        path, overrides = split_request(ctx.args, "train")

        from surefoot.config import load_config

        cfg = load_config(path, overrides, purpose="train")

        from surefoot.cli.console import make_console
        from surefoot.run.folder import RunFolder
        from surefoot.run.job import run_job

        folder = RunFolder.of(cfg)
        crash.path = folder.crash_report
        done = run_job(cfg, make_console(stderr=True))
        print("\n".join(done.summary()))
