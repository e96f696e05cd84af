"""Data, masks, normalisers and expressions: what no number format can cure (R7 to R11, R18, R22, R26)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fault_runs import close, pattern_rows, row
from plants import MARK, OnceHook, add_to_loss, masked_ratio, mean_of_means, poison_marked, root_of_zero

from surefoot.data.messages import IGNORE_INDEX, Sample
from surefoot.errors import UserError, WorkError

ROWS = pattern_rows(16)
IN_ORDER = {"disable_shuffling": True}


def marked(index, rows=ROWS):
    """The rows, with the mark in one of them."""
    changed = list(rows)
    changed[index] = row(index, [*rows[index].input_ids[:10], MARK, *rows[index].input_ids[11:]])
    return changed


def unlabelled(sample):
    return Sample(sample.row_ids, sample.input_ids, np.full_like(sample.labels, IGNORE_INDEX), sample.segments)


def same_weights(one, other):
    assert one.weights.keys() == other.weights.keys()
    return all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@pytest.mark.parametrize("flags", [{}, {"fp16": None, "compute_dtype": "float32"}])
def test_r7_an_infinite_slope_in_every_batch_stops(job, monkeypatch, flags):
    """Each step is skipped with its message; as all are, the run fails instead of learning nothing."""
    add_to_loss(monkeypatch, root_of_zero)
    run = job(**flags)
    for scale in (1.0, 2.0**16):
        seen = run.rerun(loss_scale=scale)
        assert seen.loss_finite and not seen.finite
    outcome = run.train()
    assert isinstance(outcome.error, WorkError), outcome.story()
    found = outcome.of("diagnosis")[0]
    got = {key: found[key] for key in ("class", "module", "op", "phase", "place")}
    assert got == {"class": "MATH", "module": None, "op": "div", "phase": "backward", "place": "loss"}, outcome.story()
    assert not outcome.changes, "precision must never be prescribed for mathematics"
    assert outcome.all_saved_finite


def test_r7_in_one_batch_skips_that_batch_and_names_it(job, monkeypatch):
    add_to_loss(monkeypatch, root_of_zero, marked_only=True)
    run = job(rows=marked(9), **IN_ORDER)
    assert [step for step in range(1, 9) if not run.rerun(step).finite] == [5]
    outcome = run.train()
    outcome.says("MATH", module=None, op="div", phase="backward", place="loss", step=5)
    assert "rows:9" in outcome.diagnosis["samples"] and set(outcome.diagnosis["samples"]) <= {"rows:8", "rows:9"}
    assert outcome.error is None, outcome.story()
    assert not outcome.changes and outcome.all_saved_finite and outcome.weights


def test_r8_a_batch_without_a_trained_token(job):
    """Such a step has no loss at all here (nothing is divided by zero): it is dropped, named, and the run goes on."""
    rows = [unlabelled(sample) if index in (6, 7) else sample for index, sample in enumerate(ROWS)]
    outcome = job(rows=rows, **IN_ORDER).train()
    assert outcome.error is None, outcome.story()
    found = [event for event in outcome.events if event["class"] == "DATA"]
    assert found and {name for event in found for name in event["samples"]} == {"rows:6", "rows:7"}, outcome.story()
    without = job(rows=[*ROWS[:6], *ROWS[8:]], **IN_ORDER).train()
    assert same_weights(outcome, without), "the batch must not have moved anything"
    assert not outcome.changes


def test_r8_a_table_without_a_trained_token_is_refused_or_fails(job):
    run = job(rows=[unlabelled(sample) for sample in ROWS])
    try:
        outcome = run.train()
    except UserError:
        return
    assert outcome.error is not None and not outcome.weights, outcome.story()


def test_r9_one_pass_without_labels_changes_no_normaliser(job):
    """The product never takes a mean of means, so the plant cannot be made: the pass adds nothing to a token mean.

    A mean of means would have given NaN here, and with one labelled pass of two, twice the gradient.
    """
    rows = [unlabelled(sample) if index % 2 else sample for index, sample in enumerate(ROWS)]
    passes = {"memory": 24, "compute_dtype": "float32", "fp16": None}
    split, whole = job(rows=rows, **IN_ORDER, **passes), job(rows=rows, **IN_ORDER, **(passes | {"memory": "auto"}))
    assert split.rerun(tokens_per_pass=24).losses == pytest.approx(whole.rerun().losses, rel=1e-5)
    split_run, whole_run = split.train(), whole.train()
    split_run.went_on(steps=8)
    assert not split_run.of("alarm")
    assert list(split_run.losses.values()) == pytest.approx(list(whole_run.losses.values()), rel=1e-3)


def test_r10_an_id_beyond_the_vocabulary_is_refused_before_training(job):
    rows = list(ROWS)
    rows[5] = row(5, [*rows[5].input_ids[:8], 97, *rows[5].input_ids[9:]])
    run = job(rows=rows)
    with pytest.raises(UserError, match=r"row rows:5 has token id 97, but the model has 97 embedding rows"):
        run.train()
    assert not run.recorder.steps


def test_r11_a_mask_that_empties_a_row(job, monkeypatch):
    """The model's own eager attention with a mask of -inf in which two rows see nothing, as left padding makes.

    Packed attention ignores masks, so the model is switched back to its own attention; rows then run alone.
    """
    from transformers.models.qwen2 import modeling_qwen2

    def left_padded(config=None, inputs_embeds=None, **_):
        length = inputs_embeds.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        allowed[:, :2] = False
        mask = torch.zeros(1, 1, length, length, dtype=inputs_embeds.dtype)
        return mask.masked_fill(~allowed, float("-inf"))

    monkeypatch.setattr(modeling_qwen2, "create_causal_mask", left_padded)
    run = job(fp16=None, compute_dtype="float32")
    run.loaded.model.get_base_model().set_attn_implementation("eager")
    scene = run.scene(tokens_per_pass=1)
    scene.forward.packs = False
    assert not scene.rerun().loss_finite
    outcome = run.train()
    found = outcome.of("diagnosis")[0]
    got = {key: found[key] for key in ("class", "module", "op", "phase", "place")}
    assert got == {
        "class": "DATA", "module": "model.layers.0.self_attn", "op": "_softmax", "phase": "forward",
        "place": "attention mask",
    }, outcome.story()  # fmt: skip
    assert not any(change["kind"] in ("island", "region", "float32") for change in outcome.changes)
    assert outcome.error is not None or outcome.all_saved_finite


def test_r18_passes_of_unequal_length_count_by_their_tokens(job):
    rows = pattern_rows(16, unequal=True)
    run = job(rows=rows, fp16=None, compute_dtype="float32", per_device_train_batch_size=4)
    together, apart = (run.scene(tokens_per_pass=n).rerun(keep_grads=True) for n in (10_000, 24))
    assert len(together.losses) == 1 and len(apart.losses) == 4
    assert apart.loss == pytest.approx(together.loss, rel=1e-5)
    error = max(float((apart.grads[n] - g).norm() / g.norm().clamp_min(1e-6)) for n, g in together.grads.items())
    assert error < 1e-3


def test_r18_a_mean_of_means_is_seen_before_step_1(job, monkeypatch):
    """The plant makes every pass count the same: gradients differ by how the rows are laid out in passes."""
    mean_of_means(monkeypatch, tokens=20)
    rows = pattern_rows(16, unequal=True)
    run = job(rows=rows, fp16=None, compute_dtype="float32", memory=24, per_device_train_batch_size=4)
    together, apart = (run.scene(tokens_per_pass=n).rerun() for n in (10_000, 24))
    assert apart.loss != pytest.approx(together.loss, rel=1e-2)
    outcome = run.train()
    (found,) = [event for event in outcome.of("preflight") if event["place"] == "normaliser"]
    assert found["class"] == "DATA"
    assert not outcome.changes


@pytest.mark.parametrize("way", ["write", "add", "multiply", "literal", "outside", "infinity"])
def test_r22_a_poisoned_sample_is_named_and_left_out(job, way):
    """The last step of two epochs holds the bad row; without it the table gives the same steps, that one shorter."""
    flags = IN_ORDER | {"num_train_epochs": 2.0}
    run, without = job(rows=marked(15), **flags), job(rows=ROWS[:15], **flags)
    for each in (run, without):
        poison_marked(each.module("model.embed_tokens"), way)
    assert [step for step in range(1, 9) if not run.rerun(step).loss_finite] == [8]
    outcome, expected = run.train(), without.train()
    first = outcome.of("diagnosis")[0]
    assert (first["class"], first["phase"], first["samples"]) == ("DATA", "forward", ["rows:15"]), outcome.story()
    assert outcome.error is None and not outcome.changes, outcome.story()
    assert expected.events == [] and same_weights(outcome, expected)


def test_r22_a_fault_that_happens_once_is_transient_and_costs_nothing(job):
    run, clean = job(lora_dropout=0.1), job(lora_dropout=0.1).train()
    hook = OnceHook(run.module("model.layers.2.mlp"), float("nan"))
    run.recorder.after_step.append(lambda step: hook.arm() if step == 4 and not hook.fired else None)
    outcome = run.train()
    assert hook.fired == 1
    outcome.says("TRANSIENT", step=5, phase="forward")
    outcome.went_on(steps=8)
    assert not outcome.changes and same_weights(outcome, clean)


def test_r26_an_unselected_branch_that_overflows(job, monkeypatch):
    add_to_loss(monkeypatch, masked_ratio, marked_only=True)
    run = job(rows=marked(9), fp16=None, compute_dtype="float32", **IN_ORDER)
    seen = run.rerun(5)
    assert seen.loss_finite and not any(np.isfinite(peak) for peak in seen.peaks.values())
    outcome = run.train()
    outcome.says("MATH", module=None, op="exp", phase="forward", place="loss", step=5)
    assert "ExpBackward0" in str(outcome.diagnosis), outcome.story()
    assert outcome.error is None and not outcome.changes and outcome.all_saved_finite
    assert close(outcome.final_loss, job(fp16=None, compute_dtype="float32", **IN_ORDER).train().final_loss, 0.2)
