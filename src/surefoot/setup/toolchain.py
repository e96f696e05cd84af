"""ROCm's compiler for what is built here: the system's, or the one that comes as Python packages."""

from __future__ import annotations

from shlex import quote

from surefoot.machine.facts import Machine
from surefoot.machine.versions import parse_version, same_line
from surefoot.setup.choose import Choice
from surefoot.setup.plan import CONSTRAINTS, Step


def rocm_from_pip(choice: Choice) -> bool:
    """Tell whether ROCm's compiler comes as Python packages (7.9 and newer), from the index of the choice."""
    return choice.channel.startswith("amd") and parse_version(choice.rocm) >= (7, 9)


def rocm_needs(choice: Choice, after: tuple[str, ...]) -> tuple[str, ...]:
    """Name the steps that a build waits for: `rocm-sdk` of this module, or the planner's `rocm-devel`.

    Args:
        choice: the torch.
        after: what it waits for besides.

    Returns:
        Ids.
    """
    return (*after, "rocm-sdk" if rocm_from_pip(choice) else "rocm-devel")


def rocm_sdk_step(choice: Choice, after: tuple[str, ...], *, sdk_with_devices: bool) -> Step | None:
    """Plan ROCm's compiler and headers as Python packages.

    Args:
        choice: the torch whose ROCm they must be.
        after: ids of the steps before.
        sdk_with_devices: whether to ask for the targets' kernel packages too, which an AMD torch brings by itself.

    Returns:
        The step `rocm-sdk`; None where the compiler is the system's.
    """
    if not rocm_from_pip(choice):
        return None
    python = choice.interpreter
    extras = ",".join(["libraries", "devel", *(f"device-{gfx}" for gfx in choice.targets if sdk_with_devices)])
    wanted = quote(f"rocm[{extras}]=={choice.rocm}.*")
    return Step(
        id="rocm-sdk",
        title=f"Install ROCm {choice.rocm}'s compiler and headers as Python packages",
        reason="what is compiled must meet the ROCm that torch runs on: the same release from the same index",
        commands=(
            f"{choice.pip} install -c {CONSTRAINTS} --index-url {quote(choice.index)} {wanted}",
            f"{python} -m rocm_sdk init",
        ),
        verify=(
            f"root=$({python} -m rocm_sdk path --root)",
            'test -x "$root/bin/hipcc"',
            'test -e "$root/include/hip/hip_runtime.h"',
        ),
        undo=(f"{choice.pip} uninstall -y rocm rocm-sdk-devel",),
        needs=after, disk_gib=8, minutes=5, downloads=("2 GiB from AMD's index",),
    )  # fmt: skip


def rocm_environment(m: Machine, choice: Choice) -> tuple[str, ...]:
    """Write the bash lines that stand before a build, so that it meets torch's ROCm and nothing else.

    Args:
        m: the machine.
        choice: the torch.

    Returns:
        Lines that set ROCM_HOME and what follows from it, and unset what misleads a build.
    """
    lines = ["unset HIP_PATH CUDA_HOME HSA_OVERRIDE_GFX_VERSION"]
    if rocm_from_pip(choice):
        lines.append(f"ROCM_HOME=$({choice.interpreter} -m rocm_sdk path --root)")
        # clang ends its own search for the device libraries when ROCM_PATH is set.
        lines.append('export HIP_DEVICE_LIB_PATH="$ROCM_HOME/lib/llvm/amdgcn/bitcode"')
    else:
        wanted, here = parse_version(choice.rocm), set(choice.targets) <= set(m.targets)
        trees = [path for path, version in m.rocm_trees.items() if here and same_line(version, wanted)]
        lines.append(f"ROCM_HOME={quote(trees[0] if trees else '/opt/rocm')}")
    return (
        *lines,
        'export ROCM_HOME ROCM_PATH="$ROCM_HOME" CMAKE_PREFIX_PATH="$ROCM_HOME"',
        'export PATH="$ROCM_HOME/bin:$PATH"',
        "command -v hipcc",
    )
