"""A plan as a Dockerfile: everything from Python upwards; kernel, driver and groups stay the host's."""

from __future__ import annotations

import json
import posixpath
import re
from shlex import quote

from surefoot.errors import UserError
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Snapshot
from surefoot.machine.table import load_table
from surefoot.machine.versions import local_tag, rocm_of_tag, short
from surefoot.setup.access import run_flags
from surefoot.setup.choose import USUAL_PYTHON, Target
from surefoot.setup.plan import Plan, Step
from surefoot.setup.system import IDS

#: Steps that are the host's or that the image brings, and those that need the GPU, which no build of one has.
_ELSEWHERE = (*IDS, "serve", "python", "torch-source-compiler", "rocm-devel")
_AT_RUN = ("torch-check", "smoke", "doctor")
_HOME = "/opt/surefoot"


def to_dockerfile(plan: Plan, m: Machine | None = None) -> str:
    """Write a plan as a Dockerfile.

    Args:
        plan: the plan.
        m: the host, whose numeric groups go into the run line; None to let the run line ask the host's nodes.

    Returns:
        The file; its first comments say how to build and run it.

    Raises:
        UserError: the plan's Python is not in the image that it must build in, or Surefoot comes from outside of the
            build's context.
    """
    base, packages = _base(plan)
    brings = plan.wish.env in ("uv", "conda")  # its step `python` fetches uv or conda, which bring their own Python
    kept = [s for s in plan.steps if s.id not in (*_ELSEWHERE, *_AT_RUN) or (brings and s.id == "python")]
    folder = posixpath.join(_HOME, plan.wish.folder)
    lines = [
        "# syntax=docker/dockerfile:1",
        f"# Written by `surefoot setup --dockerfile`. {' '.join(plan.machine.split())}",
        "# Kernel, driver and firmware are the host's. Not run on AMD by its authors.",
        "#   docker build -t surefoot .",
        f"#   {_run_line(plan, m)}",
        "# Groups go by number: names differ inside, numbers between hosts: stat -c %g /dev/kfd /dev/dri/renderD*",
        "# First in the container: surefoot setup smoke && surefoot doctor",
        f"FROM {base}",
        'SHELL ["/bin/bash", "-euo", "pipefail", "-c"]',
        "ENV PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore",
        f"RUN apt-get update && apt-get install -y --no-install-recommends {packages} && rm -rf /var/lib/apt/lists/*",
        f"WORKDIR {_HOME}",
        *_copied(plan),
    ]
    for step in kept:
        lines += ["", *_run(step)]
    path = [] if plan.wish.env == "system" else [f'ENV PATH="{folder}/bin:$PATH"']
    return "\n".join([*lines, "", *path, "WORKDIR /workspace", 'CMD ["bash"]']) + "\n"


def _base(plan: Plan) -> tuple[str, str]:
    """Choose the image to build on and the packages that it lacks; Triton needs a C compiler even at run time."""
    python, images = _python(plan), load_table().addons["container"]
    if not any("rocm-devel" in step.needs for step in plan.steps):
        more = " curl ca-certificates" if plan.wish.env in ("uv", "conda") else ""
        return images["plain"].format(python=python), "gcc g++ libc6-dev git" + more
    rocm = rocm_of_tag(local_tag(plan.torch))
    if python == images["rocm_python"] and rocm < (7, 9) and plan.wish.env in ("venv", "docker"):
        return images["rocm"].format(rocm=short(rocm)), f"build-essential git python{python}-dev python{python}-venv"
    raise UserError(
        f"no image has ROCm {short(rocm)}'s compiler and a Python {python} for --env {plan.wish.env}",
        hint=f"would match: ROCm below 7.9 with Python {images['rocm_python']} and --env docker; or --source amd",
        key="--dockerfile",
    )


def _python(plan: Plan) -> str:
    """Read the Python that the plan's environment is made with."""
    lines = [line for step in plan.steps if step.id == "env" for line in (*step.commands, *step.verify)]
    found = re.search(r"version_info\[:2\] != \((\d+), (\d+)\)", "\n".join(lines))
    return f"{found.group(1)}.{found.group(2)}" if found else short(USUAL_PYTHON)


def _run_line(plan: Plan, m: Machine | None) -> str:
    host = m or Machine(Snapshot({}))
    kind = "rocm" if plan.targets else "cpu" if local_tag(plan.torch) == "cpu" else "cuda"
    target = Target(kind, plan.targets, set(plan.targets) <= set(host.targets), "")
    return " ".join(["docker run --rm -it", run_flags(host, target), '-v "$PWD":/workspace surefoot']).replace(
        "  ", " "
    )


def _copied(plan: Plan) -> list[str]:
    """Copy Surefoot in where it is a folder or a file and no requirement."""
    source = plan.wish.surefoot
    if not (
        source.startswith(".")
        or source.endswith(".whl")
        or ("/" in source and "://" not in source and "@" not in source)
    ):
        return []
    wheel = f"{source}, as a wheel: python3 -m pip wheel --no-deps -w . {quote(source)}, then --surefoot ./NAME.whl"
    if posixpath.isabs(source) or posixpath.normpath(source).startswith(".."):
        raise UserError(
            f"a container's build sees only what is in its folder, and {source} is outside",
            hint=f"take {wheel}",
            key="--surefoot",
        )
    if posixpath.normpath(source) == ".":
        raise UserError(
            "the whole folder would go into the image, its environment with this host's paths too",
            hint=f"take {wheel}",
            key="--surefoot",
        )
    return [f"COPY {json.dumps([source, source])}"]  # this form allows spaces


def _run(step: Step) -> list[str]:
    """One RUN for a step: its commands, then its checks, so that a layer that does not hold is never kept."""
    title = " ".join(step.title.split())
    lines = [line.replace("sudo ", "") if step.root else line for line in step.commands]
    lines = [re.sub(r"^ROCM_HOME=/\S+$", "ROCM_HOME=/opt/rocm", line) for line in lines]  # the host's may be elsewhere
    return [f"# {step.id}: {title}", "RUN <<'STEP'", *lines, *step.verify, "STEP"]
