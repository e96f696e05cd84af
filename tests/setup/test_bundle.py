"""A bundle is made, broken off, damaged, resumed and installed where no index answers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from pip_world import BROKEN, World, bare_environment, index, wheel

from surefoot.errors import UserError, WorkError
from surefoot.machine.case import base_names, base_snapshot
from surefoot.machine.snapshot import Snapshot
from surefoot.setup.bundle import bundle, install_args, offline, problems
from surefoot.setup.lock import pip_calls, write_lock
from surefoot.setup.plan import CONSTRAINTS, Plan, Step, Wish
from surefoot.setup.planner import make_plan

PIP = ".venv/bin/python -m pip"
TORCH = "2.13.0+rocm7.2"


def plan_of(index_url: str, *steps: tuple[str, str]) -> Plan:
    made = [Step(name, name, "a reason", (command,), ("true",)) for name, command in steps]
    return Plan(Wish(torch="2.13"), "a machine", ("gfx942",), TORCH, index_url, (f"torch=={TORCH}",), tuple(made))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An index of torch alone, another of the rest with a newer CUDA torch in it, a plan over both, and its bundle."""
    folder = tmp_path_factory.mktemp("site")
    files = folder / "files"
    torch = index(
        folder / "torch-index",
        [wheel(files, "torch", TORCH, ("triton-rocm==3.7.1",)), wheel(files, "triton-rocm", "3.7.1")],
    )
    rest = [
        wheel(files, "torch", "2.14.0", ("nvidia-cublas",)), wheel(files, "nvidia-cublas", "13.0"),
        wheel(files, "trainer", "1.0", ("torch>=2.0", "helper")), wheel(files, "helper", "0.9"),
        wheel(files, "helper", "1.1"), wheel(files, "addon", "2.0", ("torch",)),
    ]  # fmt: skip
    url = index(folder / "index", rest)
    plan = plan_of(
        torch,
        ("torch", f"{PIP} install --index-url {torch} torch=={TORCH}"),
        ("addon", f"BUILD=1 {PIP} install --no-deps -c {CONSTRAINTS} addon"),
        ("trainer", f"{PIP} install -c {CONSTRAINTS} 'trainer>=1' 'helper<1'"),
    )
    with pytest.MonkeyPatch.context() as patch:
        only(patch, url)
        bundle(plan, folder / "bundle", lambda line: None)
    return plan, url, folder / "bundle"


