"""The steps inside Python: interpreter, environment, pip, constraints, torch, the trainer and the checks."""

from __future__ import annotations

import posixpath
from shlex import quote
from typing import Any
from urllib.parse import urlsplit

from surefoot.errors import UserError
from surefoot.machine.facts import Machine
from surefoot.machine.table import load_table
from surefoot.machine.versions import parse_version, short
from surefoot.setup.choose import Choice
from surefoot.setup.lines import ready
from surefoot.setup.plan import CONSTRAINTS, STATE_FOLDER, Step, Wish
from surefoot.setup.target import Target

#: Where their installers put the programs for one's own account, when they are not on PATH.
_UV = '"$(command -v uv || echo "$HOME/.local/bin/uv")"'
_CONDA = '"$(command -v conda || echo "$HOME/miniforge3/bin/conda")"'
_MINIFORGE = "https://github.com/conda-forge/miniforge/releases/latest/download/Miniforge3-Linux-x86_64.sh"
_PYTHONS = {
    "apt": ("sudo apt-get update", "sudo apt install python{v} python{v}-venv"),
    "dnf": ("sudo dnf install python{v}",),
    "zypper": ("sudo zypper install python{n}",),
    "pacman": ("sudo pacman -S python",),
}
#: Names that a later install must not change: torch, its companions, its Triton and its ROCm.
_PINNED = (
    "(torch|torchvision|torchaudio|triton|(pytorch[-_])?triton[-_]rocm|rocm|(rocm[-_]sdk|amd[-_]torch[-_]device)[-_].*)"
)


def environment_steps(m: Machine, wish: Wish, choice: Choice) -> tuple[Step, ...]:
    """Plan everything before torch: the interpreter, the environment, pip's own tools and the constraints file.

    Args:
        m: the machine.
        wish: the wish.
        choice: the torch.

    Returns:
        The steps `python`, `env`, `pip-tools` and `constraints`.
    """
    return (_python(m, wish, choice), _env(wish, choice), _pip_tools(choice), _constraints(choice))


# ---- interpreter and environment ----
def _python(m: Machine, wish: Wish, choice: Choice) -> Step:
    v = choice.python
    what = "Python " + v
    common: dict[str, Any] = {"id": "python", "reason": _why_python(m, choice)}
    if wish.env == "uv":
        return Step(
            title="Get uv, which brings its own Python",
            commands=("curl -LsSf https://astral.sh/uv/install.sh | sh",),
            verify=(f"{_UV} --version",),
            undo=('rm -f "$HOME/.local/bin/uv" "$HOME/.local/bin/uvx"',),
            disk_gib=0.1, minutes=1, downloads=("0.03 GiB from astral.sh",), **common,
        )  # fmt: skip
    if wish.env == "conda":
        return Step(
            title="Get conda, which brings its own Python",
            commands=(
                f"mkdir -p {STATE_FOLDER}",
                f"curl -fsSL -o {STATE_FOLDER}/miniforge.sh {_MINIFORGE}",
                f'bash {STATE_FOLDER}/miniforge.sh -b -p "$HOME/miniforge3"',
                f"rm -f {STATE_FOLDER}/miniforge.sh",
            ),
            verify=(f"{_CONDA} --version",),
            undo=('rm -rf "$HOME/miniforge3"',),
            disk_gib=0.5, minutes=2, downloads=("0.1 GiB from github.com",), **common,
        )  # fmt: skip
    lines = ready(m, [line.format(v=v, n=v.replace(".", "")) for line in _PYTHONS.get(m.packager, ())])
    return Step(
        title=f"Install {what}",
        commands=lines
        or (f'echo "install {what} with venv and pip from your distribution, then go on" >&2', "exit 1"),
        verify=(f"{_binary(wish, choice)} -c 'import ensurepip, sys, venv; "
                f"sys.exit(sys.version_info[:2] != {_tuple(v)})'",),
        undo=(f"# {what} may stay: other programs may use it by now",),
        root=bool(lines), disk_gib=0.1, minutes=1, downloads=("0.03 GiB from the distribution",),
        satisfied=_python_here(m, choice), **common,
    )  # fmt: skip


def _why_python(m: Machine, choice: Choice) -> str:
    named = f"torch {choice.torch}" if choice.torch else "torch"
    own = short(m.python_version)
    other = f", not for this machine's {own}; where the distribution has none, --env uv brings it"
    return f"wheels of {named} exist for Python {choice.python}" + (other if own and own != choice.python else "")


