from __future__ import annotations

import pytest
from run_events import evaluation, facts, result, step

from surefoot.config import load_config
from surefoot.errors import UserError
from surefoot.run import trackers as module
from surefoot.run.trackers import Trackers, flat_settings, start_trackers, wanted_trackers
from surefoot.run.window import LogWindow


def settings(*more):
    return load_config(None, ["model_name_or_path=x", "dataset=y", "template=chatml", "output_dir=z", *more], "train")


def have(monkeypatch, *names):
    monkeypatch.setattr(module, "is_installed", lambda name: name in names)


@pytest.mark.parametrize(
    ("report_to", "expected"),
    [
        ("none", []),
        ("wandb", ["wandb"]),
        ("[wandb, tensorboard]", ["wandb", "tensorboard"]),
        ("all", ["tensorboard", "wandb"]),
    ],
)
def test_report_to_names_trackers(monkeypatch, report_to, expected):
    have(monkeypatch, "tensorboard", "wandb")
    assert wanted_trackers(settings(f"report_to={report_to}")) == expected


def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(monkeypatch):
    have(monkeypatch, "tensorboard")
    with pytest.raises(UserError, match="pip install wandb") as caught:
        wanted_trackers(settings("report_to=wandb"))
    assert caught.value.problems[0].key == "report_to"


class Fake:
    name = "fake"

    def __init__(self, broken=False):
        self.logged = []
        self.ended = 0
        self.broken = broken

    def log(self, values, step):
        if self.broken:
            raise ConnectionError("the service is away")
        self.logged.append((step, values))

    def finish(self):
        self.ended += 1


def follow(*trackers):
    said = []
    listener = Trackers(list(trackers), LogWindow("steps", 2, False), said.append)
    listener.started(facts())
    listener.stepped(step(1, 1.0))
    listener.stepped(step(2, 3.0))
    listener.stepped(step(3, None, grad_norm=None, nonfinite=True))
    listener.evaluated(evaluation(3, 0.5, "dev", accuracy=0.25))
    listener.finished(result())
    return said


def test_values_have_transformers_names_and_nothing_that_is_not_finite():
    fake = Fake()
    follow(fake)
    (first, bad, evaluated, totals) = fake.logged
    assert first == (
        2,
        {
            "train/loss": 2.0, "train/grad_norm": 0.5, "train/learning_rate": 1e-4, "train/epoch": 0.2,
            "train/num_input_tokens_seen": 200,
        },
    )  # fmt: skip
    assert bad[0] == 3 and bad[1]["train/nonfinite"] == 1 and "train/loss" not in bad[1]
    assert evaluated[1]["eval/dev_loss"] == 0.5 and evaluated[1]["eval/dev_accuracy"] == 0.25
    assert totals[1] == {"train/train_loss": 1.25, "train/train_runtime": 20.0} and fake.ended == 1


def test_a_tracker_that_fails_is_said_once_and_does_not_stop_the_others():
    broken, sound = Fake(broken=True), Fake()
    said = follow(broken, sound)
    assert len(said) == 1 and "the service is away" in said[0]
    assert len(sound.logged) == 4 and sound.ended == 1


def test_secrets_do_not_reach_a_tracker():
    values = flat_settings(settings("hf_hub_token=hf_verysecret"))
    assert "hf_verysecret" not in str(values) and values["template"] == "chatml"


def test_a_tracker_that_refuses_to_start_stops_the_run_before_it_begins(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    cfg = settings("report_to=tensorboard", f"logging_dir={tmp_path / 'file'}")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="tensorboard did not start"):
        start_trackers(cfg, tmp_path)


def test_tensorboard_gets_the_curve(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = settings("report_to=tensorboard", "run_name=first")
    listener = Trackers(start_trackers(cfg, tmp_path), LogWindow("steps", 1, False), print)
    listener.started(facts())
    for number in (1, 2, 3):
        listener.stepped(step(number, 1.0 / number))
    listener.close()
    read = EventAccumulator(str(tmp_path / "runs/first"))
    read.Reload()
    points = [(event.step, event.value) for event in read.Scalars("train/loss")]
    assert points == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
