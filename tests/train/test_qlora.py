"""LoRA over 4 and 8 bit bases: whole runs, resumed runs, what is saved, and what is refused."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from helpers import random_table, save_tiny_model
from surefoot.cli.main import app
from surefoot.config import make_config
from surefoot.config.load import load_config
from surefoot.errors import UserError
from surefoot.model import quantized as quantized_module
from surefoot.model.load import load_model
from surefoot.model.tokenizer import load_tokenizer
from surefoot.train.clock import Clock

bnb = pytest.mark.skipif(
    quantized_module.importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is optional: pip install --no-deps bitsandbytes",
)
FOUR, EIGHT = {"quantization_bit": 4}, {"quantization_bit": 8}


@pytest.fixture
def half(settings, tmp_path_factory):
    """A float16 model that learns, in bfloat16, with LoRA on every linear."""
    model = save_tiny_model(tmp_path_factory.mktemp("half"), dtype=torch.float16, initializer_range=0.1)
    return settings | {"model_name_or_path": str(model), "bf16": True, "lora_rank": 4, "num_train_epochs": 2.0}


def adapter(settings):
    return load_file(Path(settings["output_dir"]) / "adapter_model.safetensors")


@bnb
@pytest.mark.parametrize("kind", [FOUR, EIGHT, FOUR | {"quantization_type": "fp4", "double_quantization": False}])
def test_a_resumed_run_is_the_straight_one(half, start, tmp_path, monkeypatch, kind):
    half |= kind | {"lora_dropout": 0.1}
    straight, _ = start(half)
    assert len(straight.losses) == 12 and straight.losses[-1] < straight.losses[0]
    other = half | {"output_dir": str(tmp_path / "stopped")}
    with monkeypatch.context() as patch:
        tell = Clock.tell
        stop = lambda event: getattr(event, "step", 0) == 5 and os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
        patch.setattr(Clock, "tell", lambda *a: (tell(*a), stop(a[2]), time.sleep(0.01)))
        stopped, _ = start(other)
    assert (stopped.result.stopped_by, stopped.result.steps) == ("signal", 5)
    resumed, _ = start(other)
    assert resumed.facts.resumed_from == 5
    assert stopped.losses + resumed.losses == straight.losses
    one, two = adapter(half), adapter(other)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@bnb
def test_a_run_over_other_bits_is_not_resumed(half, start):
    half |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    start(half | FOUR)
    with pytest.raises(UserError, match="model"):
        start(half | EIGHT | {"max_steps": 8, "resume_from_checkpoint": True})


@bnb
@pytest.mark.parametrize("kind", [FOUR, EIGHT])
def test_the_saved_adapter_is_pefts_over_any_base(half, start, kind):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    _, loaded = start(half | kind | {"compute_dtype": "float32", "bf16": False})
    loaded.model.get_base_model().set_attn_implementation(loaded.own_attention)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        ours = loaded.model.train()(ids).logits
        config = BitsAndBytesConfig(
            load_in_4bit=kind is FOUR, load_in_8bit=kind is EIGHT, bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32,
        )  # fmt: skip
        for settings in ({"quantization_config": config}, {}):
            base = AutoModelForCausalLM.from_pretrained(half["model_name_or_path"], dtype=torch.float32, **settings)
            theirs = PeftModel.from_pretrained(base, half["output_dir"]).train()(ids).logits
            bound = 1e-5 if settings else 0.6 if kind is FOUR else 0.03  # what quantising alone changes
            assert (ours - theirs).norm() <= bound * theirs.norm()


@bnb
def test_evaluation_expands_the_same_weights(half, start):
    """The set is the training's own: at a rate of 0, its loss is the mean of the steps' losses."""
    rows = random_table(8, 1)
    changes = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": "same", "learning_rate": 0.0, "max_steps": 2}
    changes |= FOUR | {"compute_dtype": "float32", "bf16": False}
    recorder, _ = start(half | changes, train=rows, evals={"": rows})
    first, both = (step.trained_tokens for step in recorder.steps)
    weights = first, both - first
    mean = sum(loss * count for loss, count in zip(recorder.losses, weights, strict=True)) / sum(weights)
    assert recorder.evals[0].loss == pytest.approx(mean, rel=1e-5)


@bnb
def test_it_trains_near_the_run_over_the_16_bit_base(half, start):
    whole, _ = start(half)
    for kind, share in ((FOUR, 0.05), (EIGHT, 0.01)):
        packed, _ = start(half | kind | {"output_dir": half["output_dir"] + str(kind["quantization_bit"])})
        assert packed.losses[-1] == pytest.approx(whole.losses[-1], rel=share)


@bnb
def test_norms_heads_and_notes_are_as_over_any_base(half):
    cfg = make_config(half | FOUR | {"upcast_layernorm": True, "additional_target": "lm_head"})
    loaded = load_model(cfg, load_tokenizer(cfg), "cpu")
    kinds = {n: p.dtype for n, p in loaded.model.named_parameters()}
    assert {dtype for name, dtype in kinds.items() if "norm" in name} == {torch.float32}
    assert {dtype for name, dtype in kinds.items() if "proj.base_layer" in name} == {torch.uint8}
    assert all(p.requires_grad == ("lora_" in n or "modules_to_save" in n) for n, p in loaded.model.named_parameters())
    assert any("4 bit weights, nf4, double quantisation" in note for note in loaded.notes)


@bnb
def test_modules_of_packed_weights_are_not_trained_whole(half):
    cfg = make_config(half | FOUR | {"additional_target": "up_proj", "lora_target": "q_proj"})
    with pytest.raises(UserError, match="additional_target: up_proj is quantised"):
        load_model(cfg, load_tokenizer(cfg), "cpu")


@bnb
@pytest.mark.parametrize(("bits", "kind"), [(None, "lora"), (8, "lora"), (None, "full")])
def test_a_checkpoint_that_is_quantised_already(half, start, tmp_path, bits, kind):
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.bfloat16,
    )  # fmt: skip
    source = half["model_name_or_path"]
    AutoModelForCausalLM.from_pretrained(source, quantization_config=config).save_pretrained(tmp_path / "packed")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "packed")
    settings = half | {"model_name_or_path": str(tmp_path / "packed"), "quantization_bit": bits}
    if kind == "full":
        with pytest.raises(UserError, match=r"finetuning_type: .* is quantised to 4 bits"):
            start(settings | {"finetuning_type": "full"})
        return
    packed, loaded = start(settings)
    straight, _ = start(half | FOUR | {"output_dir": str(tmp_path / "straight")})
    assert packed.losses[0] == straight.losses[0], "the adapter changes nothing at first, so this is the base's loss"
    assert packed.losses[-1] == pytest.approx(straight.losses[-1], rel=0.02)
    assert any("has no effect" in note for note in loaded.notes) == (bits == 8)


REFUSED = [
    (FOUR | {"finetuning_type": "full"}, "quantization_bit"),
    (FOUR | {"finetuning_type": "freeze"}, "quantization_bit"),
    ({"quantization_bit": 3}, "quantization_bit"),
    (FOUR | {"quantization_method": "hqq"}, "quantization_method"),
    (FOUR | {"quantization_method": "gptq"}, "quantization_method"),
    (FOUR | {"quantization_type": "int4"}, "quantization_type"),
    (FOUR | {"quantization_device_map": "auto"}, "quantization_device_map"),
    (FOUR | {"resize_vocab": True}, "resize_vocab"),
    (FOUR | {"add_tokens": "<a>"}, "add_tokens"),
    (FOUR | {"adapter_name_or_path": "a,b"}, "adapter_name_or_path"),
    (FOUR | {"adapter_name_or_path": "a", "create_new_adapter": True}, "create_new_adapter"),
    (FOUR | {"train_from_scratch": True}, "train_from_scratch"),
]


@pytest.mark.parametrize(("changes", "key"), REFUSED)
def test_refused_by_name(settings, tmp_path, changes, key):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(settings | changes))
    run = CliRunner().invoke(app, ["check", str(tmp_path / "job.yaml")])
    assert run.exit_code == 2 and key in run.output, run.output


def test_an_export_passes_over_the_bits(settings):
    made = load_config(
        None, ["model_name_or_path=m", "template=default", "quantization_bit=4", "export_dir=e"], "export"
    )
    assert made.quantization_bit == 4


def test_without_the_package_the_run_ends_with_the_command(half, start, monkeypatch):
    monkeypatch.setattr(quantized_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'quantization_bit: .* bitsandbytes\n.*pip install --no-deps "bitsandbytes>='):
        start(half | FOUR)
