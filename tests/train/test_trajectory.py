"""The same trajectory: as the peer's, however samples are laid out, and however many make a micro-batch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from helpers import random_table
from surefoot.config import make_config
from surefoot.model.load import load_model
from surefoot.model.tokenizer import load_tokenizer


def weights_of(loaded) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in loaded.model.named_parameters() if p.requires_grad}


def assert_same_losses(ours, theirs, bound=1e-5):
    difference = np.abs(np.array(ours) - np.array(theirs))
    assert difference.max() <= bound, difference


def trainer_losses(cfg, model, table, tmp_path) -> list[float]:
    """The per-step losses of transformers' Trainer on the same model and rows."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": s.input_ids.tolist(), "labels": s.labels.tolist()} for s in table.samples]

    def collate(batch):
        longest = max(len(row["input_ids"]) for row in batch)
        padded = {"input_ids": [], "labels": [], "attention_mask": []}
        for row in batch:
            fill = longest - len(row["input_ids"])
            padded["input_ids"].append(row["input_ids"] + [0] * fill)
            padded["labels"].append(row["labels"] + [-100] * fill)
            padded["attention_mask"].append([1] * len(row["input_ids"]) + [0] * fill)
        return {key: torch.tensor(value) for key, value in padded.items()}

    arguments = TrainingArguments(
        output_dir=str(tmp_path / "hf"), per_device_train_batch_size=cfg.per_device_train_batch_size,
        gradient_accumulation_steps=cfg.gradient_accumulation_steps, learning_rate=cfg.learning_rate,
        num_train_epochs=cfg.num_train_epochs, lr_scheduler_type=cfg.lr_scheduler_type, warmup_steps=cfg.warmup_ratio,
        max_grad_norm=cfg.max_grad_norm, weight_decay=cfg.weight_decay, seed=cfg.seed, data_seed=cfg.seed,
        optim="adamw_torch",
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, remove_unused_columns=False,
        disable_tqdm=True, label_smoothing_factor=cfg.label_smoothing_factor,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_equals_transformers_trainer_for_20_steps(settings, start, tmp_path, kind):
    settings |= {
        "finetuning_type": kind, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "seed": 11,
        "num_train_epochs": 2.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "optim": "adamw_torch",
        "weight_decay": 0.01, "learning_rate": 5e-3,
    }  # fmt: skip
    table = random_table(40)
    cfg = make_config(settings)
    loaded = load_model(cfg, load_tokenizer(cfg), "cpu")
    peer = copy.deepcopy(loaded.model)
    (peer.get_base_model() if kind == "lora" else peer).set_attn_implementation("sdpa")
    theirs = trainer_losses(cfg, peer, table, tmp_path)
    recorder, _ = start(settings, table)
    assert len(theirs) == 20
    assert_same_losses(recorder.losses, theirs)
    assert theirs[-1] < theirs[0]  # the trajectory moves, so equality says something


@pytest.mark.parametrize("changes", [{}, {"lora_dropout": 0.0, "use_dora": True}, {"finetuning_type": "full"}])
def test_packed_equals_one_by_one(settings, start, changes):
    settings |= changes
    packed, loaded_packed = start(settings)
    single, loaded_single = start(settings | {"memory": 1, "overwrite_output_dir": True})
    assert packed.steps[0].passes == 1
    assert single.steps[0].passes == 4
    assert_same_losses(packed.losses, single.losses)
    for name, weight in weights_of(loaded_packed).items():
        torch.testing.assert_close(weights_of(loaded_single)[name], weight, rtol=1e-4, atol=1e-5)


def test_accumulation_8_of_batch_1_equals_batch_8(settings, start):
    base = settings | {"overwrite_output_dir": True}
    many, _ = start(base | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8})
    one, _ = start(base | {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1})
    assert_same_losses(many.losses, one.losses)


def test_eager_attention_equals_sdpa(settings, start):
    fused, _ = start(settings)
    eager, _ = start(settings | {"flash_attn": "disabled", "overwrite_output_dir": True})
    assert_same_losses(fused.losses, eager.losses)


def test_recompute_equals_keeping(settings, start, monkeypatch):
    kept, _ = start(settings)
    monkeypatch.setattr("surefoot.train.memory_plan.free_memory", lambda device: 0)
    again, _ = start(settings | {"overwrite_output_dir": True, "memory": 1000})
    assert any("recomputed" in message for message in again.messages)
    assert_same_losses(kept.losses, again.losses)


def test_the_model_own_logits_equal_the_chunked_loss(settings, start, monkeypatch):
    chunked, _ = start(settings)
    monkeypatch.setattr("surefoot.model.probes._head_agrees", lambda *_: False)
    whole, _ = start(settings | {"overwrite_output_dir": True})
    assert_same_losses(chunked.losses, whole.losses)


def test_same_seed_same_bits(settings, start):
    settings |= {"lora_dropout": 0.1, "neftune_noise_alpha": 5.0}
    first, one = start(settings)
    second, two = start(settings | {"overwrite_output_dir": True})
    assert first.losses == second.losses
    assert all(torch.equal(a, b) for a, b in zip(weights_of(one).values(), weights_of(two).values(), strict=True))


@pytest.mark.parametrize("flag", ["fp16", "bf16"])
def test_half_precision_follows_float32(settings, start, flag):
    exact, _ = start(settings | {"learning_rate": 1e-3})
    half, loaded = start(settings | {"learning_rate": 1e-3, flag: True, "overwrite_output_dir": True})
    assert loaded.precision.autocast == {"fp16": torch.float16, "bf16": torch.bfloat16}[flag]
    assert_same_losses(half.losses, exact.losses, bound=0.03)
    assert half.losses != exact.losses
