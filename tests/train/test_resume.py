"""Resumed runs end in the bits of undisturbed ones; other runs are refused; nothing verified is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import random_table, save_tiny_model
from surefoot.errors import UserError, WorkError
from surefoot.train import checkpoint as checkpoint_module
from surefoot.train.checkpoint import find_checkpoints, read_checkpoint, rotate
from surefoot.train.clock import Clock


def final_weights(out: str) -> dict[str, torch.Tensor]:
    file = next(Path(out).glob("*model.safetensors"))
    return load_file(file)


def assert_same_bits(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


class SignalAt:
    """Sends this process a signal after a step, as a person or a scheduler would."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def __getattr__(self, name):
        return lambda *_: None

    def stepped(self, event):
        if event.step == self.step:
            os.kill(os.getpid(), self.number)
            time.sleep(0.05)  # the handler runs at the next bytecode


KINDS = [
    {"finetuning_type": "lora", "lora_dropout": 0.1},
    {"finetuning_type": "full", "optim": "adafactor"},
    {"finetuning_type": "freeze", "freeze_trainable_layers": 1, "neftune_noise_alpha": 5.0},
    {"finetuning_type": "lora", "fp16": True, "additional_target": "lm_head"},
]


@pytest.mark.parametrize("changes", KINDS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_by_a_signal_and_resumed_equals_straight(settings, start, tmp_path, monkeypatch, changes, number):
    settings |= changes | {"num_train_epochs": 2.0}
    straight, _ = start(settings)
    other = settings | {"output_dir": str(tmp_path / "stopped")}
    with monkeypatch.context() as patch:
        tell = Clock.tell
        patch.setattr(Clock, "tell", lambda *a: (tell(*a), SignalAt(5, number).stepped(a[2])))
        stopped, _ = start(other)
    assert stopped.result.stopped_by == "signal"
    assert stopped.result.steps == 5
    assert not list(Path(other["output_dir"]).glob("*model.safetensors")), "an unfinished run leaves no final weights"
    resumed, _ = start(other)
    assert resumed.facts.resumed_from == 5
    assert stopped.losses + resumed.losses == straight.losses
    assert_same_bits(final_weights(settings["output_dir"]), final_weights(other["output_dir"]))


def stopped_run(settings, start):
    """A finished run with checkpoints after steps 2, 4 and 6."""
    start(settings | {"save_strategy": "steps", "save_steps": 2})
    return settings | {"save_strategy": "steps", "save_steps": 2}, Path(settings["output_dir"])


def test_resume_onto_other_data_is_refused(settings, start):
    settings, _ = stopped_run(settings, start)
    with pytest.raises(UserError, match="differs in data") as caught:
        start(settings, random_table(24, seed=9, fingerprint="other"))
    assert "resume_anyway" in caught.value.problems[0].hint


def test_resume_with_other_settings_is_refused_and_named(settings, start):
    settings, _ = stopped_run(settings, start)
    with pytest.raises(UserError, match=r"learning_rate \(0.01 then, 0.02 now\)"):
        start(settings | {"learning_rate": 0.02})
    with pytest.raises(UserError, match="lora_rank"):
        start(settings | {"lora_rank": 4})


def test_resume_onto_another_base_model_of_the_same_shape_is_refused(settings, start, tmp_path):
    settings, _ = stopped_run(settings, start)
    other = save_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="differs in model"):
        start(settings | {"model_name_or_path": str(other)})


def test_resume_anyway_goes_on_and_says_so(settings, start):
    settings, _ = stopped_run(settings, start)
    recorder, _ = start(settings | {"num_train_epochs": 2.0, "resume_anyway": True})
    assert recorder.facts.resumed_from == 6
    assert any("num_train_epochs" in message for message in recorder.messages)
    assert len(recorder.steps) == 6


def test_a_damaged_checkpoint_is_passed_over(settings, start):
    settings, out = stopped_run(settings, start)
    weights = out / "checkpoint-6" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 0x40
    weights.write_bytes(content)
    recorder, _ = start(settings)
    assert recorder.facts.resumed_from == 4
    assert any("checkpoint-6" in message and "not what was written" in message for message in recorder.messages)


def test_a_named_damaged_checkpoint_is_refused(settings, start):
    settings, out = stopped_run(settings, start)
    (out / "checkpoint-4" / "optimizer.pt").unlink()
    with pytest.raises(UserError, match=r"optimizer\.pt"):
        start(settings | {"resume_from_checkpoint": str(out / "checkpoint-4")})


