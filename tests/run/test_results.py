from __future__ import annotations

import json
import math

import pytest
from run_events import evaluation, facts, result, step

from surefoot.run.results import Evaluations, log_history, training_metrics, write_results, write_trainer_state
from surefoot.run.trainer_log import TrainerLog
from surefoot.run.window import LogWindow

SETTINGS = {"logging_steps": 1, "eval_steps": 5, "save_steps": 500, "train_batch_size": 2}


def test_result_files_have_transformers_names_and_are_joined(tmp_path):
    evaluations = Evaluations(stage="sft")
    evaluations.add(evaluation(5, 9.0))
    evaluations.add(evaluation(10, 0.5, "a", accuracy=0.9))
    evaluations.add(evaluation(10, 0.7, "b"))
    write_results(tmp_path, training_metrics(result()), evaluations.metrics)
    train, evaluated, both = (
        json.loads((tmp_path / f"{name}_results.json").read_text()) for name in ("train", "eval", "all")
    )
    assert train["train_loss"] == 1.25 and train["train_samples_per_second"] == 2.0 and train["train_runtime"] == 20.0
    assert evaluated["eval_a_loss"] == 0.5 and evaluated["eval_a_accuracy"] == 0.9 and evaluated["eval_b_loss"] == 0.7
    assert "eval_loss" not in evaluated, "the evaluation of an earlier step is not the last one"
    assert both == {**train, **evaluated}


def test_pretraining_gets_a_perplexity():
    evaluations = Evaluations(stage="pt")
    evaluations.add(evaluation(10, 2.0))
    assert evaluations.metrics["perplexity"] == pytest.approx(math.exp(2.0))


def test_no_evaluation_writes_no_evaluation_file(tmp_path):
    write_results(tmp_path, training_metrics(result()), {})
    assert not (tmp_path / "eval_results.json").exists()


def test_history_leaves_out_what_is_not_finite_but_says_so(tmp_path):
    log = TrainerLog(tmp_path / "log", LogWindow("steps", 1, False))
    log.started(facts())
    log.stepped(step(1, 3.0))
    log.stepped(step(2, None, nonfinite=True))
    log.evaluated(evaluation(2, 1.5, "dev", accuracy=0.5))
    assert log_history(log.entries) == [
        {"loss": 3.0, "grad_norm": 0.5, "learning_rate": 1e-4, "epoch": 0.1, "step": 1},
        {"grad_norm": 0.5, "learning_rate": 1e-4, "epoch": 0.2, "nonfinite": True, "step": 2},
        {"eval_dev_loss": 1.5, "eval_dev_accuracy": 0.5, "epoch": 0.2, "step": 2},
    ]


def test_transformers_can_load_the_state(tmp_path):
    from transformers import TrainerState

    log = TrainerLog(tmp_path / "log", LogWindow("steps", 5, False))
    log.started(facts())
    for number in range(1, 11):
        log.stepped(step(number))
    write_trainer_state(tmp_path / "trainer_state.json", facts(), log.entries, SETTINGS)
    state = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert (state.global_step, state.max_steps, state.epoch, state.num_train_epochs) == (10, 10, 1.0, 1)
    assert [(row["step"], row["loss"]) for row in state.log_history] == [(5, 1.0), (10, 1.0)]