def _binary(wish: Wish, choice: Choice) -> str:
    return "python3" if wish.env == "system" else f"python{choice.python}"


def _tuple(version: str) -> str:
    return str(parse_version(version)[:2])


def _python_here(m: Machine, choice: Choice) -> str:
    """The fact that the right Python is on PATH; its venv module may be missing where apt cuts Python up."""
    executable = m.python.get("executable")
    folder = posixpath.dirname(executable) if isinstance(executable, str) else ""
    known = bool(folder) and folder in (m.env("PATH") or "").split(":")
    cut_up = m.packager == "apt" and m.python.get("kind") == "system"
    right = short(m.python_version) == choice.python and m.python.get("free_threaded") is not True
    return f"Python {short(m.python_version, 3)} is at {executable}" if known and right and not cut_up else ""


def _env(wish: Wish, choice: Choice) -> Step:
    v, folder = choice.python, quote(wish.folder)
    right = f"{choice.interpreter} -c 'import sys; sys.exit(sys.version_info[:2] != {_tuple(v)})'"
    common: dict[str, Any] = {"id": "env", "needs": ("python",), "disk_gib": 0.1, "minutes": 0.5}
    if wish.env == "system":
        return Step(
            title="Use the system's Python",
            reason="--env system: packages go into the Python that is here",
            commands=(right, f"{choice.pip} --version"),
            verify=(right, f"{choice.pip} --version"),
            undo=("# nothing was made",), **common,
        )  # fmt: skip
    made = {
        "venv": (f"python{v} -m venv {folder}", "with venv"),
        "uv": (f"{_UV} venv --seed --python {v} {folder}", "with uv, pip inside"),
        "conda": (
            f"{_CONDA} create --yes --override-channels -c conda-forge -p {folder} python={v} pip 'libstdcxx-ng>=12'",
            "with conda, Python alone",
        ),
    }
    command, how = made[wish.env]
    reasons = {
        "venv": "an environment of its own keeps torch apart from what other programs install",
        "uv": "an environment of its own keeps torch apart; uv fetches the Python where it is missing",
        "conda": "Python and libstdc++ (ROCm wants GLIBCXX_3.4.30) come from conda, all packages from pip's one index",
    }
    return Step(
        title=f"Make the environment {wish.folder} {how}",
        reason=reasons[wish.env],
        commands=(command,),
        verify=(right, f"{choice.pip} --version"),
        undo=(f"rm -rf {folder}",),
        downloads=("Python, where it is missing",) if wish.env != "venv" else (), **common,
    )  # fmt: skip


def _pip_tools(choice: Choice) -> Step:
    return Step(
        id="pip-tools",
        title="Bring pip and its build tools up to date",
        reason="old pips choose wrongly among local version tags; builds without isolation need setuptools and wheel",
        commands=(f"{choice.pip} install --upgrade 'pip>=25' 'setuptools>=77' wheel packaging",),
        verify=(
            f"{choice.interpreter} -c 'import importlib.metadata as m, sys, packaging, wheel; "
            'sys.exit(int(m.version("pip").split(".")[0]) < 25 or int(m.version("setuptools").split(".")[0]) < 77)\'',
        ),
        undo=("# they go with the environment",),
        needs=("env",),
        minutes=0.5,
        downloads=("0.01 GiB from pip's index",),
    )


def _constraints(choice: Choice) -> Step:
    lines = choice.pins
    words = " ".join(quote(line) for line in lines)
    return Step(
        id="constraints",
        title=f"Write {CONSTRAINTS}",
        reason="every later pip call gets it (-c), so that none can replace this torch by another build",
        commands=(
            f"mkdir -p {STATE_FOLDER}",
            f"printf '%s\\n' {words} > {CONSTRAINTS}" if lines else f": > {CONSTRAINTS}",
        ),
        verify=tuple(_holds(line) for line in lines) or (f"test -f {CONSTRAINTS}",),
        undo=(f"rm -f {CONSTRAINTS}",),
        needs=("env",),
    )


def _holds(line: str) -> str:
    """A test that the constraints have a line; a mirror's build may carry a local tag that the plan does not know."""
    if "+" in line:
        return f"grep -qxF {quote(line)} {CONSTRAINTS}"
    pattern = line.replace(".", "[.]") + "([+]|$)"
    return f"grep -qE {quote('^' + pattern)} {CONSTRAINTS}"


