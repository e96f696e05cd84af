"""No run ends well with a number that is none; and while all is well, the guard is not there at all."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from fault_runs import Job, pattern_rows, row, save_model
from hypothesis import HealthCheck, Phase, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from plants import MARK, OptimizerPlant, add_to_loss, huge_scores, masked_ratio, poison_marked, root_of_zero

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
FULL = {"finetuning_type": "full", "lora_rank": None, "lora_target": None, "learning_rate": 1e-4}
SINGLE = {"fp16": None, "compute_dtype": "float32"}
BRAIN = {"fp16": None, "bf16": True}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("small"), dtype=torch.float32, initializer_range=0.1, **SMALL)


def same_weights(one, other):
    assert one.weights.keys() == other.weights.keys() and one.weights
    return all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


# --- a run never lies -------------------------------------------------------------------------------------------

VALUES = [float("nan"), float("inf"), float("-inf"), 3e38]


def plant_fault(
    run: Job, kind: str, place: int, step: int, value: float, patch: pytest.MonkeyPatch
) -> list[OptimizerPlant]:
    """Plant one of many faults; it strikes after `step` steps and stays, or strikes once."""
    named = list(run.model.named_parameters())
    trained = [p for _, p in named if p.requires_grad]
    frozen = [p for _, p in named if not p.requires_grad] or trained
    linears = [m for m in run.model.modules() if isinstance(m, torch.nn.Linear) and m.weight.shape[0] > 8]
    reached = [step == 0]
    run.recorder.after_step.append(lambda done: reached.append(True) if done >= step else None)

    def now() -> bool:
        return reached[-1]

    def write(tensor: torch.Tensor) -> None:
        tensor.data.view(-1)[place % tensor.numel()] = value

    if kind == "frozen weight":
        target = frozen[place % len(frozen)]
        if step == 0:
            write(target)
        run.recorder.after_step.append(lambda done: write(target) if done == step else None)
    elif kind == "trained weight":
        target = trained[place % len(trained)]
        run.recorder.after_step.append(lambda done: write(target) if done == step else None)
    elif kind in ("activation", "activation once"):
        fired: list[bool] = []

        def hook(module, args, output):
            if not now() or (kind == "activation once" and fired):
                return output
            fired.append(True)
            output = output.clone()
            output.view(-1)[place % output.numel()] = value
            return output

        linears[place % len(linears)].register_forward_hook(hook)
    elif kind == "gradient":
        target = trained[place % len(trained)]

        def bend(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            if now():
                gradient.view(-1)[place % gradient.numel()] = value
            return gradient

        target.register_hook(bend)
    elif kind == "optimizer":
        plant = OptimizerPlant(lambda call: value if call == step + 1 else 1.0)
        return [plant]
    else:
        add_to_loss(patch, {"root": root_of_zero, "ratio": masked_ratio}[kind], marked_only=bool(place % 2))
    return []


@hypothesis_settings(
    max_examples=14,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    kind=st.sampled_from(
        ["frozen weight", "trained weight", "activation", "activation once", "gradient", "optimizer", "root", "ratio"]
    ),
    place=st.integers(0, 4000),
    step=st.integers(0, 4),
    value=st.sampled_from(VALUES),
    dtype=st.sampled_from([{}, SINGLE, BRAIN]),
    tuning=st.sampled_from([{}, FULL]),
    preflight=st.booleans(),
)
@example(kind="trained weight", place=3, step=3, value=math.nan, dtype=BRAIN, tuning={}, preflight=False)
@example(kind="frozen weight", place=3, step=3, value=math.nan, dtype={}, tuning={}, preflight=False)
@example(kind="trained weight", place=3, step=3, value=math.nan, dtype=SINGLE, tuning=FULL, preflight=True)
def test_no_fault_ends_well_with_bad_weights(job, small_model, kind, place, step, value, dtype, tuning, preflight):
    rows = pattern_rows(10, length=10)
    rows[3] = row(3, [*rows[3].input_ids[:6], MARK, *rows[3].input_ids[7:]])
    flags = {"save_strategy": "steps", "save_steps": 2, "guard_preflight": preflight}
    run = job(small_model, rows, **(flags | dtype | tuning))
    with pytest.MonkeyPatch.context() as patch:
        hooks = plant_fault(run, kind, place, step, value, patch)
        try:
            outcome = run.train()  # anything but a WorkError is a crash, and fails this test
        finally:
            for hook in hooks:
                hook.remove()
    assert outcome.all_saved_finite, outcome.story()
    assert all(event.loss is None or event.loss > 0 for event in run.recorder.steps), "no made-up zero"
    for event in run.recorder.steps:
        assert event.nonfinite or (math.isfinite(event.loss) and math.isfinite(event.grad_norm))
    if outcome.error is None:
        assert outcome.weights and math.isfinite(outcome.final_loss)
        last = run.recorder.steps[-1]
        assert not last.nonfinite
    else:
        assert not outcome.weights, "a run that failed leaves no weights that look final"
        assert str(outcome.error)


# --- while all is well ------------------------------------------------------------------------------------------

HEALTHY = {
    "LoRA fp32": SINGLE | {"lora_dropout": 0.1},
    "LoRA bf16": BRAIN,
    "full fp32": SINGLE | FULL,
    "full bf16": BRAIN | FULL,
}


@pytest.mark.parametrize("how", HEALTHY)
def test_guard_off_is_guard_on_bit_for_bit_over_200_steps(job, small_model, how):
    rows = pattern_rows(16, length=10)
    runs = [
        job(small_model, rows, max_steps=200, guard=guard, **HEALTHY[how]).train() for guard in ("off", "heal")
    ]  # fmt: skip
    off, on = runs
    on.went_on(steps=200)
    assert on.events == [], on.story()
    assert same_weights(off, on)
    assert list(off.losses.values()) == list(on.losses.values())


# --- what was left out was never there --------------------------------------------------------------------------


def poisoned(rows, places):
    changed = list(rows)
    for place in places:
        changed[place] = row(place, [*rows[place].input_ids[:6], MARK, *rows[place].input_ids[7:]])
    return changed


@pytest.mark.parametrize("how", ["LoRA fp32", "full bf16"])
def test_a_poisoned_batch_was_never_there(job, small_model, how):
    """A constant rate and dropout: the whole batch goes, and the random numbers with it."""
    rows = pattern_rows(16, length=10)
    flags = HEALTHY[how] | {"disable_shuffling": True, "per_device_train_batch_size": 2}
    run, without = job(small_model, poisoned(rows, (6, 7)), **flags), job(small_model, rows[:6] + rows[8:], **flags)
    for each in (run, without):
        poison_marked(each.module("model.embed_tokens"))
    assert not run.rerun(4).loss_finite
    outcome, expected = run.train(), without.train()
    assert outcome.error is None and expected.error is None, outcome.story()
    assert {name for event in outcome.of("diagnosis") for name in event["samples"]} == {"rows:6", "rows:7"}
    assert same_weights(outcome, expected)


@pytest.mark.parametrize("how", ["LoRA bf16", "full fp32"])
def test_a_poisoned_sample_was_never_in_its_step(job, small_model, how):
    rows = pattern_rows(16, length=10)
    flags = HEALTHY[how] | {"disable_shuffling": True, "per_device_train_batch_size": 4}
    run, without = job(small_model, poisoned(rows, (15,)), **flags), job(small_model, rows[:15], **flags)
    for each in (run, without):
        poison_marked(each.module("model.embed_tokens"))
    outcome, expected = run.train(), without.train()
    assert outcome.error is None, outcome.story()
    assert outcome.diagnosis["samples"] == ["rows:15"]
    assert same_weights(outcome, expected)


def test_too_many_bad_batches_are_a_failure_and_not_a_recovery(job, small_model):
    rows = pattern_rows(24, length=10)
    run = job(small_model, poisoned(rows, range(4, 24)), disable_shuffling=True, **SINGLE)
    poison_marked(run.module("model.embed_tokens"))
    outcome = run.train()
    assert outcome.error is not None and not outcome.weights, outcome.story()


# --- through the command line -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "code"), [("range", 0), ("nan", 1)])
def test_the_exit_code_tells_the_truth(tmp_path, fault, code):
    def plant(weights):
        if fault == "range":
            huge_scores(1)(weights)
        else:
            weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")

    model = save_model(tmp_path / "model", plant=plant, initializer_range=0.1, vocab_size=300, **SMALL)
    all_bytes().save_pretrained(model)
    (tmp_path / "rows.json").write_text(
        json.dumps([{"instruction": f"say {n}", "output": f"{n} " * 4} for n in range(8)])
    )
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    settings = {
        "stage": "sft", "do_train": True, "model_name_or_path": str(model), "dataset": "rows",
        "dataset_dir": str(tmp_path), "template": "default", "fp16": True, "flash_attn": "disabled", "lora_rank": 4,
        "learning_rate": 1e-2, "per_device_train_batch_size": 2, "num_train_epochs": 1.0, "logging_steps": 1,
        "report_to": "none", "device": "cpu", "output_dir": str(tmp_path / "run"), "finetuning_type": "lora",
        "cutoff_len": 64,
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "surefoot", "train", str(tmp_path / "job.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == code, done.stderr
    log = [json.loads(line) for line in (tmp_path / "run" / "trainer_log.jsonl").read_text().splitlines()]
    assert all(entry["loss"] is None or entry["loss"] > 0.1 for entry in log if "loss" in entry)
    saved = list((tmp_path / "run").glob("*.safetensors"))
    if code:
        assert not saved and "up_proj" in done.stderr
    else:
        from safetensors.torch import load_file

        assert saved and all(bool(t.isfinite().all()) for file in saved for t in load_file(file).values())
        assert "model.layers.1.self_attn" in done.stderr


def all_bytes():
    from helpers import byte_tokenizer

    return byte_tokenizer()
