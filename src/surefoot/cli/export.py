"""`surefoot export`: merge an adapter into its base model and prove that the result says the same."""

from __future__ import annotations

import sys

import typer

from surefoot.cli.outcome import exit_codes
from surefoot.cli.request import split_request


def export(ctx: typer.Context, debug: bool = typer.Option(False, "--debug", help="Show tracebacks.")) -> None:
    """Merge an adapter and check the result.

    surefoot export RUN_DIR | job.yaml export_dir=FOLDER [key=value ...] [--key value ...]
    """
    with exit_codes(debug=debug):
        path, overrides = split_request(ctx.args, "export")

        from surefoot.use.target import load_target

        cfg = load_target(path, overrides, "export")

        from surefoot.use.export import export_model

        done = export_model(cfg, say=lambda message: print(message, file=sys.stderr))
        print("\n".join(done.summary()))