# ---- torch ----
def torch_line(choice: Choice) -> str:
    """The one command that installs torch and its companions.

    Args:
        choice: the torch.

    Returns:
        A pip call with one index, `--index-url`, or with pip's own default where the choice names none.
    """
    pre = " --pre" if choice.source == "nightly" else ""
    index = f" --index-url {quote(choice.index)}" if choice.index else ""
    return f"{choice.pip} install{pre}{index} {' '.join(quote(r) for r in choice.requirements)}"


def keep_line(choice: Choice) -> str:
    """The command that rewrites the constraints from what is installed, Triton and ROCm's packages included."""
    return f"{choice.pip} list --format=freeze | grep -E '^{_PINNED}==' > {CONSTRAINTS}"


def has_torch(choice: Choice) -> str:
    """A quick test that exactly the chosen torch is installed, without importing it."""
    test = f'm.version("torch") != "{choice.torch}"' if choice.torch else 'not m.version("torch")'
    if choice.torch and "+" not in choice.torch:  # a mirror's or the default index's build may carry a tag
        test = f'm.version("torch").partition("+")[0] != "{choice.torch}"'
    return f"{choice.interpreter} -c 'import importlib.metadata as m, sys; sys.exit({test})'"


def torch_step(choice: Choice) -> Step:
    """Plan the install of torch from its index.

    Args:
        choice: the torch.

    Returns:
        The step `torch`.
    """
    channel = load_table().channels.get(choice.channel)
    size, disk = (channel.download_gib, channel.disk_gib) if channel else (3.0, 8.0)
    names = f"torch {choice.torch}" if choice.torch else "the newest nightly torch"
    host = urlsplit(choice.index).hostname or "pip's own index"
    split = choice.source in ("amd", "nightly")
    return Step(
        id="torch",
        title=f"Install {names}",
        reason=choice.reason + (". Kernels come as one package per target, named by the extras" if split else ""),
        commands=(torch_line(choice), keep_line(choice)),
        verify=(has_torch(choice), f"grep -q '^torch==' {CONSTRAINTS}"),
        undo=(f"{choice.pip} uninstall -y torch torchvision torchaudio",),
        needs=("pip-tools", "constraints"),
        disk_gib=disk,
        minutes=round(1 + 1.5 * size),
        downloads=(f"{size:g} GiB from {host}",),
    )


def torch_check_step(choice: Choice, target: Target, prefix: str, needs: tuple[str, ...]) -> Step:
    """Plan the check that torch is the right build, has the kernels and computes.

    Args:
        choice: the torch.
        target: what is planned for.
        prefix: variables to set for the check, as `HIP_VISIBLE_DEVICES=0 `, or empty.
        needs: ids of the steps before.

    Returns:
        The step `torch-check`.
    """
    lines = ["import torch", 'print(torch.__version__, torch.version.hip or torch.version.cuda or "cpu")']
    if target.kind == "rocm":
        lines.append('assert torch.version.hip, "this torch is no ROCm build"')
    if target.kind != "cpu":
        lines.append('assert torch.cuda.is_available(), "torch sees no GPU"')
    if target.kind == "rocm" and choice.source in ("pip", "source"):
        lines.append("flags = torch._C._cuda_getArchFlags()")
        lines += [f'assert "{gfx}" in flags, "no kernels for {gfx}: " + flags' for gfx in choice.targets]
    if target.kind == "rocm" and choice.source in ("amd", "nightly"):
        lines.append("from importlib.metadata import version")
        lines += [f'print(version("rocm-sdk-device-{gfx}"))' for gfx in choice.targets]
    if target.kind != "cpu":
        lines.append("for i in range(torch.cuda.device_count()):")
        lines.append('    assert (torch.ones(2, device=f"cuda:{i}") + 1).sum().item() == 4')
        lines.append("    print(i, torch.cuda.get_device_name(i))")
    else:
        lines.append("assert (torch.ones(2, 2) @ torch.ones(2, 2)).sum().item() == 8")
    code = "\n".join(lines)
    return Step(
        id="torch-check",
        title="Check that torch is the right build and computes",
        reason="a wheel for other cards installs well and fails at the first kernel",
        commands=kept(f"{prefix}{choice.interpreter} -c '{code}'", "torch-check.txt"),
        verify=(has_torch(choice), *fresh(choice, "torch-check.txt", "/torch/version.py")),
        undo=(f"rm -f {STATE_FOLDER}/torch-check.txt",),
        needs=needs,
        minutes=0.5,
    )


