"""A second pair of eyes: what is wrong with a plan, by the table and by facts that the planner does not write down."""

from __future__ import annotations

import re

from surefoot.machine.facts import Machine
from surefoot.machine.table import load_table
from surefoot.machine.versions import parse_version, rocm_of_tag
from surefoot.setup.plan import CONSTRAINTS, Plan, Step, misplaced

# The order of a training environment; what is missing in a plan is skipped.
ORDER = (
    "firmware", "kernel", "driver", "reboot", "groups", "login", "python", "env", "pip-tools", "constraints", "torch",
    "torch-check", "flash-attn", "bitsandbytes", "deepspeed", "serve", "trainer", "pip-check", "smoke", "doctor",
)  # fmt: skip
OFFICIAL = r"https://download\.pytorch\.org/whl/rocm([\d.]+)$"
# Variables and options that take several targets, and what joins them.
JOINED = {
    "PYTORCH_ROCM_ARCH": ";",
    "GPU_ARCHS": ";",
    "BNB_ROCM_ARCH": ";",
    "CMAKE_HIP_ARCHITECTURES": ";",
    "AMDGPU_TARGETS": ";",
    "GPU_TARGETS": ";",
    "HIP_ARCHITECTURES": " ",
    "HCC_AMDGPU_TARGET": ",",
}


def review(plan: Plan, m: Machine) -> list[str]:
    """Everything that is wrong with a plan, a sentence each."""
    places = {step.id: number for number, step in enumerate(plan.steps)}
    known = [places[name] for name in ORDER if name in places]
    wrong = misplaced(plan.steps)
    wrong += [] if known == sorted(known) else [f"the order is {list(places)}"]
    wrong += [f"{name} is missing" for name in ("env", "smoke", "doctor") if name not in places]
    for step in plan.steps:
        wrong += [
            f"{step.id} has no {n}" for n in ("title", "reason", "commands", "verify", "undo") if not getattr(step, n)
        ]
        wrong += _root(step, m)
    return wrong + _torch(plan, m) + _pip(plan) + _separators(plan) + _driver(plan, m) + _restart(plan)


def lines_of(plan: Plan) -> list[tuple[str, str]]:
    """Each command line of a plan with its step's id, heredocs in pieces."""
    return [(step.id, line) for step in plan.steps for command in step.commands for line in command.splitlines()]


def _root(step: Step, m: Machine) -> list[str]:
    text = "\n".join(step.commands)
    if m.root and "sudo" in text:
        return [f"{step.id} calls sudo, but this is root"]
    return [f"{step.id} calls sudo without saying that it needs root"] if "sudo " in text and not step.root else []


def _torch(plan: Plan, m: Machine) -> list[str]:
    """Local version tags, kernels for the targets, Python, one source."""
    table, tag = load_table(), plan.torch.partition("+")[2]
    rocm, wrong = rocm_of_tag(tag), []
    row = table.torch_release(parse_version(plan.torch)) if plan.torch else None
    tags = {pin.partition("+")[2] for pin in plan.constraints}
    if len(tags) > 1:
        wrong.append(f"the pins are of several builds: {plan.constraints}")
    if plan.targets and plan.torch:
        assert row is not None
        if not rocm:
            wrong.append(f"{plan.torch} has no ROCm in its tag")
        official = re.match(OFFICIAL, plan.index)
        built = plan.wish.source == "source"
        if official:
            listed = [v for v in row.rocm if v == official.group(1)]
            wrong += [] if listed and tag == f"rocm{listed[0]}" else [f"PyTorch has no {plan.torch} on {plan.index}"]
            wrong += [f"that wheel has no {t}" for t in plan.targets if t not in table.wheel_targets(rocm)]
        elif not built and not plan.wish.index:
            version = ".".join(str(n) for n in rocm[:2])
            wrong += [] if version in row.amd and tag == f"rocm{version}.0" else [f"AMD has no {plan.torch}"]
            wrong += [] if ("10." in version) == ("stable.repo.amd.com" in plan.index) else [f"{version}: {plan.index}"]
            gfx = next(r.gfx for r in table.rocm if r.version[:2] == rocm[:2])
            wrong += [f"ROCm {version} has no {t}" for t in plan.targets if t not in gfx]
            text = "\n".join(line for _, line in lines_of(plan))
            wrong += [f"device-{t} is not asked for" for t in plan.targets if f"device-{t}" not in text]
    python = re.search(r"version_info\[:2\] != \((\d+), (\d+)\)", "\n".join(v for s in plan.steps for v in s.verify))
    if row and python:
        number = (int(python.group(1)), int(python.group(2)))
        wrong += [] if row.python[0] <= number <= row.python[1] else [f"torch {row.version} has no wheel for {number}"]
    return wrong


