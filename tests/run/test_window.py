from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_events import facts, step

from surefoot.run.window import LogWindow


def run(window, losses, *, total_steps=None, epochs=1.0, resumed_from=0):
    total_steps = total_steps or resumed_from + len(losses)
    window.start(facts(total_steps, epochs, resumed_from))
    points = []
    for number, loss in enumerate(losses, start=resumed_from + 1):
        points += window.push(step(number, loss, total_steps=total_steps, epochs=epochs, nonfinite=loss is None))
    return points


def test_logs_every_n_steps_and_shows_the_mean_of_the_stretch():
    points = run(LogWindow("steps", 3, False), [1.0, 2.0, 6.0, 4.0, 4.0, 1.0, 9.0])
    assert [(p.step, p.loss) for p in points] == [(3, 3.0), (6, 3.0)]


def test_logging_first_step_gives_step_one_its_own_point():
    points = run(LogWindow("steps", 3, True), [1.0, 2.0, 6.0])
    assert [(p.step, p.loss) for p in points] == [(1, 1.0), (3, 4.0)]


def test_a_share_of_the_run_is_rounded_up_as_transformers_does():
    points = run(LogWindow("steps", 0.25, False), [1.0] * 10)
    assert [p.step for p in points] == [3, 6, 9]


def test_epoch_strategy_logs_at_each_epochs_end():
    points = run(LogWindow("epoch", 500, False), [1.0, 3.0, 5.0, 7.0, 9.0, 11.0], epochs=3.0)
    assert [(p.step, p.loss) for p in points] == [(2, 2.0), (4, 6.0), (6, 10.0)]


def test_epoch_strategy_logs_a_run_that_ends_inside_an_epoch():
    points = run(LogWindow("epoch", 500, False), [1.0, 1.0, 1.0], epochs=0.5)
    assert [p.step for p in points] == [3]


def test_epoch_strategy_after_a_resume_does_not_log_epochs_that_were_over():
    points = run(LogWindow("epoch", 500, False), [1.0] * 3, total_steps=6, epochs=3.0, resumed_from=3)
    assert [p.step for p in points] == [4, 6]


def test_no_strategy_logs_nothing_but_a_step_that_is_not_finite():
    window = LogWindow("no", 1, False)
    assert [(p.step, p.loss) for p in run(window, [1.0, 2.0, None])] == [(3, None)]
    assert window.flush() == []


def test_a_step_that_is_not_finite_is_logged_at_once_and_the_good_ones_before_it_keep_their_mean():
    points = run(LogWindow("steps", 10, False), [1.0, 3.0, None])
    assert [(p.step, p.loss, p.nonfinite) for p in points] == [(2, 2.0, False), (3, None, True)]


def test_a_gradient_that_is_not_finite_keeps_its_finite_loss():
    window = LogWindow("steps", 10, False)
    window.start(facts())
    (point,) = window.push(step(1, 2.0, grad_norm=None, nonfinite=True))
    assert (point.loss, point.grad_norm, point.nonfinite) == (2.0, None, True)


@given(
    losses=st.lists(st.one_of(st.none(), st.floats(0, 100)), min_size=1, max_size=60),
    every=st.one_of(st.integers(1, 20), st.floats(0.01, 0.99)),
    first=st.booleans(),
)
def test_no_step_is_lost_or_counted_twice(losses, every, first):
    window = LogWindow("steps", every, first)
    points = run(window, losses) + window.flush()
    ends = [0, *(p.step for p in points)]
    assert ends == sorted(set(ends)) and ends[-1] == len(losses)
    sizes = [after - before for before, after in itertools.pairwise(ends)]
    total = sum(size * p.loss for size, p in zip(sizes, points, strict=True) if p.loss is not None)
    assert total == pytest.approx(math.fsum(x for x in losses if x is not None), abs=1e-6)
    assert [p.step for p in points if p.nonfinite] == [i for i, x in enumerate(losses, 1) if x is None]
