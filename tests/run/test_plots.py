from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_events import evaluation, facts, step

from surefoot.run.plots import curves, smooth, write_plots
from surefoot.run.trainer_log import TrainerLog
from surefoot.run.window import LogWindow

# Vectors of LLaMA-Factory's own function, read off by running it; the whole set is in tests/parity.
VECTORS = [
    ([], []),
    ([1.0], [1.0]),
    ([4, 2, 1, 0.5], [4.0, 2.17940239, 1.105793804, 0.554340428]),
    ([3, 3, 3, 3, 3], [3.0] * 5),
    (
        [10, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [
            10.0,
            2.204267962,
            0.485879725,
            0.107100911,
            0.023607911,
            0.005203816,
            0.001147061,
            0.000252843,
            5.5733e-05,
            1.2285e-05,
        ],
    ),
]


@pytest.mark.parametrize(("values", "expected"), VECTORS)
def test_smoothing_is_llamafactorys(values, expected):
    assert smooth(values) == pytest.approx(expected, abs=1e-8)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=100))
def test_a_smoothed_curve_stays_within_its_points(values):
    smoothed = smooth(values)
    assert len(smoothed) == len(values) and smoothed[0] == pytest.approx(values[0])
    slack = 1e-9 * max(1.0, *(abs(v) for v in values))
    assert all(min(values) - slack <= s <= max(values) + slack for s in smoothed)


def logged(path, *events):
    log = TrainerLog(path, LogWindow("steps", 1, False))
    log.started(facts())
    for event in events:
        (log.evaluated if hasattr(event, "accuracy") else log.stepped)(event)
    return log.entries


def test_each_quantity_is_a_curve_and_holes_are_marked(tmp_path):
    entries = logged(
        tmp_path / "log", step(1, 3.0), step(2, None, nonfinite=True), evaluation(2, 1.0, "dev", accuracy=0.5),
        step(3, 2.0, grad_norm=None, nonfinite=True), evaluation(3, None, "dev", nonfinite=True),
    )  # fmt: skip
    found = {curve.key: curve for curve in curves(entries)}
    assert list(found) == ["loss", "eval_dev_loss", "eval_dev_accuracy"]
    assert (found["loss"].steps, found["loss"].values, found["loss"].nonfinite) == ([1, 3], [3.0, 2.0], [2, 3])
    assert (found["eval_dev_loss"].values, found["eval_dev_loss"].nonfinite) == ([1.0], [3])


def test_files_have_llamafactorys_names_and_are_pngs(tmp_path):
    entries = logged(tmp_path / "log", step(1, 3.0), step(2, 2.0), evaluation(2, 1.0, accuracy=0.5))
    paths = write_plots(tmp_path, entries)
    names = ["training_loss.png", "training_eval_loss.png", "training_eval_accuracy.png"]
    assert [path.name for path in paths] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_run_that_was_never_finite_still_has_its_plot(tmp_path):
    entries = logged(tmp_path / "log", step(1, None, nonfinite=True))
    assert [path.name for path in write_plots(tmp_path, entries)] == ["training_loss.png"]


def test_nothing_logged_draws_nothing(tmp_path):
    assert write_plots(tmp_path, []) == []