def only(patch: pytest.MonkeyPatch, url: str) -> None:
    """Let pip hear of one index alone."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT"):
        patch.delenv(name, raising=False)
    for name, value in (("CONFIG_FILE", "/dev/null"), ("NO_CACHE_DIR", "1"), ("INDEX_URL", url)):
        patch.setenv(f"PIP_{name}", value)


@pytest.fixture
def site(place, tmp_path, monkeypatch):
    """The plan and an empty folder for its bundle."""
    only(monkeypatch, place[1])
    return place[0], tmp_path / "bundle"


@pytest.fixture
def made(place, tmp_path, monkeypatch):
    """The plan and a copy of its bundle."""
    only(monkeypatch, place[1])
    return place[0], shutil.copytree(place[2], tmp_path / "bundle")


def names(folder) -> set[str]:
    return {path.name for path in (folder / "wheels").iterdir()}


def test_the_pip_calls_of_a_plan_are_read():
    plan = plan_of("", ("a", f"X=1 {PIP} install --pre -c {CONSTRAINTS} --no-deps --index-url U 'b>=1' c\ntrue"))
    (call,) = pip_calls(plan)
    assert (call.env, call.options) == ({"X": "1"}, ("--pre", "--no-deps", "--index-url", "U"))
    assert (call.requirements, call.name) == (("b>=1", "c"), "a-1.txt")


def test_a_bundle_installs_where_no_index_answers(made, tmp_path):
    _, folder = made
    assert names(folder) == {
        f"torch-{TORCH}-py3-none-any.whl", "triton_rocm-3.7.1-py3-none-any.whl", "addon-2.0-py3-none-any.whl",
        "trainer-1.0-py3-none-any.whl", "helper-0.9-py3-none-any.whl",
    }  # fmt: skip
    document = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    assert document["torch"] == TORCH and all(len(row["sha256"]) == 64 for row in document["packages"])
    world = World(tmp_path / "venv")
    dead = bare_environment(PIP_INDEX_URL=BROKEN, http_proxy=BROKEN, https_proxy=BROKEN)
    assert world.pip("install", "--retries", "0", "trainer", env=dead).returncode != 0
    done = world.pip("install", *install_args(folder), env=dead)
    assert done.returncode == 0, done.stderr
    assert world.versions() | {"torch": TORCH, "trainer": "1.0", "helper": "0.9"} == world.versions()
    assert world.pip("check").returncode == 0


@pytest.mark.slow
def test_the_plans_own_steps_run_offline(made, tmp_path):
    plan, folder = made
    world = World(tmp_path / "run" / ".venv", own_pip=True)
    for step in offline(plan, folder).steps:
        assert "--require-hashes" in step.commands[0] and "--no-index" in step.commands[0]
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", step.commands[0]], cwd=tmp_path / "run", text=True, capture_output=True,
            env=bare_environment(PIP_INDEX_URL=BROKEN), check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert {"torch", "addon", "trainer"} <= set(world.versions())


def test_a_bundle_that_was_broken_off_goes_on(site):
    plan, folder = site
    told: list[str] = []

    def stop_at_the_third(line: str) -> None:
        if line.startswith("3:"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bundle(plan, folder, stop_at_the_third)
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "wheels").iterdir()}
    assert len(before) == 2
    with pytest.raises(UserError, match="no whole bundle"):
        install_args(folder)
    bundle(plan, folder, told.append)
    assert told[0] == "resuming: versions as chosen before"
    after = {path.name: path.stat().st_mtime_ns for path in (folder / "wheels").iterdir()}
    assert before.items() <= after.items(), "what was there and whole was fetched again"
    assert len(after) == 5 and problems(folder) == []
    assert not list(folder.glob(".fetching-*"))


def test_choices_of_another_version_are_made_anew(made):
    plan, folder = made
    (folder / "chosen.json").write_text('{"chosen": 3}')
    told: list[str] = []
    bundle(plan, folder, told.append)
    assert told[0].endswith("cannot be understood: choosing anew") and problems(folder) == []


def test_damaged_and_missing_files_are_named_and_mended(made):
    plan, folder = made
    damaged = folder / "wheels" / "helper-0.9-py3-none-any.whl"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    (folder / "wheels" / "addon-2.0-py3-none-any.whl").unlink()
    with pytest.raises(WorkError, match=r"addon-2.0-py3-none-any.whl is missing; helper-0.9\S+ is damaged"):
        install_args(folder)
    told: list[str] = []
    bundle(plan, folder, told.append)
    assert any("helper-0.9" in line and "damaged" in line for line in told)
    assert problems(folder) == []


def test_pip_itself_refuses_a_file_that_the_lock_does_not_know(made, tmp_path):
    _, folder = made
    arguments = install_args(folder)
    wheel(folder / "wheels", "helper", "0.9", ("another",))
    done = World(tmp_path / "venv").pip("install", *arguments)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr


def test_a_bundle_for_another_plan_is_refused(made):
    plan, folder = made
    with pytest.raises(UserError, match=r"the bundle has torch[^>]+> plan with the options .+: --torch 2\.13"):
        offline(replace(plan, torch="2.14.0+rocm7.2"), folder)
    with pytest.raises(UserError, match=r"the plan makes 3\.99"):
        offline(replace(plan, steps=(Step("env", "e", "r", ("python3.99 -m venv .venv",), ()), *plan.steps)), folder)
    with pytest.raises(UserError, match=r"Python 3\.99, which is not here"):
        bundle(replace(plan, steps=(Step("env", "e", "r", ("uv venv --python 3.99",), ()),)), folder, lambda line: None)
    more = Step("more", "m", "r", (f"{PIP} install other",), ())
    with pytest.raises(UserError, match="nothing for the step more"):
        offline(replace(plan, steps=(*plan.steps, more)), folder)
    with pytest.raises(UserError, match="no whole bundle"):
        offline(plan, folder.parent)


def test_what_is_no_python_package_is_listed(site):
    plan, folder = site
    told: list[str] = []
    image = Step("serve", "s", "r", ("docker pull image",), (), downloads=("20 GiB from a registry",))
    bundle(replace(plan, steps=(image,)), folder, told.append)
    assert told[-1].endswith("serve: 20 GiB from a registry")


def test_a_folder_is_built_and_locked(site, tmp_path):
    plan, folder = site
    source = tmp_path / "source"
    source.mkdir()
    (source / "backend.py").write_text(
        "import shutil\n"
        f"MADE = {str(wheel(tmp_path / 'built', 'ours', '1.0'))!r}\n"
        "def build_wheel(target, *a, **k): return shutil.copy(MADE, target).rpartition('/')[2]\n",
        encoding="utf-8",
    )
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "ours"\nversion = "1.0"\n',
        encoding="utf-8",
    )
    local = replace(plan, steps=(Step("ours", "o", "r", (f"{PIP} install {source}",), ()),))
    bundle(local, folder, lambda line: None)
    assert "ours==1.0 \\\n    --hash=sha256:" in (folder / "locks" / "ours-1.txt").read_text(encoding="utf-8")
    with pytest.raises(WorkError, match="ours is built from a folder"):
        write_lock(local, folder / "only.txt", lambda line: None)


def test_a_lock_alone_has_every_hash(site, tmp_path):
    plan, _ = site
    write_lock(plan, tmp_path / "lock.txt", lambda line: None)
    text = (tmp_path / "lock.txt").read_text(encoding="utf-8")
    assert text.count("--hash=sha256:") == 5 and f"torch=={TORCH}" in text and "2.14" not in text


def test_an_index_that_does_not_answer_is_told(site, tmp_path, monkeypatch):
    plan, folder = site
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "nothing").as_uri())
    with pytest.raises(WorkError, match="resolve the step addon"):
        bundle(plan, folder, lambda line: None)


@pytest.mark.slow
def test_real_wheels_from_the_default_index(tmp_path, monkeypatch):
    """Pure wheels from the index that this machine's pip has; skipped where it has none."""
    plan = replace(plan_of("", ("tools", f"{PIP} install 'idna==3.10' packaging")), torch="", constraints=())
    try:
        bundle(plan, tmp_path / "bundle", lambda line: None)
    except WorkError as error:
        if "could not resolve" not in str(error):
            raise
        pytest.skip(f"no index: {error}")
    world = World(tmp_path / "venv")
    done = world.pip("install", *install_args(tmp_path / "bundle"), env=bare_environment(PIP_INDEX_URL=BROKEN))
    assert done.returncode == 0, done.stderr
    assert world.versions()["idna"] == "3.10"


@pytest.mark.parametrize("base", [name for name in base_names() if not name.startswith("_")])
def test_no_pip_install_of_a_real_plan_is_missed(base):
    """Whatever a plan installs with pip is in its bundle."""
    for purposes in (("train",), ("train", "deepspeed"), ("train", "flash-attn")):
        try:
            plan = make_plan(Snapshot(base_snapshot(base)), Wish(purposes=purposes))
        except UserError:  # no flash-attn for this card
            continue
        lines = [line for step in plan.steps for command in step.commands for line in command.splitlines()]
        written = sum(len(re.findall(r"\bpip install\b", line)) for line in lines)
        assert written == len(pip_calls(plan)) > 0
        assert all(call.requirements for call in pip_calls(plan))
