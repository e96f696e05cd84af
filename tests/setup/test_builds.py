"""Add-ons and builds from source: the right back end or a refusal, torch kept, jobs by memory, real git and pip."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import UserError
from surefoot.machine.case import base_names, base_snapshot
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Snapshot
from surefoot.machine.table import load_table
from surefoot.machine.versions import parse_version
from surefoot.setup import source_build
from surefoot.setup.addons import addon_notes, addon_steps, attention_backend
from surefoot.setup.choose import Choice
from surefoot.setup.jobs import build_jobs, build_jobs_line
from surefoot.setup.plan import CONSTRAINTS, Plan, Step, Wish, misplaced
from surefoot.setup.planner import make_plan

EVERYTHING = Wish(purposes=("train", "deepspeed", "flash-attn", "serve"))
ROCM_BASES = [n for n in base_names() if not n.startswith("_") and n not in ("cpu-only", "cuda-h100")]


def machine(base: str) -> Machine:
    return Machine(Snapshot(base_snapshot(base)))


def choice_of(gfx: str, rocm: str = "7.2", torch: str = "2.13.0", **more) -> Choice:
    fields = {"source": "pip", "channel": "pytorch", "python": "3.12", "index": "https://index.example/simple", **more}
    tag = f"+rocm{rocm}" if rocm else "+cpu"
    return Choice(
        tuple(gfx.split(",")) if gfx else (), rocm, torch + tag, pip=".venv/bin/python -m pip",
        interpreter=".venv/bin/python", kind="rocm" if gfx else "cpu", **fields,
    )  # fmt: skip


def run(folder: Path, lines: tuple[str, ...], **env: str) -> subprocess.CompletedProcess[str]:
    """Run bash lines as the runner does; git may clone from folders, as it may from hosts."""
    more = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "protocol.file.allow", "GIT_CONFIG_VALUE_0": "always"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)], cwd=folder, env={**os.environ, **more, **env},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


# ---- jobs ----
AMOUNTS = st.tuples(st.integers(1, 512), st.floats(0, 4096, allow_nan=False), st.sampled_from([1, 4, 5, 8]))


@given(AMOUNTS)
def test_jobs_fit_into_memory_and_cores(amounts) -> None:
    cores, available, each = amounts
    jobs = build_jobs(*amounts)
    assert 1 <= jobs <= cores
    assert jobs == 1 or jobs * each + 2 <= available
    one_more = jobs + 1
    assert one_more > cores or one_more * each + 2 > available, "one more would have fitted"


@given(AMOUNTS, st.floats(0, 100))
def test_more_memory_never_means_fewer_jobs(amounts, more: float) -> None:
    cores, available, each = amounts
    assert build_jobs(cores, available, each) <= build_jobs(cores, available + more, each)


@pytest.fixture(scope="module")
def fake_system(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("system")
    (folder / "cgroup").mkdir()
    (folder / "nproc").write_text("#!/bin/sh\necho ${OMP_NUM_THREADS:-$CORES}\n")
    (folder / "nproc").chmod(0o755)
    return folder


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 256),
    st.integers(0, 2**30),
    st.none() | st.tuples(*[st.integers(0, 2**38)] * 3),
    st.sampled_from([4, 8]),
)
def test_the_shells_rule_is_the_same_rule(fake_system: Path, cores: int, kib: int, group, each: int) -> None:
    (fake_system / "meminfo").write_text(f"MemTotal: {2**31} kB\nMemAvailable:   {kib} kB\nSwapTotal: 0 kB\n")
    available = float(kib)
    names = ("max", "current", "stat")
    for name in names:
        (fake_system / f"cgroup/memory.{name}").unlink(missing_ok=True)
    if group is not None:
        texts = (str(group[0]), str(group[1]), f"anon 5\ninactive_file {group[2]}\nactive_file 7")
        for name, text in zip(names, texts, strict=True):
            (fake_system / f"cgroup/memory.{name}").write_text(text + "\n")
        available = min(available, (group[0] - group[1] + group[2]) / 1024)
    line = build_jobs_line(each).replace("/proc/meminfo", f"{fake_system}/meminfo")
    line = line.replace("/sys/fs/cgroup", f"{fake_system}/cgroup")
    path = f"{fake_system}:{os.environ['PATH']}"
    done = run(fake_system, (line, 'echo "$MAX_JOBS"'), PATH=path, CORES=str(cores), OMP_NUM_THREADS="1")
    assert done.stdout.split() == [str(build_jobs(cores, available / 2**20, each))], done.stderr


@pytest.mark.parametrize(
    ("limit", "used", "cache", "jobs"), [("max", 60, 0, "12"), (64, 60, 0, "1"), (64, 60, 40, "5"), (500, 60, 0, "12")]
)
def test_a_containers_own_limit_counts_and_its_cache_does_not(fake_system: Path, limit, used, cache, jobs) -> None:
    gib = 2**30
    (fake_system / "meminfo").write_text(f"MemAvailable: {100 * 2**20} kB\n")
    (fake_system / "cgroup/memory.max").write_text(f"{limit if limit == 'max' else limit * gib}\n")
    (fake_system / "cgroup/memory.current").write_text(f"{used * gib}\n")
    (fake_system / "cgroup/memory.stat").write_text(f"inactive_file {cache * gib}\n")
    line = build_jobs_line(8).replace("/proc/meminfo", f"{fake_system}/meminfo")
    line = line.replace("/sys/fs/cgroup", f"{fake_system}/cgroup")
    done = run(fake_system, (line, 'echo "$MAX_JOBS"'), PATH=f"{fake_system}:{os.environ['PATH']}", CORES="64")
    assert done.stdout.split() == [jobs], done.stderr


# ---- add-ons ----
def by_id(steps: tuple[Step, ...]) -> dict[str, Step]:
    return {step.id: step for step in steps}


@pytest.mark.parametrize("gfx", sorted(load_table().gpus))
def test_flash_attn_takes_the_back_end_that_the_table_has(gfx: str) -> None:
    addons = load_table().addons
    wish = Wish(purposes=("train", "flash-attn"))
    if gfx in addons["flash_attn_ck"]["release_gfx"]:
        step = by_id(addon_steps(machine("cpu-only"), wish, choice_of(gfx)))["flash-attn"]
        text = "\n".join(step.commands)
        assert attention_backend(choice_of(gfx)) == "ck"
        assert f"GPU_ARCHS={gfx}" in text and "FLASH_ATTENTION_TRITON_AMD_ENABLE" not in text
        assert "rocm-devel" in step.needs and "MAX_JOBS" in text
    elif gfx in addons["flash_attn_triton"]["gfx"]:
        step = by_id(addon_steps(machine("cpu-only"), wish, choice_of(gfx)))["flash-attn"]
        text = "\n".join(step.commands)
        assert attention_backend(choice_of(gfx)) == "triton"
        assert "FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE" in text and "GPU_ARCHS" not in text
        assert "rocm-devel" not in step.needs, "nothing is compiled when it is installed"
    else:
        with pytest.raises(UserError, match=gfx) as error:
            attention_backend(choice_of(gfx))
        assert "would match" in str(error.value)
        return
    assert "--no-build-isolation" in text and "--global-option" not in text
    known = gfx in {*addons["aotriton"]["gfx"], *addons["aotriton"]["experimental"]}
    assert ("no flash kernels" not in step.reason) == known, "it says whether torch's own attention would do"


def test_targets_of_several_cards_are_joined_as_flash_attn_reads_them() -> None:
    step = by_id(addon_steps(machine("cpu-only"), EVERYTHING, choice_of("gfx90a,gfx942")))["flash-attn"]
    assert any("GPU_ARCHS='gfx90a;gfx942'" in line for line in step.commands)
    assert attention_backend(choice_of("gfx942,gfx1100")) == "triton", "one back end must serve both"


@pytest.mark.parametrize(("torch", "fine"), [("2.7.0", False), ("2.8.0", True), ("2.14.0", True), ("2.15.0", False)])
def test_flash_attns_triton_kernels_go_with_some_tritons_only(torch: str, fine: bool) -> None:
    if fine:
        assert attention_backend(choice_of("gfx1100", torch=torch)) == "triton"
    else:
        with pytest.raises(UserError, match=r"would match: --torch 2\.14"):
            attention_backend(choice_of("gfx1100", torch=torch))


@pytest.mark.parametrize(
    ("gfx", "rocm", "library"),
    [
        ("gfx942", "6.4", "rocm64"), ("gfx942", "7.2", "rocm72"), ("gfx1030", "7.14", "rocm714"),
        ("gfx1100", "10.0", "rocm715"), ("gfx1100", "10.1", "rocm715"), ("gfx950", "6.4", ""), ("gfx908", "7.2", ""),
        ("gfx1030", "7.2", ""), ("gfx942", "6.1", ""), ("gfx906", "10.1", ""), ("gfx1030", "", ""),
    ],
)  # fmt: skip
def test_bitsandbytes_comes_where_a_library_of_it_serves(gfx: str, rocm: str, library: str) -> None:
    choice = choice_of(gfx, rocm)
    step = by_id(addon_steps(machine("cpu-only"), Wish(), choice)).get("bitsandbytes")
    assert (step is not None) == bool(library)
    assert bool(addon_notes(choice)) != bool(library), "what is left out is said"
    if step:
        assert f"libbitsandbytes_{library}.so" in step.verify[0]


def test_deepspeed_cannot_bring_a_torch() -> None:
    step = by_id(addon_steps(machine("mi300x-8"), EVERYTHING, choice_of("gfx942")))["deepspeed"]
    own = next(line for line in step.commands if "deepspeed==" in line)
    assert "--no-deps" in own and "DS_BUILD_OPS=0" in own
    requires = load_table().addons["deepspeed"]["requires"]
    assert "torch" not in requires and all(name.split(">")[0] in step.commands[0] for name in requires)


def test_vllm_is_a_container_that_card_and_driver_allow() -> None:
    old_driver, new_driver = machine("mi300x-8"), machine("mi350x-rhel")
    wish = Wish(purposes=("train", "serve"))
    for m, gfx in ((old_driver, "gfx942"), (new_driver, "gfx950")):
        text = by_id(addon_steps(m, wish, choice_of(gfx)))["serve"].commands[0]
        image = next(row for row in load_table().addons["vllm"]["images"] if row["image"] in text)
        driver = load_table().driver_of(m.driver)
        assert gfx in image["gfx"]
        assert driver is None or driver.userspace[0] <= parse_version(image["rocm"]) <= driver.userspace[1]


@pytest.mark.parametrize(
    ("base", "gfx", "named"),
    [("rx6800", "gfx1030", "gfx1030"), ("k8s-mi300x", "gfx942", "k8s"), ("cpu-only", "", "cpu")],
)
def test_vllm_is_refused_by_name(base: str, gfx: str, named: str) -> None:
    with pytest.raises(UserError, match=named) as error:
        addon_steps(machine(base), Wish(purposes=("serve",)), choice_of(gfx, "7.2" if gfx else ""))
    assert "would match" in str(error.value)


def all_plans() -> list[Plan]:
    plans = []
    for base in ROCM_BASES:
        for source in ("", "source"):
            for purposes in (("train",), ("train", "deepspeed"), ("train", "flash-attn"), ("train", "serve")):
                try:
                    plans.append(make_plan(Snapshot(base_snapshot(base)), Wish(purposes=purposes, source=source)))
                except UserError:
                    continue
    return plans


ALL_PLANS = all_plans()
OURS = ("flash-attn", "bitsandbytes", "deepspeed", "serve", "rocm-sdk")


def test_plans_hold_every_kind_of_step() -> None:
    ids = {step.id for plan in ALL_PLANS for step in plan.steps}
    assert {*OURS, "torch-source-clone", "torch-source-triton", "torch-source-wheel", "torch", "rocm-devel"} <= ids


def test_no_pip_call_on_torch_is_without_constraints_and_none_has_an_index_of_its_own() -> None:
    for plan in ALL_PLANS:
        assert misplaced(plan.steps) == []
        for step in plan.steps:
            if step.id not in OURS and not step.id.startswith("torch-source"):
                continue
            for line in "\n".join(step.commands).split("\n"):
                if " pip install " in line:
                    assert f"-c {CONSTRAINTS}" in line, (step.id, line)
                    assert "--index-url" not in line or step.id == "rocm-sdk", (step.id, line)
                    assert "--extra-index-url" not in line


def test_checks_fail_before_anything_is_done(tmp_path: Path) -> None:
    seen: dict[tuple[str, ...], str] = {}
    for plan in ALL_PLANS:
        for step in plan.steps:
            if step.id in OURS or step.id.startswith("torch-source") or (step.id == "torch" and plan.wish.source):
                seen[step.verify] = step.id
                assert step.verify and step.undo and step.reason and step.minutes
    for verify, name in seen.items():
        assert run(tmp_path, verify).returncode != 0, name


def test_every_line_is_bash() -> None:
    texts = {"\n".join(lines) for plan in ALL_PLANS for s in plan.steps for lines in (s.commands, s.verify, s.undo)}
    whole = "\n".join(f"f{i}() {{\n:\n{text}\n}}" for i, text in enumerate(sorted(texts)))
    assert subprocess.run(["bash", "-n"], input=whole, text=True, capture_output=True, check=False).stderr == ""


# ---- torch from source ----
def source_steps(gfx: str = "gfx1031", rocm: str = "6.4", **more) -> tuple[Step, ...]:
    choice = choice_of(gfx, rocm, source="source", **{"channel": "", **more})
    return source_build.torch_from_source(machine("rx6800"), Wish(source="source"), choice)


def test_a_source_build_is_in_order_and_for_its_targets_only() -> None:
    steps = source_steps("gfx1031,gfx1100")
    assert steps[-1].id == "torch" and steps[-1].needs[-1] == "torch-source-wheel"
    wheel = "\n".join(by_id(steps)["torch-source-wheel"].commands)
    assert "PYTORCH_ROCM_ARCH='gfx1031;gfx1100'" in wheel
    assert "PYTORCH_BUILD_VERSION=2.13.0+rocm6.4" in wheel
    assert wheel.index("unset HIP_PATH") < wheel.index("build_amd.py") < wheel.index("-m build --wheel")
    assert sum(step.disk_gib for step in steps) >= 40, "what the facts ask for"
    assert "release/2.13" in "\n".join(by_id(steps)["torch-source-clone"].commands)


def test_the_compiler_comes_from_pip_where_rocm_does() -> None:
    steps = by_id(source_steps("gfx1100", "10.1", channel="amd-10"))
    assert "rocm[libraries,devel,device-gfx1100]==10.1.*" in steps["rocm-sdk"].commands[0]
    assert "rocm-sdk" in steps["torch-source-wheel"].needs
    assert "rocm-devel" in by_id(source_steps())["torch-source-wheel"].needs


def test_cards_without_triton_get_a_torch_without_it() -> None:
    assert "torch-source-triton" not in by_id(source_steps("gfx906"))
    assert "torch-source-triton" in by_id(source_steps("gfx1100"))


def test_a_source_build_needs_targets() -> None:
    with pytest.raises(UserError, match="--gpu gfxNNN"):
        source_build.torch_from_source(machine("cpu-only"), Wish(source="source"), choice_of("", ""))


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A repository as PyTorch's is, in small: a release branch, a submodule, hipify's script, and a build."""
    part, whole = tmp_path / "part", tmp_path / "upstream"
    for folder in (part, whole):
        folder.mkdir()
        git(folder, "init", "-b", "release/2.13")
    (part / "header.h").write_text("// third party\n")
    (whole / "version.txt").write_text("2.13.0a0\n")
    (whole / "requirements.txt").write_text("")
    (whole / "tools" / "amd_build").mkdir(parents=True)
    (whole / "tools" / "amd_build" / "build_amd.py").write_text("open('hipified.h', 'w').write('hip')\n")
    (whole / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (whole / "backend.py").write_text(_BACKEND)
    git(part, "add", ".")
    git(part, "commit", "-m", "one")
    git(whole, "submodule", "add", str(part), "third_party/part")
    git(whole, "add", ".")
    git(whole, "commit", "-m", "one")
    return whole


#: A build back end that looks for what a build of torch needs, and makes a wheel of torch with the flags it was given.
_BACKEND = """
import os, zipfile
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    assert os.path.exists("hipified.h") and os.path.exists("third_party/part/header.h")
    assert os.environ["ROCM_HOME"] and "HIP_PATH" not in os.environ and int(os.environ["MAX_JOBS"]) >= 1
    version, archs = os.environ["PYTORCH_BUILD_VERSION"], os.environ["PYTORCH_ROCM_ARCH"].replace(";", " ")
    name, info = f"torch-{version}-py3-none-any.whl", f"torch-{version}.dist-info"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as wheel:
        code = "from types import SimpleNamespace as N\\nversion = N(hip='6.4')\\n"
        wheel.writestr("torch/__init__.py", code + f"_C = N(_cuda_getArchFlags=lambda: {archs!r})\\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: torch\\nVersion: {version}\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        names = ("torch/__init__.py", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD")
        wheel.writestr(f"{info}/RECORD", "".join(f"{each},,\\n" for each in names))
    return name
"""


def localised(step: Step, upstream: Path) -> Step:
    lines = tuple(line.replace("https://github.com/ROCm/pytorch", str(upstream)) for line in step.commands)
    return replace(step, commands=lines)


def test_the_clone_is_whole_and_mended_when_it_is_not(tmp_path: Path, upstream: Path) -> None:
    step = localised(by_id(source_steps())["torch-source-clone"], upstream)
    home = tmp_path / "home"
    home.mkdir()
    done = run(home, step.commands)
    assert done.returncode == 0, done.stderr
    assert run(home, step.verify).returncode == 0
    sources = home / source_build.SOURCES
    git(sources, "submodule", "deinit", "-f", "--all")  # as a clone that was killed leaves it
    assert run(home, step.verify).returncode != 0, "a missing submodule counts as not done"
    assert run(home, step.commands).returncode == 0 and run(home, step.verify).returncode == 0
    (upstream / "new.txt").write_text("a fix in the release branch\n")
    git(upstream, "add", ".")
    git(upstream, "commit", "-m", "two")
    assert run(home, step.commands).returncode == 0 and (sources / "new.txt").exists()


def test_a_small_torch_is_built_and_installed_by_the_plans_commands(tmp_path: Path, upstream: Path) -> None:
    """Everything behind the clone but the size: hipify, environment, jobs, wheel, install and checks, with pip."""
    steps = by_id(source_steps())
    home = tmp_path / "home"
    home.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / ".venv"], check=True)
    site = next((home / ".venv" / "lib").glob("python3*/site-packages"))
    (site / "build").mkdir()  # the package `build` may not be here: the call that it stands for
    (site / "build" / "__main__.py").write_text(
        "import sys; sys.path.insert(0, '.')\nfrom backend import build_wheel\n"
        "assert sys.argv[1:3] == ['--wheel', '--no-isolation']\nprint(build_wheel(sys.argv[4]))\n"
    )
    pip = Path(subprocess.check_output([sys.executable, "-c", "import pip; print(pip.__path__[0])"], text=True).strip())
    (site / "pip").symlink_to(pip)
    rocm = tmp_path / "rocm" / "bin"
    rocm.mkdir(parents=True)
    (rocm / "hipcc").write_text("#!/bin/sh\n")
    (rocm / "hipcc").chmod(0o755)
    assert run(home, localised(steps["torch-source-clone"], upstream).commands).returncode == 0
    (home / CONSTRAINTS).write_text("torch==2.13.0+rocm6.4\nnumpy<3\n")
    for name in ("torch-source-wheel", "torch"):
        step = steps[name]
        lines = tuple(line.replace("ROCM_HOME=/opt/rocm", f"ROCM_HOME={rocm.parent}") for line in step.commands)
        assert run(home, step.verify).returncode != 0, "not done yet"
        done = run(home, lines, HIP_PATH="/opt/old", PIP_NO_INDEX="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
        assert done.returncode == 0, done.stderr + done.stdout
        checked = run(home, step.verify)
        assert checked.returncode == 0, checked.stderr
    assert (home / CONSTRAINTS).read_text() == "torch==2.13.0+rocm6.4\n", "rewritten from what is installed"
    truncated = next((home / source_build.WHEELS).glob("torch-*.whl"))
    truncated.write_bytes(truncated.read_bytes()[:200])
    assert run(home, steps["torch-source-wheel"].verify).returncode != 0, "half a wheel is none"
