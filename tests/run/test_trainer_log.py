from __future__ import annotations

import json

from run_events import evaluation, facts, result, step

from surefoot.run.trainer_log import TrainerLog, read_log
from surefoot.run.window import LogWindow


def strict_lines(path):
    def refuse(word):
        raise AssertionError(f"{word} is not standard JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def make(path, every=2):
    return TrainerLog(path, LogWindow("steps", every, False))


def test_fields_are_those_of_llamafactory_and_the_gradient_norm(tmp_path):
    log = make(tmp_path / "trainer_log.jsonl")
    log.started(facts())
    log.stepped(step(1, 1.0))
    log.stepped(step(2, 3.0))
    assert strict_lines(tmp_path / "trainer_log.jsonl") == [
        {
            "current_steps": 2, "total_steps": 10, "loss": 2.0, "grad_norm": 0.5, "lr": 1e-4, "epoch": 0.2,
            "percentage": 20.0, "elapsed_time": "0:00:04", "remaining_time": "0:00:16", "total_tokens": 200,
            "throughput": 50.0,
        }
    ]  # fmt: skip


def test_evaluations_have_their_own_lines(tmp_path):
    log = make(tmp_path / "log")
    log.started(facts())
    log.stepped(step(1))
    log.evaluated(evaluation(1, 0.5, "dev", accuracy=0.75))
    (line,) = strict_lines(tmp_path / "log")
    assert (line["current_steps"], line["eval_loss"], line["accuracy"], line["eval_name"]) == (1, 0.5, 0.75, "dev")


def test_what_is_not_finite_is_null_and_marked_and_the_file_stays_json(tmp_path):
    log = make(tmp_path / "log")
    log.started(facts())
    log.stepped(step(1, None, grad_norm=None, nonfinite=True))
    log.evaluated(evaluation(1, None, nonfinite=True))
    train, evaluated = strict_lines(tmp_path / "log")
    assert (train["loss"], train["grad_norm"], train["nonfinite"]) == (None, None, True)
    assert (evaluated["eval_loss"], evaluated["nonfinite"]) == (None, True)


def test_a_finished_run_ends_with_a_line_that_carries_the_rest(tmp_path):
    log = make(tmp_path / "log", every=4)
    log.started(facts())
    for number in range(1, 11):
        log.stepped(step(number, float(number)))
    log.finished(result())
    assert [(e["current_steps"], e.get("loss")) for e in strict_lines(tmp_path / "log")] == [
        (4, 2.5),
        (8, 6.5),
        (10, 9.5),
    ]


def test_a_run_that_ends_on_a_logged_step_still_has_its_closing_line(tmp_path):
    log = make(tmp_path / "log", every=10)
    log.started(facts())
    for number in range(1, 11):
        log.stepped(step(number))
    log.finished(result())
    last, closing = strict_lines(tmp_path / "log")
    assert last["loss"] == 1.0 and "loss" not in closing and closing["percentage"] == 100.0


def test_resume_keeps_lines_up_to_its_step_and_drops_later_and_broken_ones(tmp_path):
    path = tmp_path / "log"
    log = make(path)
    log.started(facts())
    for number in range(1, 9):
        log.stepped(step(number, float(number)))
    with path.open("a") as handle:
        handle.write('{"current_steps": 9, "lo')  # the process was killed here

    resumed = make(path)
    resumed.started(facts(resumed_from=5))
    assert [e["current_steps"] for e in strict_lines(path)] == [2, 4]
    for number in range(6, 11):
        resumed.stepped(step(number, float(number)))
    assert [e["current_steps"] for e in strict_lines(path)] == [2, 4, 6, 8, 10]
    assert strict_lines(path) == resumed.entries


def test_a_resumed_process_measures_only_itself(tmp_path):
    log = make(tmp_path / "log")
    log.started(facts(resumed_from=4))
    log.stepped(step(5))
    log.stepped(step(6))
    (line,) = strict_lines(tmp_path / "log")
    # 12 s for two steps of this process; four are left. 100 tokens in the 2 s between its first step and its second.
    assert (line["remaining_time"], line["throughput"]) == ("0:00:24", 50.0)


def test_a_fresh_run_in_an_old_folder_starts_its_log_anew(tmp_path):
    (tmp_path / "log").write_text('{"current_steps": 3, "loss": 1.0}\n')
    make(tmp_path / "log").started(facts())
    assert read_log(tmp_path / "log") == []


def test_a_failed_run_logs_what_was_waiting(tmp_path):
    log = make(tmp_path / "log", every=100)
    log.started(facts())
    log.stepped(step(1, 2.0))
    log.failed()
    assert [(e["current_steps"], e["loss"]) for e in strict_lines(tmp_path / "log")] == [(1, 2.0)]


def test_an_evaluation_that_a_killed_process_had_logged_is_not_logged_twice(tmp_path):
    first = make(tmp_path / "log", every=10)
    first.started(facts())
    for number in range(1, 11):
        first.stepped(step(number))
    first.evaluated(evaluation(10, 0.5))
    again = make(tmp_path / "log", every=10)
    again.started(facts(resumed_from=10))
    again.evaluated(evaluation(10, 0.5))
    again.finished(result())
    lines = strict_lines(tmp_path / "log")
    assert [("loss" in line, "eval_loss" in line) for line in lines] == [(True, False), (False, True), (False, False)]


def test_a_stopped_run_has_no_closing_line(tmp_path):
    log = make(tmp_path / "log", every=2)
    log.started(facts())
    log.stepped(step(1))
    log.stepped(step(2))
    log.finished(result(2, stopped_by="signal"))
    assert len(strict_lines(tmp_path / "log")) == 1
