"""`surefoot chat`: talk to a model, with or without an adapter."""

from __future__ import annotations

import sys

import typer

from surefoot.cli.outcome import exit_codes
from surefoot.cli.request import split_request


def chat(
    ctx: typer.Context,
    prompt: str = typer.Option("", "--prompt", help="Answer this on stdout and end."),
    system: str = typer.Option("", "--system", help="The system prompt."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
) -> None:
    """Talk to a model.

    surefoot chat RUN_DIR | MODEL_DIR | job.yaml [key=value ...] [--key value ...]
    """
    with exit_codes(debug=debug):
        path, overrides = split_request(ctx.args, "chat")

        from surefoot.use.target import load_target

        cfg = load_target(path, overrides, "chat")

        from surefoot.use.chat import converse, open_chat

        session = open_chat(cfg, say=lambda message: print(message, file=sys.stderr))
        session.system = system
        if prompt:
            session.ask(prompt, _show)
            _show("\n")
        else:
            converse(session, _read, _show)


def _read(question: str) -> str:
    if sys.stdin.isatty():
        return input(question)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _show(text: str) -> None:
    print(text, end="", flush=True)