def _pip(plan: Plan) -> list[str]:
    """Torch from one place, and no later install without the constraints."""
    wrong, asked, seen = [], [], False
    for name, line in lines_of(plan):
        if "--extra-index-url" in line:
            wrong.append(f"{name} takes a second index: {line}")
        if not re.search(r"pip install\b", line):
            continue
        if name == "torch":
            asked.append(line)
            seen = True
        elif seen and f"-c {CONSTRAINTS}" not in line:
            wrong.append(f"{name} installs without the constraints: {line}")
        if name != "torch" and re.search(r"\btorch(\[[^]]*\])?==", line):
            wrong.append(f"{name} installs torch too: {line}")
    if len(asked) != 1:
        wrong.append(f"torch is installed by {len(asked)} commands")
    elif plan.index and plan.wish.source != "source" and f"--index-url {plan.index} " not in asked[0].replace("'", ""):
        wrong.append(f"torch does not come from {plan.index}: {asked[0]}")
    return wrong


def _separators(plan: Plan) -> list[str]:
    wrong = []
    for name, line in lines_of(plan):
        for variable, joint in JOINED.items():
            for value in re.findall(rf"(?<![A-Z_]){variable}=('[^']*'|\"[^\"]*\"|\S*)", line):
                targets = re.findall(r"gfx[0-9a-f]+", value)
                if targets != list(plan.targets) or value.strip("'\"") != joint.join(targets):
                    wrong.append(f"{name}: {variable}={value}")
                if ";" in value and value[0] not in "'\"":
                    wrong.append(f"{name}: the shell ends {variable}={value} at the first `;`")
    return wrong


def _driver(plan: Plan, m: Machine) -> list[str]:
    """The published window, and who must never get an out-of-tree driver."""
    table = load_table()
    if not plan.targets:
        return [f"{n} has no place in a plan without AMD cards" for n in ("firmware", "kernel") if _step(plan, n)]
    text = "\n".join(line for name, line in lines_of(plan) if name != "env")
    rows = [row for t in plan.targets if (row := table.gpu(t))]
    installs = re.search(r"install .*amdgpu-dkms", text)
    stream = re.search(r"repo\.radeon\.com/amdgpu/([\d.]+)/", text)
    wrong = []
    if installs and (m.container or m.wsl or all(row.integrated for row in rows)):
        wrong.append("amdgpu-dkms in a container, under WSL or on an APU")
    rocm = rocm_of_tag(plan.torch.partition("+")[2])[:2]
    here = set(plan.targets) <= set(m.targets)
    window = table.driver_of(m.driver) if m.driver and here else None
    if stream:
        window = next(row for row in table.drivers if row.stream == stream.group(1))
    if bool(installs) != bool(stream):
        wrong.append("amdgpu-dkms without its repository")
    if rocm and window and not window.userspace[0] <= rocm <= window.userspace[1]:
        wrong.append(f"driver {window.stream} does not go with ROCm {rocm}")
    wants = max((parse_version(row.dkms_min) for row in rows), default=())
    if wants and not m.container and not m.wsl and not stream and not (here and m.driver >= wants):
        wrong.append("a card that wants amdgpu-dkms gets none")
    if (m.container or m.wsl) and any(_step(plan, n) for n in ("firmware", "kernel", "reboot", "login")):
        wrong.append("a step of the host's in a container or under WSL")
    return wrong


def _restart(plan: Plan) -> list[str]:
    before = [s.id for s in plan.steps if any("restart-wanted" in c for c in s.commands) and not s.satisfied]
    again, groups, login = (_step(plan, n) for n in ("reboot", "groups", "login"))
    wrong = []
    if again and bool(before) == bool(again.satisfied):
        wrong.append(f"{before or 'nothing'} wants a restart, and the plan's is {again.satisfied or 'to be done'}")
    if groups and login and not groups.satisfied and login.satisfied:
        wrong.append("new groups without a new login")
    return wrong


def _step(plan: Plan, name: str) -> Step | None:
    return next((step for step in plan.steps if step.id == name), None)
