"""The command line: exit codes, JSON and the page."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from surefoot.cli.doctor import doctor
from surefoot.doctor.job import read_job

CASE = "base: rx7900xtx-ubuntu\npatch: {process.groups: [1000]}\n"


app = typer.Typer()
app.command()(doctor)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def case(tmp_path):
    path = tmp_path / "case.yaml"
    path.write_text(CASE, encoding="utf-8")
    return path


def test_json_has_the_stable_form(case):
    done = run("--snapshot", case, "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 1
    assert document["schema"] == "surefoot.doctor/1"
    assert document["primary"]["id"] == "F22" and document["primary"]["because_of"] is None
    assert {"id", "title", "evidence", "fix", "because_of"} <= set(document["findings"][0])
    assert document["unknown"] == []


def test_healthy_is_zero_and_null(tmp_path):
    path = tmp_path / "case.yaml"
    path.write_text("base: mi300x-8\n", encoding="utf-8")
    done = run("--snapshot", path, "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["primary"] is None
    assert "Nothing wrong was found" in run("--snapshot", path).stdout


def test_the_page_has_primary_first_and_folds_consequences(tmp_path):
    path = tmp_path / "case.yaml"
    path.write_text("base: w7900-igpu\npatch: {env: {HIP_VISIBLE_DEVICES: null}}\n", encoding="utf-8")
    page = run("--snapshot", path).stdout
    assert page.index("PRIMARY  F60") < page.index("1 consequence") < page.index("F56")
    assert "export HIP_VISIBLE_DEVICES=0" in page
    assert run("--snapshot", path, "-v").stdout.count("Evidence") == 2


def test_chinese_page(case):
    page = run("--snapshot", case, "--lang", "zh").stdout
    assert "首要原因" in page and "修复" in page


def test_a_yaml_is_checked_with_the_machine(tmp_path):
    machine, train = tmp_path / "m.yaml", tmp_path / "train.yaml"
    machine.write_text("base: rx6800\n", encoding="utf-8")
    train.write_text("bf16: true\n", encoding="utf-8")
    assert json.loads(run(train, "--snapshot", machine, "--json").stdout)["primary"]["id"] == "F62"


def test_a_log_is_read(tmp_path, case):
    machine, log = tmp_path / "m.yaml", tmp_path / "run.log"
    machine.write_text("base: rx7900xtx-ubuntu\n", encoding="utf-8")
    log.write_text("step 1\nRuntimeError: something nobody knows\n", encoding="utf-8")
    document = json.loads(run("--snapshot", machine, "--log", log, "--json").stdout)
    assert document["findings"] == []
    assert document["unknown"][0]["why"] == "cause unknown; decisive fact: RuntimeError: something nobody knows"


def test_a_side_remark_does_not_explain_a_failure(tmp_path):
    machine = tmp_path / "m.yaml"
    machine.write_text(
        'base: mi300x-8\npatch: {files: {/proc/sys/kernel/numa_balancing: "1"}}\nlog: "RuntimeError: odd"\n',
        encoding="utf-8",
    )
    document = json.loads(run("--snapshot", machine, "--json").stdout)
    assert document["primary"]["id"] == "F125"
    assert document["unknown"][0]["why"] == "cause unknown; decisive fact: RuntimeError: odd"


def test_capture_and_back(tmp_path):
    path = tmp_path / "box.json"
    assert run("--capture", path).exit_code == 0
    assert path.stat().st_size < 1_000_000
    one, two = run("--snapshot", path, "--json"), run("--snapshot", path, "--json")
    assert one.stdout == two.stdout and one.exit_code in (0, 1)


def test_wrong_requests_end_with_two(tmp_path, case):
    no = tmp_path / "no"
    for arguments in (
        ["--lang", "fr"],
        ["--snapshot", no],
        ["--snapshot", case, "--log", no],
        [no, "--snapshot", case],
    ):
        done = run(*arguments)
        assert done.exit_code == 2 and done.stderr.startswith("error: "), arguments
    case.write_text("base: nowhere\n", encoding="utf-8")
    done = run("--snapshot", case)
    assert done.exit_code == 2 and "mi300x-8" in done.stderr
    case.write_text("base: mi300x-8\npacth: {}\n", encoding="utf-8")
    assert "pacth" in run("--snapshot", case).stderr


def test_a_job_brings_its_files(tmp_path, case):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 4096, "num_attention_heads": 8}', encoding="utf-8")
    (model / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 160000000000}}', encoding="utf-8")
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}', encoding="utf-8"
    )
    job = read_job(
        _write(
            tmp_path / "t.yaml", f"model_name_or_path: {model}\ndeepspeed: {tmp_path / 'ds.json'}\nflash_attn: fa2\n"
        )
    )
    assert job["head_dim"] == 512 and job["model_parameters"] == 8e10
    assert "offload_optimizer" in job["deepspeed"]["zero_optimization"]
    machine = _write(tmp_path / "m.yaml", "base: rx7900xtx-ubuntu\n")
    train = _write(tmp_path / "u.yaml", f"model_name_or_path: {model}\nflash_attn: fa2\nbf16: true\n")
    found = {f["id"] for f in json.loads(run(train, "--snapshot", machine, "--json").stdout)["findings"]}
    assert {"F133", "F136"} <= found


def _write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_bundle(tmp_path, case):
    assert run("--snapshot", case, "--bundle", tmp_path / "b.zip").exit_code == 1
    import zipfile

    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        assert sorted(archive.namelist()) == ["diagnosis.json", "env.txt", "snapshot.json"]


def test_a_case_brings_its_training_yaml(tmp_path):
    text = "- base: rx6800\n  config: {bf16: true}\n"
    (tmp_path / "case.yaml").write_text(text)
    done = run("--snapshot", tmp_path / "case.yaml", "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["primary"]["id"] == "F62"


def test_several_cases_are_not_diagnosed_as_one(tmp_path):
    (tmp_path / "cases.yaml").write_text("cases:\n- base: rx6800\n- base: cpu-only\n")
    done = run("--snapshot", tmp_path / "cases.yaml")
    assert done.exit_code == 2 and "2 cases" in done.stderr
