"""`surefoot setup` as it is typed: what it prints and writes, and what it says to mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import surefoot.cli.setup_run
from surefoot.cli.main import app


@pytest.fixture
def machine(tmp_path: Path) -> str:
    """A hand-written machine: eight MI300X on metal."""
    path = tmp_path / "machine.yaml"
    path.write_text("base: mi300x-8\n", encoding="utf-8")
    return str(path)


def said(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["setup", *arguments], input=stdin)
    return done.exit_code, done.stdout, done.stderr


def test_without_anything_the_plan_is_shown(machine: str) -> None:
    code, out, _ = said("--snapshot", machine)
    assert code == 0
    assert "torch 2.14.0+rocm7.2 from https://download.pytorch.org/whl/rocm7.2" in out
    assert "python3.12 -m venv .venv\n" in out  # a line that can be copied
    assert "undo:" not in out
    assert "undo:" in said("--snapshot", machine, "--plan", "--verbose")[1]


def test_json_is_one_document_and_purposes_join_with_plus(machine: str) -> None:
    code, out, _ = said("--snapshot", machine, "--json", "--for", "flash-attn+deepspeed")
    assert code == 0
    document = json.loads(out)
    assert document["wish"]["purposes"] == ["train", "flash-attn", "deepspeed"]
    assert {"flash-attn", "deepspeed"} <= {step["id"] for step in document["steps"]}


@pytest.mark.parametrize("env", ["venv", "docker"])
def test_script_and_dockerfile_are_written(machine: str, env: str, tmp_path: Path) -> None:
    script, dockerfile = tmp_path / "out.sh", tmp_path / "Dockerfile"
    code, out, _ = said(
        "--snapshot", machine, "--env", env, "--script", str(script), "--dockerfile", str(dockerfile)
    )  # fmt: skip
    assert code == 0
    assert out == f"wrote {script}\nwrote {dockerfile}\n"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert re.search(r"^FROM ", dockerfile.read_text(encoding="utf-8"), re.M)


MISTAKES = [
    (["--for", "train+deepsped"], "--for: cannot hold 'deepsped'", "flash-attn"),
    (["--gpu", "gfx424"], "no GPU target gfx424", "gfx942"),
    (["--rocm", "7.2.4.beta"], "--rocm: cannot be '7.2.4.beta'", "as 10.1"),
    (["--torch", "2.14", "--rocm", "7.1"], "--torch: no row of the table serves gfx942", "without --torch: torch 2.13"),
    (["--source", "nightly"], "--source: cannot be 'nightly'", "pip, amd, source"),
    (["--env", "pip"], "--env: cannot be 'pip'", "venv, uv, conda"),
    (["--folder", "~/x"], "--folder: cannot be '~/x'", ".venv"),
    (["--index", "mirror"], "--index: cannot be 'mirror'", "https://"),
    (["--run"], "--run: works on this machine, and --snapshot is another", "--script"),
    (["--yes"], "--yes: answers the questions of --run", "--run"),
    (["--run", "--json"], "--json: does not go with --run", "one command after the other"),
    (["explain", "F35"], "--snapshot stands before `explain`", "options go behind it"),
    (["--gpu", "RX 6850"], "no card 'RX 6850'", "Radeon RX 6800"),
    (["--dockerfile", "Dockerfile", "--surefoot", "."], "--surefoot: the whole folder would go", "pip wheel --no-deps"),
    (["--env", "docker", "--surefoot", "../x"], "and ../x is outside", "pip wheel --no-deps -w . ../x"),
]


@pytest.mark.parametrize(("arguments", "message", "hint"), MISTAKES, ids=lambda value: " ".join(value)[:30])
def test_a_mistake_is_named_with_its_way_out(machine: str, arguments: list[str], message: str, hint: str) -> None:
    code, out, err = said("--snapshot", machine, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert hint in err


def test_a_plan_for_another_card_is_not_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = said("--run", "--gpu", "gfx906")
    assert code == 2
    assert "this machine has no gfx906" in err
    assert list(tmp_path.iterdir()) == []


def test_resume_where_nothing_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = said("--resume")
    assert code == 2
    assert "nothing was begun in this folder" in err
    code, _, err = said("--resume", "--offline", "nowhere")
    assert code == 2
    assert "nowhere holds no whole bundle" in err, "the bundle is not forgotten"


def test_explain_and_advice_answer(machine: str) -> None:
    code, out, _ = said("explain", "F35", "--snapshot", machine)
    assert code == 0
    assert out.startswith("F35")
    code, out, _ = said(
        "advice", "--snapshot", machine, "--json", stdin="pip install flash-attn --global-option=--rocm\n"
    )
    assert code == 0
    assert json.loads(out)["verdicts"][0]["verdict"] == "wrong"


def test_the_smoke_test_says_which_devices_there_are_and_that_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = said("smoke", "--device", "rocm")
    assert code == 2
    assert "--device: cannot be 'rocm'" in err
    monkeypatch.setattr(surefoot.cli.setup_run, "find_spec", lambda _: None)
    code, _, err = said("smoke")
    assert code == 2
    assert "has no torch to train with" in err


def test_a_python_that_only_stands_on_the_path_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python3.13").write_text("#!/bin/sh\nexit 127\n", encoding="utf-8")
    (tmp_path / "python3.13").chmod(0o755)
    machine = tmp_path / "machine.yaml"
    machine.write_text("base: strix-halo\n", encoding="utf-8")
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = said("bundle", str(tmp_path / "bundle"), "--snapshot", str(machine))
    assert code == 2
    assert "the plan is for Python 3.13, which is not here" in err
