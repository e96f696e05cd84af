"""Real pip in throw-away venvs: what the doctor finds in real site-packages, on an AMD machine's hardware facts.

The ROCm-named packages are small wheels made here (their real ones are gigabytes); pip installs, replaces and
records them as it would any other. The CPU torch and the placeholders are the real ones; those tests are skipped
without an index.
"""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from surefoot.doctor.diagnose import diagnose
from surefoot.machine.capture import capture
from surefoot.machine.case import base_snapshot
from surefoot.machine.snapshot import Snapshot

pytestmark = pytest.mark.slow
ROCM_TORCH = (
    "__version__ = '2.13.0+rocm7.2'\ndebug = False\ncuda: Optional[str] = None\nhip: Optional[str] = '7.2.53211'\n"
)
CUDA_TORCH = "__version__ = '2.14.0'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"


def wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> Path:
    """Make a wheel that pip installs like any other."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    needs = "".join(f"Requires-Dist: {r}\n" for r in requires)
    everything = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in everything.items():
            archive.writestr(inside, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{f},,\n" for f in (*everything, f"{info}/RECORD")))
    return path


@pytest.fixture
def world(tmp_path):
    """A fresh venv with its own pip."""
    venv.create(tmp_path / "venv", with_pip=True)
    return tmp_path / "venv"


def pip(world: Path, *arguments: str, may_fail: bool = False) -> None:
    done = subprocess.run(
        [world / "bin/python", "-m", "pip", "install", "-q", "--no-deps", *arguments], capture_output=True, text=True
    )
    if done.returncode and may_fail:
        pytest.skip(f"no index: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr


def diagnosis(world: Path, base: str = "rx7900xtx-ubuntu"):
    """The base machine's hardware with this venv's real packages."""
    raw = base_snapshot(base)
    raw["python"] = capture(python=world / "bin/python").raw["python"]
    raw["python"]["compiler"] = {"cc": "/usr/bin/cc", "python_h": True}
    report = diagnose(Snapshot(raw))
    return report.primary.id if report.primary else None, [f.id for f in report.findings], raw["python"]


def rocm_trio(folder: Path) -> list[str]:
    return [
        str(
            wheel(
                folder,
                "torch",
                "2.13.0+rocm7.2",
                {"torch/__init__.py": "", "torch/version.py": ROCM_TORCH},
                ("triton-rocm==3.7.1",),
            )
        ),
        str(wheel(folder, "torchvision", "0.28.0+rocm7.2", {"torchvision/__init__.py": ""}, ("torch==2.13.0",))),
        str(wheel(folder, "triton_rocm", "3.7.1", {"triton/__init__.py": "", "triton/compiler.py": "a = 1\n"})),
    ]


def test_a_right_rocm_world_is_healthy(world, tmp_path):
    pip(world, *rocm_trio(tmp_path))
    primary, found, python = diagnosis(world)
    assert (primary, found) == (None, [])
    assert python["dists"]["triton-rocm"]["top"] == ["triton"] and python["dists"]["torch"]["installer"] == "pip"


def test_the_real_cpu_torch(world):
    pip(world, "torch==2.13.0+cpu", may_fail=True)
    primary, _, python = diagnosis(world)
    assert python["torch"]["version"] == "2.13.0+cpu" and python["torch"]["hip"] is None
    assert primary == "F35"


def test_torch_replaced_by_another_dist(world, tmp_path):
    pip(world, *rocm_trio(tmp_path))
    pip(
        world,
        "--isolated",
        "--no-index",
        str(wheel(tmp_path, "torch", "2.14.0", {"torch/__init__.py": "", "torch/version.py": CUDA_TORCH})),
    )
    primary, found, _ = diagnosis(world)
    assert primary == "F36" and "F35" in found


def test_two_dists_own_triton(world, tmp_path):
    pip(world, *rocm_trio(tmp_path))
    pip(world, str(wheel(tmp_path, "triton", "3.8.0", {"triton/__init__.py": "", "triton/compiler.py": "b = 2\n"})))
    primary, _, python = diagnosis(world)
    assert primary == "F51"
    assert [n for n, row in python["dists"].items() if "triton" in row.get("top", [])] == ["triton", "triton-rocm"]


def test_real_placeholders_from_the_index(world, tmp_path):
    pip(world, *rocm_trio(tmp_path))
    pip(world, "rocm-sdk-device-gfx942==0.0.1.dev0", "aiter", may_fail=True)
    primary, _, python = diagnosis(world)
    assert python["dists"]["rocm-sdk-device-gfx942"]["version"] == "0.0.1.dev0"
    assert primary == "F41"


def test_a_version_file_that_was_overwritten(world, tmp_path):
    pip(world, *rocm_trio(tmp_path))
    site = next((world / "lib").glob("python3*/site-packages"))
    (site / "torch/version.py").write_text(ROCM_TORCH.replace("2.13.0+rocm7.2", "2.12.0+rocm7.1"), encoding="utf-8")
    assert "F123" in diagnosis(world)[1]


def test_the_running_interpreter_is_read_the_same_way():
    python = capture().raw["python"]
    assert python["version"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert python["dists"]["pytest"]["version"] == pytest.__version__
