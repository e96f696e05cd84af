"""Steps that build PyTorch from source for the GPU targets of a plan: for cards without wheels, and for patches."""

from __future__ import annotations

from shlex import quote

from surefoot.doctor.fixes import install
from surefoot.errors import UserError
from surefoot.machine.facts import Machine
from surefoot.machine.gfx import is_rdna2
from surefoot.machine.table import load_table
from surefoot.machine.versions import parse_version, short
from surefoot.setup.choose import Choice
from surefoot.setup.jobs import build_jobs_line
from surefoot.setup.lines import or_by_hand, ready
from surefoot.setup.plan import CONSTRAINTS, STATE_FOLDER, Step, Wish
from surefoot.setup.python_env import has_torch, keep_line
from surefoot.setup.toolchain import rocm_environment, rocm_needs, rocm_sdk_step

SOURCES = f"{STATE_FOLDER}/pytorch"
TRITON = f"{STATE_FOLDER}/triton"
WHEELS = f"{STATE_FOLDER}/wheels"
_OLDEST_COMPILER = 11


def torch_from_source(m: Machine, wish: Wish, choice: Choice) -> tuple[Step, ...]:
    """Plan a build of PyTorch from source.

    Args:
        m: the machine; its distribution names the compiler's package, its ROCm may serve the build.
        wish: the wish.
        choice: the torch to build: its version with the local tag, its targets, and where ROCm comes from.

    Returns:
        Steps called torch-source-..., `rocm-sdk` where ROCm's compiler comes from pip, and last `torch`.

    Raises:
        UserError: the choice is not one that is built for AMD GPUs.
    """
    if choice.kind != "rocm" or not choice.targets or not choice.torch:
        raise UserError(
            f"a source build needs GPU targets to build for, and this plan is for {choice.kind}",
            hint="would match: --gpu gfxNNN; or leave out --source",
            key="--source",
        )
    sdk = rocm_sdk_step(choice, ("pip-tools", "constraints"), sdk_with_devices=True)
    triton = [_triton(m, choice)] if _has_triton(choice) else []
    return (
        _compiler(m, choice),
        *([sdk] if sdk else []),
        _clone(choice),
        _requirements(choice),
        *triton,
        _wheel(m, choice),
        _install(choice, bool(triton)),
    )


def _has_triton(choice: Choice) -> bool:
    """Whether Triton compiles for every target: torch.compile needs it, the rest of torch does not."""
    listed = load_table().addons["flash_attn_triton"]["gfx"]
    return all(gfx in listed or is_rdna2(gfx) for gfx in choice.targets)


def _compiler(m: Machine, choice: Choice) -> Step:
    headers = f'{choice.interpreter} -c \'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")\''
    lines = dict.fromkeys(install(m, what) for what in ("compiler", "python_dev", "git"))
    return Step(
        id="torch-source-compiler",
        title="Install a C++ compiler, Python's headers and git",
        reason=f"torch is C++17 and more: gcc {_OLDEST_COMPILER} or newer with its libstdc++, Python.h and git",
        commands=ready(m, [command for line in lines for command in or_by_hand(line)]),
        verify=(
            "command -v git",
            "command -v g++",
            f'test "$(g++ -dumpversion | cut -d. -f1)" -ge {_OLDEST_COMPILER}',
            headers,
        ),
        undo=("# the packages may stay: other programs may use them by now",),
        needs=("env",), root=True, disk_gib=0.5, minutes=2, downloads=("0.1 GiB from the distribution",),
    )  # fmt: skip


def _clone(choice: Choice) -> Step:
    facts = load_table().addons["torch_source"]
    branch = facts["branch"].format(torch=short(parse_version(choice.torch)))
    git = f"git -C {SOURCES}"
    shallow = "--depth 1 --jobs 4"
    return Step(
        id="torch-source-clone",
        title=f"Fetch PyTorch's {branch} with all its submodules",
        reason=f"{facts['repository']} has AMD's backports on top of the release; a build that lacks one fails late",
        commands=(
            f"mkdir -p {STATE_FOLDER}",
            f"test -d {SOURCES}/.git || git clone --depth 1 --branch {branch} {facts['repository']} {SOURCES}",
            f"{git} fetch --depth 1 origin {branch}",
            f"{git} checkout --force --detach FETCH_HEAD",
            f"{git} submodule sync --recursive",
            f"{git} submodule update --init --recursive --force {shallow}",
        ),
        verify=(
            f"{git} rev-parse --verify HEAD",
            f'test "$({git} submodule status --recursive | wc -l)" -gt 0',
            f'test -z "$({git} submodule status --recursive | grep "^[-+U]" || true)"',
            f'grep -q "^{short(parse_version(choice.torch))}" {SOURCES}/version.txt',
        ),
        undo=(f"rm -rf {SOURCES}",),
        needs=("torch-source-compiler",), disk_gib=6, minutes=10, downloads=("3 GiB from github.com",),
    )  # fmt: skip


