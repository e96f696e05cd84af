from __future__ import annotations

import json

import pytest
from run_events import evaluation, facts, result, step

from surefoot.config import load_config
from surefoot.run.folder import RunFolder
from surefoot.run.record import RunRecord

REPORT = {"rows_read": 10, "rows_used": 9, "dropped": {"no answer": 1}, "truncated": 2, "tokens": 900}
FILES = {
    "README.md", "all_results.json", "eval_results.json", "surefoot", "train_results.json", "trainer_log.jsonl",
    "trainer_state.json", "training_eval_loss.png", "training_loss.png",
}  # fmt: skip


@pytest.fixture
def record(tmp_path):
    arguments = [
        "model_name_or_path=org/base", "dataset=rows", "template=chatml", f"output_dir={tmp_path / 'run'}",
        "plot_loss=true", "logging_steps=2", "hf_hub_token=hf_verysecret",
    ]  # fmt: skip
    cfg = load_config(None, arguments, "train")
    return RunRecord(cfg, RunFolder.of(cfg), REPORT)


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_a_run_leaves_llamafactorys_files_and_ours_in_their_subfolder(record, tmp_path):
    record.started(facts())
    for number in range(1, 11):
        record.stepped(step(number, 11.0 - number))
    record.evaluated(evaluation(10, 0.5))
    record.finished(result())
    folder = tmp_path / "run"
    assert names(folder) == FILES
    assert names(folder / "surefoot") == {"resolved.yaml", "machine.json", "data_report.json"}
    assert json.loads((folder / "surefoot/data_report.json").read_text()) == REPORT
    assert [path.name for path in record.plots] == ["training_loss.png", "training_eval_loss.png"]
    for path in folder.rglob("*"):
        assert not path.is_file() or b"hf_verysecret" not in path.read_bytes(), path


def test_the_resolved_yaml_gives_the_same_settings_again(record, tmp_path):
    record.started(facts())
    again = load_config(tmp_path / "run/surefoot/resolved.yaml", [], "train")
    cfg = record._cfg
    assert {k: v for k, v in again.model_dump().items() if v != getattr(cfg, k)} == {"hf_hub_token": None}


def test_the_card_names_base_data_settings_and_results(record, tmp_path):
    record.started(facts())
    record.stepped(step(1))
    record.finished(result())
    card = (tmp_path / "run/README.md").read_text()
    front, body = card.split("---\n", 2)[1:]
    assert "base_model: org/base" in front and "library_name: peft" in front and "- surefoot" in front
    for text in (
        "`org/base`",
        "`rows`",
        "| dropped: no answer | 1 |",
        "| template | chatml |",
        "| train_loss | 1.25 |",
    ):
        assert text in body
    assert "training_loss.png" in body


def test_nothing_is_written_before_the_run_is_accepted(record, tmp_path):
    record.failed()
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_still_has_its_log_and_curve(record, tmp_path):
    record.started(facts())
    record.stepped(step(1, 2.0))
    record.stepped(step(2, None, grad_norm=None, nonfinite=True))
    record.failed()
    folder = tmp_path / "run"
    assert {"trainer_log.jsonl", "trainer_state.json", "training_loss.png"} <= names(folder)
    assert "train_results.json" not in names(folder), "results are those of finished runs"
    last = json.loads((folder / "trainer_log.jsonl").read_text().splitlines()[-1])
    assert last["loss"] is None and last["nonfinite"] is True


def test_a_run_that_a_signal_stopped_has_no_card_yet(record, tmp_path):
    record.started(facts())
    record.stepped(step(1))
    record.finished(result(1, stopped_by="signal"))
    assert "README.md" not in names(tmp_path / "run")
    assert json.loads((tmp_path / "run/train_results.json").read_text())["stopped_by"] == "signal"


def test_a_fresh_run_removes_what_an_earlier_one_said_of_itself(record, tmp_path):
    record.started(facts())
    record.stepped(step(1))
    record.evaluated(evaluation(1))
    record.finished(result())
    record._folder.path.joinpath("notes.txt").write_text("mine")
    again = RunRecord(record._cfg, record._folder, REPORT)
    again.started(facts())
    assert names(tmp_path / "run") == {"surefoot", "trainer_log.jsonl", "notes.txt"}


def test_running_a_finished_job_again_keeps_its_results(record, tmp_path):
    from dataclasses import replace

    record.started(facts())
    for number in range(1, 11):
        record.stepped(step(number))
    record.finished(result())
    files = {name: (tmp_path / "run" / name).read_bytes() for name in ("trainer_log.jsonl", "all_results.json")}
    again = RunRecord(record._cfg, record._folder, REPORT)
    again.started(facts(resumed_from=10))
    again.finished(replace(result(), loss=None, seconds=0.0))
    assert {name: (tmp_path / "run" / name).read_bytes() for name in files} == files
