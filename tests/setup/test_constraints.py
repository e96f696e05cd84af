"""The real pip in throw-away venvs with a stub ROCm torch: our constraints never let it go, and without them it goes.

The stub is what pip sees of a ROCm torch: a wheel called torch 2.13.0+rocm7.2 that needs triton-rocm. The offline tests
resolve against an index of small wheels on the disk; the slow ones against the real index, where the packages are that
people install. The constraints file is written by the plan's own lines.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from pip_world import World, bare_environment, index, wheel

from surefoot.machine.case import base_snapshot
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Snapshot
from surefoot.setup.choose import choose
from surefoot.setup.plan import CONSTRAINTS, Wish
from surefoot.setup.planner import make_plan
from surefoot.setup.python_env import keep_line

TORCH, VISION, AUDIO = "2.13.0+rocm7.2", "0.28.0+rocm7.2", "2.11.0+rocm7.2"


def stubs(folder: Path) -> list[str]:
    """What PyTorch's own ROCm index would serve."""
    return [
        str(wheel(folder, "torch", TORCH, ("triton-rocm==3.7.1",))),
        str(wheel(folder, "triton-rocm", "3.7.1")),
        str(wheel(folder, "torchvision", VISION, ("torch==2.13.0",))),
        str(wheel(folder, "torchaudio", AUDIO, ("torch",))),
    ]


@pytest.fixture(scope="module")
def rocm(tmp_path_factory):
    """A venv with the stub trio, our constraints in it, and an index with a newer CUDA torch."""
    folder = tmp_path_factory.mktemp("rocm")
    world = World(folder / ".venv", own_pip=True)
    done = world.pip("install", "--no-index", *stubs(folder / "rocm-index"))
    assert done.returncode == 0, done.stderr
    snapshot = Snapshot(base_snapshot("mi300x-8"))
    wish = Wish(rocm="7.2", torch="2.13")
    (folder / CONSTRAINTS).parent.mkdir()
    line = keep_line(choose(Machine(snapshot), wish))
    subprocess.run(["bash", "-euo", "pipefail", "-c", line], cwd=folder, check=True, env=bare_environment())
    files = folder / "files"
    url = index(
        folder / "index",
        [
            wheel(files, "torch", "2.13.0", ("triton==3.7.1", "nvidia-cublas")), wheel(files, "nvidia-cublas", "13.0"),
            wheel(files, "torch", "2.15.0", ("triton==3.9.0", "nvidia-cublas")), wheel(files, "triton", "3.7.1"),
            wheel(files, "triton", "3.9.0"), wheel(files, "torchvision", "0.30.0", ("torch==2.15.0",)),
            wheel(files, "trainer", "1.0", ("torch>=2.6",)), wheel(files, "hungry", "1.0", ("torch>=2.14",)),
            wheel(files, "hungry", "0.9", ("torch>=2.6",)), wheel(files, "greedy", "1.0", ("torch>=2.14",)),
            wheel(files, "exact", "1.0", ("torch==2.13.0",)),
        ],
    )  # fmt: skip
    return SimpleNamespace(world=world, folder=folder, index=url, snapshot=snapshot, wish=wish)


def chosen(rocm, *arguments: str, ours: bool, env: dict[str, str] | None = None) -> dict[str, str]:
    """What pip would install, by name: its own report of a dry run. An empty answer means that all is there."""
    report = rocm.folder / "report.json"
    report.unlink(missing_ok=True)
    constraint = ["-c", str(rocm.folder / CONSTRAINTS)] if ours else []
    done = rocm.world.pip("install", "--dry-run", "--report", str(report), *constraint, *arguments, env=env)
    if done.returncode:
        raise LookupError(done.stderr)
    rows = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {row["metadata"]["name"].lower(): row["metadata"]["version"] for row in rows}


def here(rocm, *arguments: str, ours: bool) -> dict[str, str]:
    return chosen(rocm, "--index-url", rocm.index, *arguments, ours=ours)


def test_the_plans_own_lines_wrote_what_is_installed(rocm):
    lines = (rocm.folder / CONSTRAINTS).read_text(encoding="utf-8").splitlines()
    assert lines == [f"torch=={TORCH}", f"torchaudio=={AUDIO}", f"torchvision=={VISION}", "triton-rocm==3.7.1"]
    assert {f"torch=={TORCH}", f"torchvision=={VISION}"} <= set(make_plan(rocm.snapshot, rocm.wish).constraints)


