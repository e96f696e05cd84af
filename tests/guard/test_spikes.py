"""The divergence detector: what it must see, what it must not, and that it can go back and be saved."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from surefoot.guard.spikes import KEPT, RELEARN, WARMUP, WINDOW, SpikeDetector


def healthy(steps: int, seed: int, loss: float = 1.0, scatter: float = 0.05, norm: float = 0.8) -> list[tuple]:
    """Steps of a run that falls fast and then slowly, with log-normal scatter."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(1, steps + 1):
        level = loss * (1.0 + 1.5 * math.exp(-step / 25))
        noise = rng.normal(0.0, scatter, 2)
        rows.append((step, level * math.exp(noise[0]), norm * math.exp(2 * noise[1]), 512))
    return rows


def feed(detector: SpikeDetector, rows: list[tuple]) -> list:
    return [found for row in rows if (found := detector.observe(*row))]


class Trial:
    """Experiments with a known outcome."""

    def __init__(self, rise: float | None = None, wrong: bool = False) -> None:
        self._rise, self._wrong, self.asked = rise, wrong, 0

    def wrong_labels(self) -> bool:
        return self._wrong

    def rise(self) -> float | None:
        self.asked += 1
        return self._rise


def settled(steps: int = 150, **changes) -> SpikeDetector:
    detector = SpikeDetector()
    assert feed(detector, healthy(steps, 0, **changes)) == []
    return detector


@pytest.mark.parametrize("scatter", [0.001, 0.03, 0.1, 0.25])
def test_healthy_steps_do_not_alarm(scatter):
    alarms = [a for seed in range(10) for a in feed(SpikeDetector(), healthy(400, seed, scatter=scatter))]
    assert alarms == []


def test_tiny_batches_of_real_token_losses_do_not_alarm():
    # Mean of 7 exponential token losses of 0.6 nats: far more skewed than a normal distribution.
    rng = np.random.default_rng(3)
    for _ in range(5):
        losses = rng.exponential(0.6, (600, 7)).mean(1)
        rows = [(i + 1, float(x), float(4 * math.sqrt(x) * rng.lognormal(0, 0.3)), 7) for i, x in enumerate(losses)]
        assert feed(SpikeDetector(), rows) == []


@pytest.mark.parametrize("scatter", [0.005, 0.05, 0.15])
@pytest.mark.parametrize("times", [1.3, 1.5, 2.0])
def test_one_hard_but_clean_batch_is_no_spike(times, scatter):
    rows = healthy(260, 0, scatter=scatter)
    for step in (30, 151, 200):
        number, loss, norm, tokens = rows[step - 1]
        rows[step - 1] = (number, loss * times, norm * 1.5, tokens)
    assert feed(SpikeDetector(), rows) == []


@pytest.mark.parametrize("loss", [5.0, 9.2])
def test_random_labels_are_a_spike_at_that_very_step(loss):
    found = settled().observe(151, loss, 3.0, 512)
    assert found is not None
    assert (found.fault, found.step, found.onset) == ("SPIKE", 151, 151)
    assert f"loss {loss:g} where the last 64 steps had median 0.9941" in found.evidence[0]


@pytest.mark.parametrize("step", [WARMUP + 2, 15, 20, 40])
def test_an_acute_jump_early_on_is_not_missed(step):
    detector = SpikeDetector()
    rows = healthy(step - 1, 5)
    assert feed(detector, rows) == []
    found = detector.observe(step, 10 * rows[-1][1], 10 * rows[-1][2], 512)
    assert found is not None and found.step == step


def test_a_suspicious_step_alarms_when_the_experiment_confirms_it():
    found = settled().observe(151, 1.25, 2.0, 512, 0.0, Trial(rise=0.3))
    assert found is not None
    assert (found.fault, found.step, found.onset) == ("SPIKE", 151, 150)
    assert found.evidence[-1].startswith("rows of the steps before cost 1.35 times what they did then")


@pytest.mark.parametrize("rise", [-0.02, 0.0, 0.04, None])
def test_a_suspicious_step_is_well_when_the_experiment_shows_nothing(rise):
    detector, trial = settled(), Trial(rise)
    assert [detector.observe(151 + i, 1.25, 2.0, 512, 0.0, trial) for i in range(3)] == [None] * 3
    assert trial.asked == 3
    assert detector.observe(154, 1.25, 2.0, 512) is None, "no experiment, no alarm"


def test_healthy_steps_seldom_ask_for_an_experiment():
    detector, trial = SpikeDetector(), Trial(rise=-0.01)
    assert [detector.observe(*row, 0.0, trial) for row in healthy(1000, 1)] == [None] * 1000
    assert trial.asked <= 30


@pytest.mark.parametrize("rise", [-0.02, None])
def test_what_lies_far_outside_alarms_without_an_experiment(rise):
    found = settled().observe(151, 9.2, 3.0, 512, 0.0, Trial(rise))
    assert found is not None and found.onset == 151


