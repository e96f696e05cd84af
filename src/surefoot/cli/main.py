"""The command line. Each command's file imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

import typer

from surefoot import __version__
from surefoot.cli.bench import bench
from surefoot.cli.chat import chat
from surefoot.cli.check import check
from surefoot.cli.doctor import doctor
from surefoot.cli.env import env
from surefoot.cli.export import export
from surefoot.cli.replay import replay
from surefoot.cli.request import PASS_THROUGH
from surefoot.cli.setup import setup
from surefoot.cli.train import train
from surefoot.cli.version import version

app = typer.Typer(
    name="surefoot",
    help="Fine-tune language models on AMD GPUs, NVIDIA GPUs and plain CPU, with the LLaMA-Factory YAML you have.",
    no_args_is_help=True,
    # Rich help and rich tracebacks cost a tenth of a second at every start.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command(context_settings=PASS_THROUGH)(train)
app.command(context_settings=PASS_THROUGH)(check)
app.command(context_settings=PASS_THROUGH)(chat)
app.command(context_settings=PASS_THROUGH)(export)
app.command(context_settings=PASS_THROUGH)(replay)
app.command(context_settings=PASS_THROUGH)(bench)
app.command()(doctor)
app.command()(env)
app.add_typer(setup)
app.command()(version)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"surefoot {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_print_version, is_eager=True),
) -> None:
    """Fine-tune language models on AMD GPUs, NVIDIA GPUs and plain CPU, with the LLaMA-Factory YAML you have."""


def main() -> None:
    """Run the command line."""
    try:
        app()
    except SystemExit as ended:
        if "torch.distributed" in sys.modules and os.environ.get("WORLD_SIZE", "1") != "1":
            _end_one_of_several(ended)
        raise


def _end_one_of_several(ended: SystemExit) -> NoReturn:
    """End as `multiprocessing` ends its children: all that was registered is done, but Python is not taken apart.

    Libraries keep gloo's group in the defaults of their functions beyond its end, and threads of a group that Python
    finds when it takes itself apart abort one process in ten (measured, torch 2.13): exit code -6 after a good run.
    """
    code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