def test_a_trainer_that_is_content_keeps_torch_either_way(rocm):
    assert here(rocm, "trainer", ours=True) == here(rocm, "trainer", ours=False) == {"trainer": "1.0"}
    assert here(rocm, "exact", ours=True) == here(rocm, "exact", ours=False) == {"exact": "1.0"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("hungry",),  # its newest release wants a newer torch
        ("-U", "torch"),
        ("-U", "torchvision"),  # pins the torch of its own release exactly
        ("-U", "--upgrade-strategy", "eager", "trainer"),
    ],
    ids=" ".join,
)
def test_without_our_constraints_torch_is_replaced_and_with_them_it_stays(rocm, arguments):
    assert here(rocm, *arguments, ours=False)["torch"] == "2.15.0"
    assert not {"torch", "torchvision", "triton"} & set(here(rocm, *arguments, ours=True))


@pytest.mark.parametrize("option", ["--force-reinstall", "--ignore-installed"])
def test_an_order_to_reinstall_is_refused_where_the_index_has_another_torch(rocm, option):
    assert here(rocm, option, "trainer", ours=False)["torch"] == "2.15.0"
    with pytest.raises(LookupError, match=r"conflicting dependencies"):
        here(rocm, option, "trainer", ours=True)


def test_an_older_release_that_fits_is_chosen_instead(rocm):
    assert here(rocm, "hungry", ours=True) == {"hungry": "0.9"}


def test_what_cannot_go_with_this_torch_is_refused_and_nothing_is_changed(rocm):
    assert here(rocm, "greedy", ours=False)["torch"] == "2.15.0"
    with pytest.raises(LookupError, match=r"ResolutionImpossible|conflict"):
        here(rocm, "greedy", ours=True)
    assert rocm.world.versions()["torch"] == TORCH


def test_a_bare_pin_is_satisfied_by_another_build(rocm):
    """Why the constraints carry the local tag: `torch==2.13.0` lets the CUDA build of that number in."""
    bare = rocm.folder / "bare.txt"
    bare.write_text("torch==2.13.0\n", encoding="utf-8")
    assert here(rocm, "--force-reinstall", "-c", str(bare), "trainer", ours=False)["torch"] == "2.13.0"


def test_really_installing_under_the_constraints(rocm):
    done = rocm.world.pip(
        "install", "--index-url", rocm.index, "-c", str(rocm.folder / CONSTRAINTS), "-U", "trainer", "hungry", "exact"
    )
    assert done.returncode == 0, done.stderr
    assert rocm.world.versions()["torch"] == TORCH and rocm.world.versions()["hungry"] == "0.9"
    rocm.world.pip("uninstall", "-y", "trainer", "hungry", "exact")


# ---- the real index ----
def really(rocm, *arguments: str, ours: bool) -> dict[str, str]:
    """What pip would install from the index that this machine's pip has; skipped where none answers."""
    env = {k: v for k, v in os.environ.items() if k not in ("PIP_CONSTRAINT", "PIP_FIND_LINKS")}
    try:
        return chosen(rocm, *arguments, ours=ours, env=env)
    except LookupError as error:
        if any(word in str(error) for word in ("Could not find a version", "Connection", "connection", "No matching")):
            pytest.skip(f"no index: {str(error)[-200:]}")
        raise


@pytest.mark.slow
def test_the_real_trainers_packages_leave_torch_alone(rocm):
    found = really(rocm, "accelerate", "peft", "transformers>=5,<6", "datasets", "safetensors", ours=True)
    assert {"accelerate", "peft", "transformers"} <= set(found)
    assert not {"torch", "triton", "triton-rocm"} & set(found)
    assert not [name for name in found if name.startswith("nvidia-")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("-U", "--upgrade-strategy", "eager", "accelerate"), ("-U", "torchvision")],
    ids=" ".join,
)
def test_real_upgrades_replace_torch_only_without_our_constraints(rocm, arguments):
    assert really(rocm, *arguments, ours=False)["torch"] != TORCH
    assert "torch" not in really(rocm, *arguments, ours=True)
