from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console
from run_events import evaluation, facts, result, step

from surefoot.run.preprocessing import PreprocessingProgress
from surefoot.run.progress import Progress


def plain():
    out = io.StringIO()
    return Progress(Console(file=out, width=200, force_terminal=False)), out


def test_a_file_gets_plain_lines_not_too_often_and_always_the_last():
    progress, out = plain()
    progress.started(facts())
    for number in range(1, 11):
        progress.stepped(step(number, 1.0))
    progress.finished(result())
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step")]
    # Two seconds a step, a line each ten seconds: 1, 6, and the last.
    assert [line.split()[1] for line in lines] == ["1/10", "6/10", "10/10"]
    assert (
        "loss 1.0000" in lines[0] and "grad 0.5" in lines[0] and "tok/s" in lines[0] and "0:00:02<0:00:18" in lines[0]
    )
    assert "\x1b" not in out.getvalue()
    assert "Training done: 10 steps, mean loss 1.2500" in out.getvalue()


def test_a_step_that_is_not_finite_is_shown_at_once():
    progress, out = plain()
    progress.started(facts())
    progress.stepped(step(1))
    progress.stepped(step(2, None, grad_norm=None, nonfinite=True))
    assert "step 2/10  loss not finite" in out.getvalue() and "grad not finite" in out.getvalue()


def test_evaluations_and_sentences_are_shown():
    progress, out = plain()
    progress.started(facts(resumed_from=3))
    progress.evaluated(evaluation(4, 0.5, "dev", accuracy=0.25))
    progress.told("[not markup] halved")
    assert "evaluation on dev: loss 0.5000, token accuracy 25.0%" in out.getvalue()
    assert "[not markup] halved" in out.getvalue() and "3 of them done before" in out.getvalue()


def test_a_terminal_gets_a_bar_that_ends_with_the_run():
    out = io.StringIO()
    progress = Progress(Console(file=out, width=120, force_terminal=True))
    progress.started(facts())
    for number in range(1, 11):
        progress.stepped(step(number))
    progress.finished(replace(result(), stopped_by="signal"))
    assert "10/10" in out.getvalue() and "stopped by a signal" in out.getvalue()
    progress.close()


def test_preprocessing_without_a_terminal_says_when_a_piece_is_done():
    out = io.StringIO()
    with PreprocessingProgress(Console(file=out, width=200, force_terminal=False)) as hear:
        for done in (0, 500, 1000, 1000):
            hear("tokenizing rows", done, done / 1000)
    assert out.getvalue() == "tokenizing rows: 1,000 rows (100%)\n"


def test_preprocessing_on_a_terminal_shows_a_bar_for_each_piece():
    out = io.StringIO()
    with PreprocessingProgress(Console(file=out, width=120, force_terminal=True)) as hear:
        hear("tokenizing a", 10, 1.0)
        hear("tokenizing [b]", 7, None)
    assert "tokenizing a" in out.getvalue() and "tokenizing [b]" in out.getvalue() and "7 rows" in out.getvalue()