def _requirements(choice: Choice) -> Step:
    files = f"{SOURCES}/requirements.txt"
    more = f"{SOURCES}/requirements-build.txt"
    return Step(
        id="torch-source-requirements",
        title="Install what the build of torch needs in Python",
        reason="the build runs without isolation, in this environment; cmake and ninja come as packages too",
        commands=(
            f"{choice.pip} install -c {CONSTRAINTS} -r {files} 'cmake>=3.27' ninja build",
            f"if test -f {more}; then {choice.pip} install -c {CONSTRAINTS} -r {more}; fi",
        ),
        verify=(f"{choice.interpreter} -c 'import build, cmake, jinja2, ninja, numpy, requests, sympy, yaml'",),
        undo=("# they go with the environment",),
        needs=("pip-tools", "constraints", "torch-source-clone"),
        disk_gib=0.5, minutes=2, downloads=("0.1 GiB from pip's index",),
    )  # fmt: skip


def _triton(m: Machine, choice: Choice) -> Step:
    facts = load_table().addons["torch_source"]
    git = f"git -C {TRITON}"
    pin = f'pin="$(< {SOURCES}/.ci/docker/ci_commit_pins/triton.txt)"'
    return Step(
        id="torch-source-triton",
        title="Build the Triton that this torch pins",
        reason="torch.compile needs the very commit that torch names in ci_commit_pins/triton.txt",
        commands=(
            pin,
            f"test -d {TRITON}/.git || git init {TRITON}",
            f'{git} fetch --depth 1 {facts["triton"]} "$pin"',
            f"{git} checkout --force --detach FETCH_HEAD",
            *rocm_environment(m, choice),
            build_jobs_line(facts["gib_per_job"]),
            f"{choice.pip} wheel --no-deps --wheel-dir {WHEELS} ./{TRITON}",
            f"{choice.pip} install --no-deps --force-reinstall -c {CONSTRAINTS} {WHEELS}/triton-*.whl",
        ),
        verify=(
            f'{pin}\ntest "$({git} rev-parse HEAD)" = "$pin"',
            f"{choice.interpreter} -c 'import triton.backends.amd.compiler'",
        ),
        undo=(f"{choice.pip} uninstall -y triton", f"rm -rf {TRITON} {WHEELS}/triton-*.whl"),
        needs=rocm_needs(choice, ("torch-source-requirements",)),
        disk_gib=4, minutes=20, downloads=("1 GiB: sources, and the LLVM that Triton fetches",),
    )  # fmt: skip


def _wheel(m: Machine, choice: Choice) -> Step:
    facts = load_table().addons["torch_source"]
    wheel = f"{WHEELS}/torch-{choice.torch}-*.whl"
    archs = ";".join(choice.targets)
    return Step(
        id="torch-source-wheel",
        title=f"Translate CUDA sources to HIP and build the wheel for {', '.join(choice.targets)}",
        reason=f"only kernels for PYTORCH_ROCM_ARCH={archs} are compiled (`;` joins targets), which takes under "
        f"an hour for one; a compiler takes about {facts['gib_per_job']} GiB, so memory sets how many run. Forgetting "
        "build_amd.py ends in a missing cuda.h",
        commands=(
            *rocm_environment(m, choice),
            f"export PYTORCH_ROCM_ARCH={quote(archs)} USE_ROCM=ON USE_CUDA=OFF USE_MPI=OFF USE_NUMA=OFF",
            "export USE_KINETO=ON USE_GLOO=ON",
            f"export PYTORCH_BUILD_VERSION={quote(choice.torch)} PYTORCH_BUILD_NUMBER=1",
            build_jobs_line(facts["gib_per_job"]),
            f'python=$(realpath -s "$(command -v {choice.interpreter})")',
            f"mkdir -p {WHEELS}",
            f"wheels=$(realpath {WHEELS})",
            f"cd {SOURCES}",
            'PATH="$(dirname "$python"):$PATH"',
            '"$python" tools/amd_build/build_amd.py',
            '"$python" -m build --wheel --no-isolation --outdir "$wheels"',
        ),
        verify=(f"{choice.interpreter} -m zipfile --list {wheel} > /dev/null",),
        undo=(f"rm -rf {SOURCES}/build", f"rm -f {wheel}"),
        needs=rocm_needs(choice, ("torch-source-requirements",)),
        disk_gib=facts["disk_gib"] - 10, minutes=45,
    )  # fmt: skip


def _install(choice: Choice, triton: bool) -> Step:
    flags = " and ".join(f'"{gfx}" in flags' for gfx in choice.targets)
    check = f"import torch; flags = torch._C._cuda_getArchFlags(); assert torch.version.hip and {flags}, flags"
    last = "torch-source-triton" if triton else "torch-source-requirements"
    return Step(
        id="torch",
        title=f"Install the torch {choice.torch} that was built",
        reason=f"{choice.reason}. It is checked outside of the source folder, whose own torch folder would be imported",
        commands=(
            f"{choice.pip} install -c {CONSTRAINTS} {WHEELS}/torch-{choice.torch}-*.whl",
            keep_line(choice),
        ),
        verify=(has_torch(choice), f"{choice.interpreter} -c '{check}'", f"grep -q '^torch==' {CONSTRAINTS}"),
        undo=(f"{choice.pip} uninstall -y torch",),
        needs=(last, "torch-source-wheel"), disk_gib=3, minutes=2,
    )  # fmt: skip
