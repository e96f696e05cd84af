"""`surefoot setup`: the ordered plan from this machine to a training environment; shown, written down or run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli.outcome import exit_codes
from surefoot.cli.setup_run import execute, say, smoke
from surefoot.errors import UserError

if TYPE_CHECKING:
    from surefoot.machine.snapshot import Snapshot
    from surefoot.setup.plan import Plan, Wish

setup = typer.Typer(
    name="setup",
    help="Plan the way from this machine to a training environment, step by step; show it, write it down or run it.",
    invoke_without_command=True,
    rich_markup_mode=None,
    add_completion=False,
)

For = Annotated[str, typer.Option("--for", help="train, joined with deepspeed, flash-attn or serve by +.")]
Gpu = Annotated[str, typer.Option(help="Plan for this: gfx942, 'RX 7900 XTX', nvidia or cpu; empty: what is here.")]
Rocm = Annotated[str, typer.Option(help="ROCm release, as 7.2; empty: choose.")]
Torch = Annotated[str, typer.Option(help="torch release, as 2.13; empty: choose.")]
Source = Annotated[str, typer.Option(help="Where torch comes from: pip, amd or source; empty: choose.")]
Env = Annotated[str, typer.Option(help="Environment: venv, uv, conda, system or docker.")]
Folder = Annotated[str, typer.Option(help="Where the environment goes.")]
Index = Annotated[str, typer.Option(help="Take torch from this index, as a company's mirror.")]
Surefoot = Annotated[
    str, typer.Option(help="What pip installs Surefoot from: a requirement or a folder; empty: where this one is from.")
]
Machine = Annotated[Path | None, typer.Option("--snapshot", help="Plan for this captured JSON, or a machine in YAML.")]
Lang = Annotated[str, typer.Option(help="Language: en or zh.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
#: Options that say what is wanted, as against what to do with the plan.
_WISHES = {"--for", "--gpu", "--rocm", "--torch", "--source", "--env", "--folder", "--index", "--surefoot"}


@setup.callback()
def plan(
    context: typer.Context,
    purposes: For = "train",
    gpu: Gpu = "",
    rocm: Rocm = "",
    torch: Torch = "",
    source: Source = "",
    env: Env = "venv",
    folder: Folder = ".venv",
    index: Index = "",
    surefoot: Surefoot = "",
    show: Annotated[
        bool, typer.Option("--plan", help="Show the plan; what is done without any of the others.")
    ] = False,
    script: Annotated[Path | None, typer.Option(help="Write the plan as a bash script.")] = None,
    dockerfile: Annotated[Path | None, typer.Option(help="Write the plan as a Dockerfile.")] = None,
    lock: Annotated[Path | None, typer.Option(help="Write every package with its version and hash.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Run the plan here, each step verified before the next.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that stopped here.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Answer yes where a step needs root.")] = False,
    offline: Annotated[Path | None, typer.Option(help="Take every package from this bundle.")] = None,
    snapshot: Machine = None,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show checks, undo and downloads too.")] = False,
    debug: Debug = False,
) -> None:
    """Plan the way from this machine to a training environment, step by step; show it, write it down or run it."""
    with exit_codes(debug=debug):
        given = _given(context)
        if context.invoked_subcommand is not None:
            if given:
                raise UserError(
                    f"{given[0]} stands before `{context.invoked_subcommand}`",
                    hint=f"options go behind it: surefoot setup {context.invoked_subcommand} ...",
                )
            return
        _check_deeds(given, snapshot, run=run or resume, as_json=as_json, yes=yes)
        surefoot = surefoot or _own_source(snapshot)
        wish = _wish(purposes, gpu, rocm, torch, source, env, folder, index, surefoot)
        if resume and offline is None and not _WISHES.intersection(given):
            execute(_under_way(), Path.cwd(), resume=True, yes=yes)
            return
        from surefoot.setup.planner import make_plan

        machine = _machine(snapshot)
        made = make_plan(machine, wish)
        if offline is not None:
            from surefoot.setup.bundle import offline as take_from

            made = take_from(made, offline)
        if run or resume:
            _check_here(machine, wish)
            execute(made, Path.cwd(), resume=resume, yes=yes)
            return
        for path, text in _written(made, machine, wish, script, dockerfile):
            _write(path, text, executable=path == script)
        if lock is not None:
            from surefoot.setup.lock import write_lock

            write_lock(made, lock, say)
            print(f"wrote {lock}")
        if as_json:
            print(json.dumps(made.to_json(), indent=2, ensure_ascii=False))
        elif show or not (script or dockerfile or lock):
            from surefoot.cli.console import make_console
            from surefoot.setup.render import render

            render(made, make_console(stderr=False), verbose)


@setup.command()
def explain(
    rule: Annotated[str, typer.Argument(help="An id of the doctor's, as F35.")],
    snapshot: Machine = None,
    lang: Lang = "en",
    debug: Debug = False,
) -> None:
    """Explain one of the doctor's findings for this machine: what, why, how it is seen, its fix."""
    with exit_codes(debug=debug):
        _check_language(lang)
        from surefoot.setup.explain import explain as write

        print(write(rule, _machine(snapshot), lang))