def with_chance(tokens: int, seed: int = 0) -> SpikeDetector:
    """A detector of steps whose losses scatter widely, at a fifth of what labels drawn by lot would cost."""
    detector, rng = SpikeDetector(), np.random.default_rng(seed)
    for step in range(1, 151):
        assert detector.observe(step, float(rng.lognormal(0.0, 0.5)), 1.0, tokens, 5.0) is None
    return detector


@pytest.mark.parametrize(
    ("tokens", "loss", "alarms"), [(512, 3.3, True), (60, 4.0, True), (512, 2.4, False), (7, 3.9, False)]
)
def test_labels_that_fit_no_better_than_by_lot_are_a_spike_unless_they_are_few(tokens, loss, alarms):
    assert with_chance(tokens).observe(151, loss, 1.0, tokens) is None, "the loss alone does not say it"
    found = with_chance(tokens).observe(151, loss, 1.0, tokens, 5.0)
    assert (found is not None) == alarms
    if found:
        assert "labels drawn by lot would cost 5" in found.evidence[-1]


def test_a_model_that_has_learnt_nothing_yet_is_not_told_that_it_is_no_better_than_chance():
    detector = SpikeDetector()
    for step in range(1, 151):
        assert detector.observe(step, 4.9, 1.0, 512, 5.0, Trial(wrong=True)) is None
    assert detector.observe(151, 5.0, 1.0, 512, 5.0, Trial(wrong=True)) is None


@pytest.mark.parametrize("wrong", [True, False])
def test_labels_that_are_not_the_text_are_named_where_a_step_gains_little_over_chance(wrong):
    found = with_chance(7).observe(151, 2.9, 1.0, 7, 5.0, Trial(rise=-0.01, wrong=wrong))
    assert (found is not None) == wrong
    if found:
        assert found.onset == 151 and found.evidence[-1].endswith("the labels are wrong")


@pytest.mark.parametrize(
    ("loss", "rise", "alarms"), [(8.0, 1.2, True), (8.0, 0.3, False), (8.0, None, False), (5.0, 1.2, False)]
)
@pytest.mark.parametrize("step", [2, 6, 11])
def test_divergence_in_the_first_steps_is_told_when_older_rows_cost_twice_as_much(step, loss, rise, alarms):
    detector = SpikeDetector()
    for earlier in range(1, step):
        assert detector.observe(earlier, 2.0, 1.0, 512, 0.0, Trial(rise=1.2)) is None
    found = detector.observe(step, loss, 1.0, 512, 0.0, Trial(rise))
    assert (found is not None) == alarms


@pytest.mark.parametrize("before", [0, 150])
def test_a_gradient_of_exactly_zero_for_good_is_told_as_dead(before):
    detector = SpikeDetector()
    feed(detector, healthy(before, 0))
    found = [detector.observe(before + i, 1.0, 0.0, 512) for i in range(1, RELEARN + 1)]
    assert not any(spike.dead for spike in found[:-1] if spike)
    assert found[-1] is not None and found[-1].dead


def test_a_gradient_of_exactly_zero_without_a_loss_is_not_dead():
    detector = SpikeDetector()
    assert feed(detector, [(step, 0.001, 0.0, 512) for step in range(1, 2 * RELEARN)]) == []


def test_one_large_gradient_is_clipped_and_no_spike_but_a_hundredfold_one_is():
    assert settled().observe(151, 1.0, 8.0, 512) is None
    found = settled().observe(151, 1.0, 400.0, 512)
    assert found is not None and found.evidence[0].startswith("gradient norm 400")


def test_only_a_rise_counts():
    assert settled().observe(151, 0.01, 0.01, 512) is None


def test_a_gradient_that_collapses_to_exactly_zero_is_a_spike():
    found = settled().observe(151, 4.57, 0.0, 512)
    assert found is not None and "exactly 0" in found.evidence[0]
    found = settled().observe(151, 1.0, 0.0, 512)
    assert found is not None and "exactly 0" in found.evidence[0]


def test_a_zero_gradient_of_rows_known_by_heart_is_none():
    detector = settled(loss=0.002)
    assert detector.observe(151, 0.0005, 0.0, 512) is None


def test_a_loss_near_zero_may_go_up_tenfold():
    detector = settled(loss=0.005)
    assert [detector.observe(151 + i, 0.05, 1.0, 512) for i in range(3)] == [None] * 3


def test_a_slow_rise_is_a_trend_with_its_onset():
    detector = settled(300)
    found = []
    for i in range(60):
        found += feed(detector, [(301 + i, math.exp(0.02 * i) * (1.0 if i % 2 else 1.04), 0.8, 512)])
        if found:
            break
    assert found and found[0].fault == "TREND"
    assert 301 <= found[0].onset <= 315 < found[0].step
    assert f"since step {found[0].onset}" in found[0].evidence[0]