def test_a_weights_only_checkpoint_cannot_be_resumed_exactly(settings, start):
    settings |= {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    start(settings)
    assert not (Path(settings["output_dir"]) / "checkpoint-2" / "optimizer.pt").exists()
    with pytest.raises(UserError, match="save_only_model"):
        start(settings | {"resume_from_checkpoint": True})


def test_overwriting_removes_the_old_runs_checkpoints(settings, start):
    settings, out = stopped_run(settings, start)
    recorder, _ = start(settings | {"overwrite_output_dir": True, "save_steps": 5})
    assert recorder.facts.resumed_from == 0
    assert [f.name for f in find_checkpoints(out)] == ["checkpoint-5", "checkpoint-6"]


def test_weights_without_checkpoints_are_not_overwritten(settings, start):
    start(settings)
    with pytest.raises(UserError, match="already holds trained weights"):
        start(settings)


def test_a_non_finite_weight_is_never_kept(settings, start, monkeypatch):
    """The weights are poisoned behind the guard's back, just before they are saved."""
    from surefoot.train import loop

    apply = loop.apply_step

    def poison(run, attempt):
        apply(run, attempt)
        if attempt.check.step == 4:
            next(p for p in run.model.parameters() if p.requires_grad).data.view(-1)[0] = float("nan")

    monkeypatch.setattr(loop, "apply_step", poison)
    with pytest.raises(WorkError, match="not finite"):
        start(settings | {"save_strategy": "steps", "save_steps": 2})
    out = Path(settings["output_dir"])
    assert [f.name for f in find_checkpoints(out)] == ["checkpoint-2"]
    read_checkpoint(out / "checkpoint-2")
    assert not list(out.glob(".*.tmp")), "nothing half written stays"


def test_rotation_never_removes_the_last_whole_checkpoint(settings, start):
    settings, out = stopped_run(settings, start)
    for step in (4, 6):
        (out / f"checkpoint-{step}" / "surefoot" / "manifest.json").unlink()
    rotate(out, 1, set())
    assert [f.name for f in find_checkpoints(out)] == ["checkpoint-2"]


def test_save_total_limit_keeps_the_best(settings, start):
    settings |= {
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1,
        "load_best_model_at_end": True, "greater_is_better": True, "metric_for_best_model": "loss",
        "learning_rate": 0.05, "num_train_epochs": 2.0, "val_size": 0.1,
    }  # fmt: skip
    recorder, _ = start(settings, evals={"": random_table(6, 1)})
    out = Path(settings["output_dir"])
    best = max(recorder.evals, key=lambda event: event.loss).step
    assert recorder.result.best_step == best
    assert f"checkpoint-{best}" in [f.name for f in find_checkpoints(out)]
    assert_same_bits(final_weights(str(out)), load_file(out / f"checkpoint-{best}" / "adapter_model.safetensors"))


def test_a_full_disk_leaves_the_checkpoint_before(settings, start, monkeypatch):
    save = checkpoint_module.save_model

    def no_space(folder, model, tokenizer, **_):
        save(folder, model, tokenizer)
        if "checkpoint-4" in folder.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "save_model", no_space)
    with pytest.raises(UserError, match="disk is full"):
        start(settings | {"save_strategy": "steps", "save_steps": 2})
    out = Path(settings["output_dir"])
    assert sorted(f.name for f in out.iterdir()) == ["checkpoint-2"]


def test_the_state_is_plain_json(settings, start):
    settings, out = stopped_run(settings, start)
    state = json.loads((out / "checkpoint-4" / "surefoot" / "state.json").read_text())
    assert state["step"] == 4
    assert state["samples"] == 16


def test_what_a_killed_process_left_is_swept_and_a_replaced_checkpoint_comes_back(tmp_path):
    for name in (".checkpoint-4.7.old", ".checkpoint-6.7.old", "checkpoint-6", ".checkpoint-8.7.tmp", ".writing.7.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / ".trainer_state.json.7.tmp").touch()
    (tmp_path / ".gitignore").touch()
    checkpoint_module.sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".gitignore", "checkpoint-4", "checkpoint-6"]


def test_new_tokens_are_trained_saved_and_resumed(settings, start):
    """A grown vocabulary: its rows are part of the adapter, and a resumed run ends in the straight run's bits."""
    settings |= {"add_tokens": "[one],[two]", "save_strategy": "steps", "save_steps": 4}
    start(settings)
    out = Path(settings["output_dir"])
    straight = final_weights(str(out))
    assert any("embed_tokens" in name for name in straight)
    for name in ("checkpoint-6", "adapter_model.safetensors"):
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    resumed, _ = start(settings)
    assert resumed.facts.resumed_from == 4
    assert_same_bits(straight, final_weights(str(out)))
