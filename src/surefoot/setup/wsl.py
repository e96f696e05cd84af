"""The steps of WSL2: the driver is Windows' own, and a library carries ROCm's calls to it."""

from __future__ import annotations

from surefoot.machine.facts import Machine
from surefoot.setup.choose import Choice
from surefoot.setup.plan import CONSTRAINTS, STATE_FOLDER, Step

_SOURCES = "https://github.com/ROCm/librocdxg"
_KITS = "/mnt/c/Program Files (x86)/Windows Kits/10/Include"
_LIBRARY = "librocdxg.so"
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    '-DWIN_SDK="$shared"',
    '-DCMAKE_C_COMPILER="$root/lib/llvm/bin/clang"',
    '-DCMAKE_CXX_COMPILER="$root/lib/llvm/bin/clang++"',
    '-DCMAKE_PREFIX_PATH="$root"',
    '-DCMAKE_INSTALL_PREFIX="$root"',
    "-DCMAKE_INSTALL_LIBDIR=lib",
)


def wsl_driver(m: Machine) -> Step:
    """Plan the device node of Windows' driver.

    Args:
        m: the machine.

    Returns:
        The step `driver`: satisfied, or one that says what to do in Windows and fails.
    """
    return Step(
        id="driver",
        title="Have Windows give WSL the GPU",
        reason="under WSL the driver is Windows' own; amdgpu-dkms must not be installed",
        commands=(
            'echo "update AMD\'s driver in Windows, run there: wsl --update, then: wsl --shutdown" >&2',
            "exit 1",
        ),
        verify=("test -c /dev/dxg", "test -r /dev/dxg", "test -w /dev/dxg"),
        undo=("# nothing was changed",),
        satisfied="/dev/dxg is there" if m.snapshot.present("/dev/dxg") else "",
    )


def wsl_bridge(m: Machine, choice: Choice, needs: tuple[str, ...]) -> Step:
    """Plan librocdxg, through which ROCm reaches Windows' driver, built into the ROCm that torch uses.

    Args:
        m: the machine.
        choice: the torch.
        needs: ids of the steps before: torch and ROCm's compiler.

    Returns:
        The step `wsl-bridge`.
    """
    root = f'"$({choice.interpreter} -m rocm_sdk path --root)"'
    folder = f"{STATE_FOLDER}/librocdxg"
    library = next(iter(m.snapshot.glob(f"*/{_LIBRARY}")), "")
    return Step(
        id="wsl-bridge",
        title="Build librocdxg into this ROCm",
        reason="ROCm has no kernel driver under WSL; librocdxg carries its calls to Windows' (ROCm 7.13 and newer look "
        "for it by themselves). Its build reads headers of the Windows SDK, to be installed in Windows",
        commands=(
            f"{choice.pip} install -c {CONSTRAINTS} 'cmake>=3.15' ninja",
            f"test -d {folder}/.git || git clone --depth 1 {_SOURCES} {folder}",
            f"root={root}",
            f'kits="{_KITS}"',
            'shared="$(find "$kits" -mindepth 2 -maxdepth 2 -name shared | sort -V | tail -n 1)"',
            'test -d "$shared"',
            f"{choice.interpreter} -m cmake -S {folder} -B {folder}/build {' '.join(_OPTIONS)}",
            f"{choice.interpreter} -m cmake --build {folder}/build",
            f"{choice.interpreter} -m cmake --install {folder}/build",
        ),
        verify=(f"root={root}", f'test -e "$root/lib/{_LIBRARY}"'),
        undo=(f"rm -rf {folder}", f"root={root}", f'rm -f "$root/lib/{_LIBRARY}"*'),
        needs=("torch",) if library else needs,
        disk_gib=0.1,
        minutes=2,
        downloads=("0.01 GiB from github.com",),
        satisfied=f"{library} is there" if library else "",
    )