def test_a_slightly_higher_level_for_good_is_accepted():
    detector = settled(300)
    rows = [(step + 300, loss * 1.12, norm, tokens) for step, loss, norm, tokens in healthy(500, 8)[150:]]
    assert feed(detector, rows) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_to_the_gate_and_forgotten(bad):
    detector, other = settled(), settled()
    for loss, norm in ((bad, 1.0), (1.0, bad), (bad, bad)):
        assert detector.observe(151, loss, norm, 512) is None
    assert detector.state() == other.state()


def test_nothing_alarmed_enters_the_statistics():
    detector, other = settled(), settled()
    for step in range(151, 151 + RELEARN - 1):
        assert detector.observe(step, 9.0, 5.0, 512) is not None
    assert detector.state()["well"] == other.state()["well"]


def test_a_level_that_is_kept_in_spite_of_alarms_becomes_the_usual_one():
    detector = settled()
    rows = [(step + 150, loss * 3, norm * 2, 512) for step, loss, norm, _ in healthy(400, 9)[100:]]
    alarms = feed(detector, rows)
    assert RELEARN <= len(alarms) <= RELEARN + 2


@pytest.mark.parametrize("seed", range(6))
def test_rollback_leaves_a_detector_that_never_saw_the_steps(seed):
    rng = np.random.default_rng(seed)
    rows = healthy(400, seed)
    back = int(rng.integers(330, 390))
    spoilt, clean = SpikeDetector(), SpikeDetector()
    feed(clean, rows[:back])
    feed(spoilt, rows[:back])
    worse = [(step, loss * float(rng.choice([1, 1.3, 8])), norm, tokens) for step, loss, norm, tokens in rows[back:]]
    feed(spoilt, worse)
    spoilt.forget_from(back + 1)
    later = [(step, loss * float(rng.choice([1.0, 1.0, 1.3, 8.0])), norm, n) for step, loss, norm, n in rows[back:]]
    assert feed(spoilt, later) == feed(clean, later)


def test_rollback_reaches_back_as_far_as_promised():
    rows = healthy(700, 4)
    spoilt, clean = SpikeDetector(), SpikeDetector()
    back = 700 - (KEPT - 2 * WINDOW) + 1
    feed(spoilt, rows)
    feed(clean, rows[:back])
    spoilt.forget_from(back + 1)
    # The cumulative sum and the window are what later answers depend on.
    assert spoilt.state()["well"][-WINDOW - 1 :] == clean.state()["well"][-WINDOW - 1 :]
    assert feed(spoilt, rows[back:]) == feed(clean, rows[back:])


@pytest.mark.parametrize("at", [0, 3, 11, 57, 150, 299])
def test_resuming_from_json_answers_as_the_undisturbed_detector(at):
    rng = np.random.default_rng(at)
    rows = [
        (step, loss * float(rng.choice([1, 1, 1, 1, 1.3, 8])), norm, int(rng.integers(20, 600)))
        for step, loss, norm, _ in healthy(300, at)
    ]
    straight, first = SpikeDetector(), SpikeDetector()
    assert feed(first, rows[:at]) == feed(straight, rows[:at])
    resumed = SpikeDetector.from_state(json.loads(json.dumps(first.state(), allow_nan=False)))
    assert feed(resumed, rows[at:]) == feed(straight, rows[at:])
    assert resumed.state() == straight.state()


def short_and_long(seed: int, steps: int = 300) -> list[tuple]:
    """Steps whose scatter is that of a mean over their tokens, 8 in every tenth and 800 in the others."""
    rng = np.random.default_rng(seed)
    tokens = np.where(rng.random(steps) < 0.1, 8, 800)
    return [
        (i + 1, float(rng.gamma(n / 2, 2 / n)), float(rng.lognormal(0, 0.1) * (800 / n) ** 0.4), int(n))
        for i, n in enumerate(tokens)
    ]


def test_known_tokens_tell_a_short_step_from_a_spike():
    # The same step: dear, with a large gradient. 8 tokens may well be so, 800 are worth an experiment.
    trials = {8: Trial(), 800: Trial()}
    for tokens, trial in trials.items():
        detector = SpikeDetector()
        assert feed(detector, short_and_long(2)) == []
        assert detector.observe(301, 1.5, 3.0, tokens, 0.0, trial) is None
    assert (trials[8].asked, trials[800].asked) == (0, 1)


def test_extreme_numbers_do_not_break_it():
    detector = settled()
    for row in ((151, 3e38, 3e38, 512), (152, 0.0, 0.0, 512), (153, -2.0, 1e-30, 512), (154, 1e-30, 1e300, 1)):
        detector.observe(*row)
    json.dumps(detector.state(), allow_nan=False)
