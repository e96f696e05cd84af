"""`surefoot doctor`: the one cause that keeps this machine from training, and its fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli.outcome import exit_codes
from surefoot.errors import UserError

if TYPE_CHECKING:
    from surefoot.machine.snapshot import Snapshot


def doctor(
    job: Annotated[
        Path | None, typer.Argument(metavar="[YAML]", help="Also find what goes wrong with this YAML here.")
    ] = None,
    capture: Annotated[
        Path | None, typer.Option(help="Write all the doctor looks at into this file, masked, and stop.")
    ] = None,
    snapshot: Annotated[
        Path | None, typer.Option(help="Diagnose this captured JSON, or a hand-written machine in YAML.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="What the failing program printed.")] = None,
    python: Annotated[Path | None, typer.Option(help="Look at the packages of this interpreter.")] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="Write a zip file for an issue, without secrets or names.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also compute small things on the device and check them.")
    ] = False,
    device: Annotated[str, typer.Option(help="Device for --deep: auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    lang: Annotated[str, typer.Option(help="Language of the page: en or zh.")] = "en",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show consequences in full.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Find the one cause that keeps this machine from training, and its fix (exit code 0 healthy, 1 findings)."""
    with exit_codes(debug=debug):
        from surefoot.doctor.diagnose import diagnose

        if lang not in ("en", "zh"):
            raise UserError(f"there is no language {lang!r}", hint="--lang en or --lang zh")
        if capture is not None:
            from surefoot.machine.capture import capture_to_file

            capture_to_file(capture, python)
            print(f"wrote {capture}")
            return
        machine, config = _machine(snapshot, python)
        config = _job(job) or config
        if log is not None:
            machine.raw["log"] = _text(log)
        if deep:
            machine.raw["probes"] = _probes(machine, device, python, quiet=as_json)
        report = diagnose(machine, lang, config)
        if bundle is not None:
            from surefoot.doctor.support import write_bundle

            write_bundle(bundle, machine, report, {"log.txt": _text(log)} if log else None)
        if as_json:
            probes = {"probes": machine.raw["probes"]} if deep else {}
            print(json.dumps(report.to_json() | probes, indent=2, ensure_ascii=False))
        else:
            from rich.console import Console

            from surefoot.doctor.render import render

            render(report, Console(), lang, verbose)
        raise typer.Exit(report.exit_code)


def _job(path: Path | None) -> dict[str, object] | None:
    """The training YAML, if one was named."""
    if path is None:
        return None
    from surefoot.doctor.job import read_job

    return read_job(path)


def _machine(path: Path | None, python: Path | None) -> tuple[Snapshot, dict[str, object] | None]:
    """The live machine, a captured file, or a hand-written case with the training YAML that it may hold."""
    if path is None:
        from surefoot.machine.capture import capture

        return capture(python=python), None
    if path.suffix in (".yaml", ".yml"):
        from surefoot.machine.case import load_cases

        case, *others = load_cases(path)
        if others:
            raise UserError(
                f"{path} holds {len(others) + 1} cases", hint="keep the one to diagnose in a file of its own"
            )
        return case.snapshot, case.config or None
    from surefoot.machine.snapshot import load_snapshot

    return load_snapshot(path), None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[-2_000_000:]
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}", hint="name the log of the failing program"
        ) from error


def _probes(machine: Snapshot, device: str, python: Path | None, *, quiet: bool) -> list[dict[str, object]]:
    """Run the deep probes and the trial loads, a line each as it comes."""
    from surefoot.doctor.deep import run_deep

    found = []
    for result in run_deep(machine, device, python):
        found.append(result.to_json())
        if not quiet:
            print(f"{'ok  ' if result.ok else 'FAIL'}  {result.name:20}  {result.detail}", flush=True)
    return found