def kept(command: str, name: str) -> tuple[str, ...]:
    """Lines that run a check, show its output, and keep it in the state folder only when the check ends well."""
    path = f"{STATE_FOLDER}/{name}"
    return f"mkdir -p {STATE_FOLDER}", f"{command} | tee {path}.part", f"mv {path}.part {path}"


def fresh(choice: Choice, name: str, inside: str = "") -> tuple[str, ...]:
    """Quick tests that a check's output is kept and no older than the packages (or one file of them)."""
    where = f"{choice.interpreter} -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))'"
    path = f"{STATE_FOLDER}/{name}"
    return f"test -s {path}", f'test ! {path} -ot "$({where}){inside}"'


# ---- the trainer and the last checks ----
def trainer_steps(wish: Wish, choice: Choice, after: tuple[str, ...], prefix: str) -> tuple[Step, ...]:
    """Plan the trainer and the checks that end a run.

    Args:
        wish: the wish.
        choice: the torch.
        after: ids of the steps that the trainer waits for.
        prefix: variables to set where the GPU is used, or empty.

    Returns:
        The steps `trainer`, `pip-check`, `smoke` and `doctor`.
    """
    command = "surefoot" if wish.env == "system" else quote(f"{wish.folder.rstrip('/')}/bin/surefoot")
    return (
        Step(
            id="trainer",
            title="Install Surefoot under the constraints",
            reason="its requirements may name torch; the constraints keep the build that was checked",
            commands=(f"{choice.pip} install -c {CONSTRAINTS} {quote(wish.surefoot)}",),
            verify=(
                f"{choice.interpreter} -c 'import importlib.metadata as m; m.version(\"surefoot\")'",
                has_torch(choice),
            ),
            undo=(f"{choice.pip} uninstall -y surefoot",),
            needs=after, disk_gib=1.0, minutes=3, downloads=("0.3 GiB from pip's index",),
        ),
        Step(
            id="pip-check",
            title="Check that no package misses another",
            reason="pip can leave a broken set behind and still end well",
            commands=kept(f"{choice.pip} check", "pip-check.txt"),
            verify=(has_torch(choice), *fresh(choice, "pip-check.txt")),
            undo=(f"rm -f {STATE_FOLDER}/pip-check.txt",),
            needs=("trainer",),
        ),
        Step(
            id="smoke",
            title="Train one tiny LoRA step in each dtype",
            reason="only a step that computed shows that training works",
            commands=kept(f"{prefix}{command} setup smoke --json", "smoke.json"),
            verify=(has_torch(choice), *fresh(choice, "smoke.json")),
            undo=(f"rm -f {STATE_FOLDER}/smoke.json",),
            needs=("pip-check",), minutes=2,
        ),
        Step(
            id="doctor",
            title="Let the doctor look at the whole",
            reason="a green end means that the smoke step and the doctor both passed",
            commands=kept(f"{prefix}{command} doctor --json", "doctor.json"),
            verify=(has_torch(choice), *fresh(choice, "doctor.json")),
            undo=(f"rm -f {STATE_FOLDER}/doctor.json",),
            needs=("smoke",), minutes=0.5,
        ),
    )  # fmt: skip


def check_folder(m: Machine, wish: Wish) -> None:
    """Refuse places where an environment cannot be made.

    Args:
        m: the machine.
        wish: the wish.

    Raises:
        UserError: the folder's name cannot be one, or the distribution keeps its Python to itself.
    """
    if not wish.folder.strip() or wish.folder.startswith(("-", "~")) or "\n" in wish.folder:
        raise UserError(f"cannot be {wish.folder!r}", hint="a folder, as .venv", key="--folder")
    if not wish.surefoot.strip() or wish.surefoot.startswith("-") or "\n" in wish.surefoot:
        raise UserError(f"cannot be {wish.surefoot!r}", hint="a requirement or a folder", key="--surefoot")
    if wish.env == "system" and not m.container and m.packager in ("apt", "pacman"):
        raise UserError(
            f"{m.distro or 'this distribution'} keeps its Python to itself (PEP 668)",
            hint="would match: --env venv, --env uv or --env docker",
            key="--env",
        )
