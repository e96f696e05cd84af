"""Plans: goldens for each healthy machine made bare and for fourteen wishes, all reviewed; refusals; any wish."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from bare_machines import NAMES, bare
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_review import review
from rich.console import Console

from surefoot.errors import UserError
from surefoot.machine.case import base_snapshot
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Snapshot
from surefoot.machine.table import load_table
from surefoot.machine.versions import short
from surefoot.setup.choose import OLDEST_PYTHON, OLDEST_TORCH, choose
from surefoot.setup.plan import ENVIRONMENTS, PURPOSES, SOURCES, Plan, Wish
from surefoot.setup.planner import make_plan
from surefoot.setup.render import render

PLANS = Path(__file__).parent / "plans"
ROOT = Path(__file__).parents[2]

# Without a tool, WSL does not say which card Windows has.
BARE = {name: (name, Wish(gpu="RX 7900 XTX") if name.startswith("wsl2") else Wish()) for name in NAMES}
WISHES = {
    "wish-deepspeed-flash-attn": ("mi300x-8", Wish(purposes=("train", "deepspeed", "flash-attn"))),
    "wish-rocm-10-new-driver": ("mi350x-rhel", Wish(rocm="10.1")),
    "wish-two-cards-flash-attn": ("cpu-only", Wish(("train", "flash-attn"), gpu="gfx90a,gfx942", rocm="7.2")),
    "wish-amd-wheels-flash-attn": ("mi300x-8", Wish(("train", "flash-attn"), source="amd", rocm="7.14")),
    "wish-source-build": ("rx7900xtx-ubuntu", Wish(source="source")),
    "wish-source-two-targets": ("cpu-only", Wish(gpu="gfx906;gfx1031", source="source", rocm="7.2")),
    "wish-mi100-needs-dkms": ("cpu-only", Wish(gpu="MI100")),
    "wish-nightly-for-rx6700": ("rx7900xtx-ubuntu", Wish(gpu="RX 6700 XT")),
    "wish-uv": ("strix-halo", Wish(env="uv", folder="my env")),
    "wish-conda-on-slurm": ("mi250x-slurm", Wish(env="conda")),
    "wish-system-in-docker": ("mi210-docker", Wish(env="system", torch="2.13")),
    "wish-docker-image": ("w7900-igpu", Wish(env="docker")),
    "wish-cpu-from-a-mirror": ("cuda-h100", Wish(gpu="cpu", index="https://mirror.example/simple", surefoot="./s f")),
    "wish-serve": ("mi300x-8", Wish(("train", "serve"))),
}  # fmt: skip
GOLDENS = BARE | WISHES


def planned(name: str) -> tuple[Plan, Machine]:
    base, wish = GOLDENS[name]
    snapshot = bare(base)
    return make_plan(snapshot, wish), Machine(snapshot)


def page(plan: Plan) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    render(plan, console, verbose=True)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize("name", GOLDENS)
def test_the_plan_is_the_reviewed_one(name: str) -> None:
    """Regenerate with SUREFOOT_WRITE_PLANS=1, and read the difference."""
    text, path = page(planned(name)[0]), PLANS / f"{name}.txt"
    if os.environ.get("SUREFOOT_WRITE_PLANS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_no_golden_is_left_over() -> None:
    assert {path.stem for path in PLANS.glob("*.txt")} == set(GOLDENS)


@pytest.mark.parametrize("name", GOLDENS)
def test_a_review_finds_nothing(name: str) -> None:
    plan, m = planned(name)
    if plan.wish.env == "docker":  # the image's own steps are those of the same wish with a venv
        plan = make_plan(m.snapshot, replace(plan.wish, env="venv"))
    assert review(plan, m) == []


@pytest.mark.parametrize("name", GOLDENS)
def test_every_line_is_bash_and_none_names_the_kernel_that_was_seen(name: str) -> None:
    plan, m = planned(name)
    text = "\n".join(line for step in plan.steps for line in (*step.commands, *step.verify, *step.undo))
    assert m.kernel
    assert m.kernel not in re.sub(r"^#.*", "", text, flags=re.M)
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def _faulty(plan: Plan) -> dict[str, Plan]:
    """The same plan with one thing wrong each."""

    def change(step_id: str, old: str, new: str) -> Plan:
        assert any(old in c for s in plan.steps if s.id == step_id for c in s.commands), (step_id, old)
        steps = [
            replace(s, commands=tuple(c.replace(old, new) for c in s.commands)) if s.id == step_id else s
            for s in plan.steps
        ]
        return replace(plan, steps=tuple(steps))

    at = {step.id: i for i, step in enumerate(plan.steps)}
    swapped = list(plan.steps)
    swapped[at["torch"]], swapped[at["trainer"]] = swapped[at["trainer"]], swapped[at["torch"]]
    loose = "-c surefoot-setup/constraints.txt "
    return {
        "order": replace(plan, steps=tuple(swapped)),
        "no tag": replace(plan, torch="2.14.0"),
        "two builds": replace(plan, constraints=("torch==2.14.0+rocm7.2", "torchvision==0.29.0+cpu")),
        "an old wheel": replace(plan, torch="2.9.0+rocm6.4", index="https://download.pytorch.org/whl/rocm6.4"),
        "second index": change("torch", "--index-url", "--extra-index-url"),
        "loose": change("trainer", loose, ""),
        "second torch": change("trainer", loose, loose + "torch==2.14.0 "),
        "comma": change("flash-attn", "GPU_ARCHS=gfx950", "GPU_ARCHS=gfx950,gfx942"),
        "driver": replace(plan, torch="2.14.0+rocm10.1.0", index="https://stable.repo.amd.com/rocm/whl-next/"),
    }


def test_the_review_sees_what_it_must() -> None:
    snapshot = bare("mi350x-rhel")
    plan = make_plan(snapshot, Wish(("train", "flash-attn")))
    assert review(plan, Machine(snapshot)) == []
    for fault, other in _faulty(plan).items():
        assert review(other, Machine(snapshot)), fault


def test_the_review_sees_a_dkms_driver_on_an_apu() -> None:
    snapshot = bare("strix-halo")
    plan = make_plan(snapshot, Wish())
    steps = [
        replace(s, commands=("sudo apt-get install -y amdgpu-dkms",)) if s.id == "driver" else s for s in plan.steps
    ]
    assert review(replace(plan, steps=tuple(steps)), Machine(snapshot))


# ---- what a healthy machine already has ----
@pytest.mark.parametrize("name", NAMES)
def test_what_a_healthy_machine_has_below_python_is_skipped_with_the_fact(name: str) -> None:
    snapshot = Snapshot(base_snapshot(name))
    plan = make_plan(snapshot, Wish())
    below = [s for s in plan.steps if s.id in ("firmware", "kernel", "driver", "reboot", "groups", "login")]
    assert all(step.satisfied for step in below), [s.id for s in below if not s.satisfied]
    assert not [s.id for s in plan.todo if s.root and s.id != "python"]


def test_an_unreadable_node_gives_the_group_that_owns_it_and_a_new_login() -> None:
    raw = base_snapshot("rx7900xtx-ubuntu")
    for node in raw["nodes"].values():
        node |= {"open": "EACCES", "group": "kfdusers", "gid": 777}
    raw["process"]["groups"] = [1000]
    steps = {step.id: step for step in make_plan(Snapshot(raw), Wish()).steps}
    assert steps["groups"].commands == ('sudo usermod -a -G kfdusers "$(id -un)"',)
    assert "EACCES" in steps["groups"].reason
    assert steps["login"].login
    assert not steps["login"].satisfied


def test_a_session_older_than_its_group_only_needs_a_login() -> None:
    raw = base_snapshot("rx7900xtx-ubuntu")
    for node in raw["nodes"].values():
        node |= {"open": "EACCES", "group": "render", "gid": 993}
    raw["process"]["groups"] = [1000]
    steps = {step.id: step for step in make_plan(Snapshot(raw), Wish()).steps}
    assert steps["groups"].satisfied == "/etc/group lists trainer in render"
    assert not steps["login"].satisfied


def test_nobody_joins_the_group_root() -> None:
    raw = base_snapshot("rx7900xtx-ubuntu")
    for node in raw["nodes"].values():
        node |= {"open": "EACCES", "group": "root", "gid": 0}
    step = next(s for s in make_plan(Snapshot(raw), Wish()).steps if s.id == "groups")
    assert "usermod -a -G render" in step.commands[-1]
    assert "udev" in step.commands[0]


def test_a_container_without_its_groups_is_told_them_by_number() -> None:
    raw = base_snapshot("mi210-docker")
    for node in raw["nodes"].values():
        node |= {"open": "EACCES"}
    step = next(s for s in make_plan(Snapshot(raw), Wish()).steps if s.id == "groups")
    assert "--group-add 993" in step.commands[0]
    assert step.commands[1] == "exit 1"


def test_an_apu_with_a_dkms_driver_goes_back_to_the_inbox_one() -> None:
    raw = base_snapshot("strix-halo")
    raw["files"]["/sys/module/amdgpu/version"] = "6.16.13"
    steps = {step.id: step for step in make_plan(Snapshot(raw), Wish()).steps}
    assert "remove" in steps["driver"].commands[0]
    assert not steps["reboot"].satisfied


# ---- refusals ----
REFUSED = [
    ("rx7900xtx-ubuntu", Wish(gpu="MI999"), "no card 'MI999'"),
    ("rx7900xtx-ubuntu", Wish(gpu="gfx9999"), "gfx9999"),
    ("rx7900xtx-ubuntu", Wish(gpu="gfx1250"), "would match"),
    ("mi300x-8", Wish(torch="2.14", rocm="7.0"), "without --torch: torch 2.10"),
    ("mi300x-8", Wish(rocm="9.9"), "7.2"),
    ("mi300x-8", Wish(rocm="seven"), "--rocm: cannot be 'seven'"),
    ("mi300x-8", Wish(torch="2.14.3"), "a minor release"),
    ("mi300x-8", Wish(torch="2.3"), "2.6 or newer"),
    ("mi210-docker", Wish(rocm="10.1"), "the host's driver 6.16.6"),
    ("rx7900xtx-ubuntu", Wish(gpu="gfx1031", source="pip"), "nightly"),
    ("cpu-only", Wish(rocm="7.2"), "--gpu gfxNNN"),
    ("cuda-h100", Wish(source="amd"), "--gpu gfxNNN"),
    ("cpu-only", Wish(env="system"), "PEP 668"),
    ("mi210-docker", Wish(env="docker"), "on the host"),
    ("rx9060xt-arch", Wish(gpu="MI100"), "amdgpu-dkms"),
    ("fedora-distro-rocm", Wish(gpu="MI100"), "amdgpu-dkms"),
    ("cpu-only", Wish(index="mirror"), "--index"),
    ("wsl2-7900xtx", Wish(gpu="gfx1100", source="pip"), "without --source: torch 2.14 for ROCm 10.1 (AMD)"),
    ("cpu-only", Wish(folder="-x"), "--folder"),
    ("cpu-only", Wish(("train", "serve")), "serve"),
]


@pytest.mark.parametrize(("base", "wish", "says"), REFUSED)
def test_what_no_row_serves_is_refused_with_what_would_match(base: str, wish: Wish, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        make_plan(bare(base), wish)
    assert caught.value.problems[0].hint


def test_wsl_without_tools_asks_for_the_card() -> None:
    with pytest.raises(UserError, match="not which card Windows has"):
        make_plan(bare("wsl2-7900xtx"), Wish())


def test_a_card_that_rocm_refuses_is_named() -> None:
    raw = base_snapshot("cpu-only")
    folder = "/sys/bus/pci/devices/0000:03:00.0"
    raw["files"] |= {f"{folder}/vendor": "0x1002", f"{folder}/device": "0x67df", f"{folder}/class": "0x030000"}
    with pytest.raises(UserError, match="gfx803"):
        make_plan(Snapshot(raw), Wish())


# ---- the choice ----
@pytest.mark.parametrize(
    ("gpu", "torch", "source"),
    [
        ("MI300X", "2.14.0+rocm7.2", "pip"),
        ("RX 6800", "2.9.0+rocm6.4", "pip"),
        ("RX 9070 XT", "2.14.0+rocm10.1.0", "amd"),
        ("MI50", "2.9.0+rocm6.3", "pip"),
        ("gfx1152", "2.14.0+rocm10.1.0", "amd"),
        ("gfx1010", "", "nightly"),
        ("cpu", "2.14.0+cpu", "pip"),
    ],
)
def test_the_torch_of_a_card(gpu: str, torch: str, source: str) -> None:
    choice = choose(Machine(bare("cpu-only")), Wish(gpu=gpu))
    assert (choice.torch, choice.source) == (torch, source)


def test_a_mirror_without_local_tags_gives_no_torchvision_of_another_build() -> None:
    """Really seen: torch for the CPU beside a torchvision for CUDA, and transformers could not be imported."""
    assert choose(Machine(bare("cpu-only")), Wish(index="https://mirror.example/simple")).pins == ("torch==2.14.0",)
    tagged = choose(Machine(bare("mi300x-8")), Wish(index="https://mirror.example/simple"))
    assert all(pin.endswith("+rocm7.2") for pin in tagged.pins)


def test_a_nightly_is_the_last_thing() -> None:
    plan = make_plan(bare("mi250x-slurm"), Wish(source="amd"))
    assert plan.torch == "2.14.0+rocm10.1.0"
    assert "31.50" in next(s.title for s in plan.steps if s.id == "driver")
    assert not make_plan(bare("cpu-only"), Wish(gpu="RX 6700 XT")).torch


def test_a_known_defect_is_chosen_only_by_name_and_said() -> None:
    assert choose(Machine(bare("rx6800")), Wish()).rocm == "6.4"
    named = choose(Machine(bare("rx6800")), Wish(rocm="7.2"))
    assert named.torch == "2.14.0+rocm7.2"
    assert "known defect" in named.notes[0]


@pytest.mark.parametrize("version", ["3.8.10", "3.9.20", "3.15.0"])
def test_a_python_without_wheels_gets_another_interpreter_and_not_an_old_torch(version: str) -> None:
    raw = base_snapshot("rx7900xtx-ubuntu")
    raw["python"] |= {"version": version, "torch": None, "dists": {}}
    plan = make_plan(Snapshot(raw), Wish())
    assert plan.torch == "2.14.0+rocm7.2"
    step = next(s for s in plan.steps if s.id == "python")
    assert "python3.12" in step.commands[-1]
    assert not step.satisfied


def test_a_python_that_is_too_old_for_surefoot_is_not_taken_for_an_old_torch_either() -> None:
    raw = base_snapshot("mi350x-rhel")
    raw["python"] |= {"version": "3.9.18"}
    assert choose(Machine(Snapshot(raw)), Wish(gpu="cpu", torch="2.8")).python == "3.12"
    with pytest.raises(UserError, match=r"Python 3\.9") as caught:
        make_plan(Snapshot(raw), Wish(gpu="cpu", torch="2.8", env="system"))
    assert "--env uv" in caught.value.problems[0].hint


def test_no_linux_driver_is_installed_in_wsl_for_nvidia_either() -> None:
    plan = make_plan(bare("wsl2-7900xtx"), Wish(gpu="nvidia"))
    assert not [step.id for step in plan.steps if step.id in ("driver", "reboot")]
    assert "Windows" in plan.notes[0]


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(("version", "done"), [("7.2.1-81", True), ("6.4.0-47", False), ("7.20.0-1", False)])
def test_another_rocms_compiler_does_not_pass_for_the_one_of_torch(version: str, done: bool, tmp_path: Path) -> None:
    steps = {step.id: step for step in planned("wish-deepspeed-flash-attn")[0].steps}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hipcc").write_text("", encoding="utf-8")
    (tmp_path / "bin" / "hipcc").chmod(0o755)
    (tmp_path / "include" / "hip").mkdir(parents=True)
    (tmp_path / "include" / "hip" / "hip_runtime.h").touch()
    (tmp_path / ".info").mkdir()
    (tmp_path / ".info" / "version").write_text(version + "\n", encoding="utf-8")
    script = "\n".join(steps["rocm-devel"].verify).replace("/opt/rocm", str(tmp_path))
    assert (subprocess.run(["bash", "-euo", "pipefail", "-c", script], check=False).returncode == 0) is done


def test_a_kernel_that_is_too_old_for_the_inbox_driver_gets_dkms_or_a_newer_kernel() -> None:
    raw = base_snapshot("cpu-only")
    raw["files"]["/proc/sys/kernel/osrelease"] = "5.15.0-160-generic"
    steps = {step.id: step for step in make_plan(Snapshot(raw), Wish(gpu="MI300X")).steps}
    assert "amdgpu-dkms" in "".join(steps["driver"].commands)
    assert not steps["reboot"].satisfied
    raw["files"]["/etc/os-release"] = "ID=arch"
    steps = {step.id: step for step in make_plan(Snapshot(raw), Wish(gpu="MI300X")).steps}
    assert steps["kernel"].title == "Install a kernel from 6.6 on"
    assert "amdgpu-dkms" not in "".join(steps["driver"].commands)


def test_debian_takes_the_packages_of_an_ubuntu() -> None:
    raw = base_snapshot("rx6800")
    step = next(s for s in make_plan(Snapshot(raw), Wish(gpu="MI100")).steps if s.id == "driver")
    assert any("/ubuntu noble main" in line for line in step.commands)


def test_the_oldest_torch_is_what_surefoot_requires() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={short(OLDEST_TORCH)}"' in text
    assert f'requires-python = ">={short(OLDEST_PYTHON)}"' in text


# ---- each check fails before its step ----
@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_in_an_empty_folder_no_step_passes_for_done(tmp_path: Path) -> None:
    plan = make_plan(bare("cpu-only"), Wish())
    for step in plan.steps:
        if step.id != "python":
            script = "\n".join(step.verify)
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, check=False
            )
            assert done.returncode != 0, step.id


def test_the_plan_is_json_with_a_schema() -> None:
    document = json.loads(json.dumps(planned("mi300x-8")[0].to_json()))
    assert document["schema"] == "surefoot.setup/1"
    assert [s["id"] for s in document["steps"]][-2:] == ["smoke", "doctor"]


# ---- any machine, any wish ----
SNAPSHOTS = {name: bare(name) for name in NAMES} | {f"{name}, whole": Snapshot(base_snapshot(name)) for name in NAMES}
ANY_WISH = st.builds(
    Wish,
    purposes=st.sampled_from([(), (), *((p,) for p in PURPOSES), PURPOSES[:3]]).map(
        lambda some: tuple(dict.fromkeys(("train", *some)))
    ),
    gpu=st.sampled_from([*[""] * 12, "cpu", "nvidia", "gfx90a,gfx942", "gfx1100;gfx1201", *load_table().gpus]),
    rocm=st.sampled_from([*[""] * 9, *(short(row.version) for row in load_table().rocm)]),
    torch=st.sampled_from([*[""] * 9, *(short(row.version) for row in load_table().torch[-9:])]),
    source=st.sampled_from([*[""] * 4, *SOURCES]),
    env=st.sampled_from([*ENVIRONMENTS, "venv", "venv", "venv"]),
    folder=st.sampled_from([".venv", "my env", "it's"]),
)


@given(st.sampled_from(sorted(SNAPSHOTS)), ANY_WISH)
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_any_wish_gets_a_sound_plan_or_a_refusal_that_helps(name: str, wish: Wish) -> None:
    snapshot = SNAPSHOTS[name]
    try:
        plan = make_plan(snapshot, wish)
    except UserError as error:
        assert all(problem.hint for problem in error.problems)
        return
    inside = make_plan(snapshot, replace(wish, env="venv")) if wish.env == "docker" else plan
    assert review(inside, Machine(snapshot)) == []
    assert set(plan.targets) <= set(load_table().gpus)