@setup.command()
def advice(
    tutorial: Annotated[Path | None, typer.Argument(help="A tutorial's text; without it, what comes on stdin.")] = None,
    snapshot: Machine = None,
    lang: Lang = "en",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Judge a tutorial's commands for this machine: right, outdated or wrong, and what to do instead."""
    with exit_codes(debug=debug):
        _check_language(lang)
        from surefoot.machine.facts import Machine as Facts
        from surefoot.setup.advice import judge, render, to_json

        verdicts = judge(_text(tutorial), Facts(_machine(snapshot)), lang)
        if as_json:
            print(json.dumps(to_json(verdicts), indent=2, ensure_ascii=False))
        else:
            from surefoot.cli.console import make_console

            render(verdicts, make_console(stderr=False), lang)


@setup.command()
def bundle(
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the bundle goes.")],
    purposes: For = "train",
    gpu: Gpu = "",
    rocm: Rocm = "",
    torch: Torch = "",
    source: Source = "",
    env: Env = "venv",
    folder: Folder = ".venv",
    index: Index = "",
    surefoot: Surefoot = "",
    snapshot: Machine = None,
    debug: Debug = False,
) -> None:
    """Fetch every package of a plan for a site without network: there, surefoot setup --offline FOLDER."""
    with exit_codes(debug=debug):
        from surefoot.setup.bundle import bundle as fetch
        from surefoot.setup.planner import make_plan

        surefoot = surefoot or _own_source(snapshot)
        wish = _wish(purposes, gpu, rocm, torch, source, env, folder, index, surefoot)
        fetch(make_plan(_machine(snapshot), wish), target, say)
        print(f"wrote {target}")


setup.command()(smoke)


# ---- parts ----
def _given(context: typer.Context) -> list[str]:
    """Options that stand on the command line, as typed by their first name."""
    named = {p.name: p.opts[0] for p in context.command.params if p.name}
    return [
        named[name]
        for name in context.params
        if name in named and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]


def _own_source(snapshot: Path | None) -> str:
    """Say what the Surefoot that plans was installed from: its checkout, where it is one and the plan is for here."""
    import surefoot

    checkout = Path(surefoot.__file__).resolve().parents[2]
    return str(checkout) if snapshot is None and (checkout / "pyproject.toml").is_file() else "surefoot"


def _wish(
    purposes: str, gpu: str, rocm: str, torch: str, source: str, env: str, folder: str, index: str, surefoot: str
) -> Wish:
    from surefoot.setup.plan import Wish

    parts = [part.strip() for part in purposes.replace(",", "+").split("+") if part.strip()]
    return Wish(
        purposes=tuple(dict.fromkeys(["train", *parts])),
        gpu=gpu.strip(),
        rocm=rocm.strip(),
        torch=torch.strip(),
        source=source.strip(),
        env=env.strip(),
        folder=folder,
        surefoot=surefoot,
        index=index.strip(),
    )


def _check_deeds(given: list[str], snapshot: Path | None, *, run: bool, as_json: bool, yes: bool) -> None:
    """Refuse what cannot be meant together."""
    other = [name for name in ("--script", "--dockerfile", "--lock", "--plan", "--json") if name in given]
    if run and other:
        raise UserError("does not go with --run", hint="one command after the other", key=other[0])
    if run and snapshot is not None:
        raise UserError(
            "works on this machine, and --snapshot is another", hint="write it down with --script FILE", key="--run"
        )
    if yes and not run:
        raise UserError("answers the questions of --run", hint="add --run, or leave it out", key="--yes")


def _check_here(machine: Snapshot, wish: Wish) -> None:
    from surefoot.machine.facts import Machine as Facts
    from surefoot.setup.target import target_of

    target = target_of(Facts(machine), wish)
    if not target.here:
        raise UserError(
            f"this machine has no {', '.join(target.gfx) or 'NVIDIA GPU'}",
            hint="write the plan down for the other one: --script FILE or --dockerfile FILE",
            key="--gpu",
        )


def _check_language(lang: str) -> None:
    if lang not in ("en", "zh"):
        raise UserError(f"there is no language {lang!r}", hint="--lang en or --lang zh")


def _under_way() -> Plan:
    from surefoot.setup.run import plan_under_way

    found = plan_under_way(Path.cwd())
    if found is None:
        raise UserError("nothing was begun in this folder", hint="begin with: surefoot setup --run", key="--resume")
    return found


def _machine(path: Path | None) -> Snapshot:
    """The live machine, a captured file, or a hand-written machine."""
    if path is None:
        from surefoot.machine.capture import capture

        return capture()
    if path.suffix in (".yaml", ".yml"):
        from surefoot.machine.case import load_cases

        return load_cases(path)[0].snapshot
    from surefoot.machine.snapshot import load_snapshot

    return load_snapshot(path)


def _written(
    made: Plan, machine: Snapshot, wish: Wish, script: Path | None, dockerfile: Path | None
) -> list[tuple[Path, str]]:
    found = []
    if script is not None:
        from surefoot.setup.script import to_script

        found.append((script, to_script(made)))
    if dockerfile is not None:
        from surefoot.machine.facts import Machine as Facts
        from surefoot.setup.dockerfile import to_dockerfile
        from surefoot.setup.planner import inside_plan

        inside = inside_plan(machine, wish) if wish.env == "docker" else made
        found.append((dockerfile, to_dockerfile(inside, Facts(machine))))
    return found


def _write(path: Path, text: str, *, executable: bool) -> None:
    from surefoot.files import write_text

    write_text(path, text)
    if executable:
        path.chmod(path.stat().st_mode | 0o111)
    print(f"wrote {path}")


def _text(path: Path | None) -> str:
    if path is None:
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", hint="name a tutorial's text") from error
