"""The plan of a run's memory: pure arithmetic, its counts against real models, its choices against their budget."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any, get_args

import pytest
import torch

from helpers import save_tiny_model
from surefoot.config import make_config
from surefoot.errors import UserError
from surefoot.model import loss
from surefoot.model.activations import Numerics
from surefoot.model.forecast import count_trained, forecast, formats
from surefoot.model.memory import (
    GIB,
    LOSS_CHUNK_BYTES,
    LOSS_CHUNK_ROWS,
    OPTIMIZER_BYTES,
    SPENT_SHARE,
    Choice,
    MemoryModel,
    make_plan,
)
from surefoot.model.precision import DTYPES, choose_precision
from surefoot.model.shapes import read_shapes
from surefoot.train.optimizer import build_optimizer
from variant_models import FAMILIES, tiny

LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def lora_8b(**changes: Any) -> MemoryModel:
    shapes = read_shapes(LLAMA_8B)
    names = frozenset(x.name for x in shapes.linears)
    numerics = Numerics(compute=2, stream=2, weight=2, whole=False, adapted=names, rank=16, **changes)
    trained = shapes.layers * sum(16 * (x.inputs + x.outputs) for x in shapes.linears)
    return MemoryModel(shapes, numerics, 2 * shapes.parameters, trained, 8, shapes.layers)


def full_1b() -> MemoryModel:
    shapes = read_shapes(LLAMA_1B)
    numerics = Numerics(compute=2, stream=4, weight=4, whole=True)
    return MemoryModel(shapes, numerics, 0, shapes.parameters, 8, shapes.layers, trained_head=True)


@pytest.mark.parametrize(
    ("compiled", "tokens", "longest", "measured"),
    [(False, 16384, 4096, 111.0), (False, 2537, 1024, 31.15), (True, 16384, 4096, 85.1), (True, 2560, 1024, 29.3)],
)
def test_peaks_as_measured_on_an_h200(compiled, tokens, longest, measured):
    peak = lora_8b(compiled=compiled).peak_bytes(tokens, Choice(), longest, passes=1) / GIB
    assert peak == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("family", sorted(set(FAMILIES)))
def test_counts_are_those_of_the_model(family):
    model = tiny(family, intermediate_size=24) if "m" in family and "x" in family else tiny(family)
    # GPT-NeoX has no key heads of its own, but its tiny configuration carries their number.
    shapes = read_shapes(model.config.to_dict() | ({"num_key_value_heads": 4} if family == "neox" else {}))
    counted = sum(p.numel() for name, p in model.named_parameters() if not name.endswith("bias"))
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert abs(shapes.parameters - counted) <= norms  # of norms with a bias a part is left out
    assert {x.name for x in shapes.linears} <= {name.rpartition(".")[2] for name, _ in model.named_modules()}
    assert shapes.tied == (model.get_input_embeddings().weight is model.get_output_embeddings().weight)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("plan"))
    (folder / "only").mkdir()
    (folder / "only" / "config.json").write_text((folder / "config.json").read_text())
    return folder


def config(folder: Any, **changes: Any) -> Any:
    settings = {
        "model_name_or_path": str(folder), "dataset": "rows", "template": "default", "output_dir": f"{folder}/out",
        "finetuning_type": "lora",
    }  # fmt: skip
    return make_config(settings | changes)


@pytest.mark.parametrize(
    "changes",
    [{}, {"lora_target": "q_proj,down_proj", "lora_rank": 3}, {"finetuning_type": "full"},
     {"finetuning_type": "freeze", "freeze_trainable_layers": 1}, {"additional_target": "lm_head"}],
)  # fmt: skip
def test_trained_numbers_are_those_that_training_would_mark(folder, changes):
    from surefoot.model.adapters import prepare_trainables
    from surefoot.model.load import read_weights
    from surefoot.model.source import model_config

    cfg = config(folder, **changes)
    model = prepare_trainables(read_weights(cfg, model_config(cfg), None), cfg, torch.float32, resized=False)
    trained = sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and "norm" not in name)
    assert count_trained(cfg, read_shapes(json.loads((folder / "config.json").read_text()))) == pytest.approx(
        trained, rel=0.005
    )


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("changes", [{}, {"bf16": True}, {"fp16": True}, {"compute_dtype": "float32"}])
def test_formats_are_those_that_loading_chooses(folder, stored, changes):
    cfg = config(folder, **changes)
    precision = choose_precision(cfg, DTYPES[stored])
    weight = precision.load or DTYPES[stored]
    assert formats(cfg, stored) == (weight.itemsize, (precision.autocast or weight).itemsize)


def test_constants_are_those_of_what_they_speak_of():
    assert (LOSS_CHUNK_BYTES, LOSS_CHUNK_ROWS) == (loss.CHUNK_BYTES, loss.MIN_CHUNK_ROWS)
    for name, each in OPTIMIZER_BYTES.items():
        linear = torch.nn.Linear(64, 64, bias=False)
        cfg = config("m", optim=name)
        optimizer = build_optimizer(linear, cfg)
        linear(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        state = [value for value in optimizer.state[linear.weight].values() if isinstance(value, torch.Tensor)]
        assert sum(value.nbytes for value in state) / 64**2 == pytest.approx(each, abs=0.2), name


def test_nothing_is_recomputed_where_all_fits_and_passes_are_whole_steps():
    plan = make_plan(lora_8b(compiled=True), free_bytes=140 * GIB, longest=4096, step_tokens=16384)
    assert (plan.tokens_per_pass, plan.choice, plan.passes) == (16384, Choice(), 1)


def test_smaller_passes_come_before_recompute():
    """Four passes cost a few percent; to compute 24 GiB's worth of layers again costs more than a quarter."""
    model = lora_8b(compiled=True)
    room = (model.frozen_bytes + 24 * GIB) / SPENT_SHARE
    plan = make_plan(model, free_bytes=room, longest=4096, step_tokens=16384)
    assert 4096 <= plan.tokens_per_pass < 16384 and not plan.recompute
    fixed = make_plan(model, free_bytes=room, longest=4096, step_tokens=16384, tokens=16384)
    assert fixed.tokens_per_pass == 16384 and fixed.recompute and fixed.peak_gib() * GIB <= SPENT_SHARE * room


def test_plans_fit_and_more_memory_never_costs_more():
    draw = random.Random(0)
    for _ in range(40):
        model = draw.choice([lora_8b(compiled=True), lora_8b(), lora_8b(dropout=True), full_1b()])
        longest = draw.choice([256, 2048, 8192])
        step, costs = longest * draw.choice([1, 4, 16]), []
        smallest = model.peak_bytes(longest, Choice(model.alive_layers, 0, offload=True), longest) / SPENT_SHARE
        for free in sorted(smallest * (1 + draw.random() ** 2 * 5) for _ in range(6)):
            plan = make_plan(model, free_bytes=free, longest=longest, step_tokens=step)
            assert longest <= plan.tokens_per_pass <= step
            assert plan.peak_gib() * GIB <= SPENT_SHARE * free * (1 + 1e-9)
            assert plan.choice.layers + plan.choice.mlps <= model.alive_layers
            costs.append(model.cost(plan.tokens_per_pass, plan.choice, step))
        assert costs == sorted(costs, reverse=True)


def test_the_host_is_used_only_where_nothing_else_fits():
    model, longest = lora_8b(compiled=True), 65536
    all_layers, host = (model.peak_bytes(longest, Choice(32, 0, offload=o), longest, passes=1) for o in (False, True))
    assert host < all_layers
    free = (host + all_layers) / 2 / SPENT_SHARE
    assert make_plan(model, free_bytes=free, longest=longest, step_tokens=longest).choice == Choice(32, 0, offload=True)
    # One layer at a time is alive as a whole: the last one may as well be kept.
    enough = all_layers / SPENT_SHARE * 1.001
    assert make_plan(model, free_bytes=enough, longest=longest, step_tokens=longest).choice == Choice(31)
    with pytest.raises(UserError):  # kept activations cannot wait in a CPU's own memory
        make_plan(model, free_bytes=host * 0.99, longest=longest, step_tokens=longest)


def test_what_does_not_fit_is_refused_with_what_is_missing_and_what_helps():
    with pytest.raises(UserError, match=r"needs 1\d\.\d GiB and 8\.0 GiB are free: \d+\.\d GiB are missing") as found:
        make_plan(lora_8b(), free_bytes=8 * GIB, longest=1024, step_tokens=1024)
    assert "quantization_bit: 4" in str(found.value) and found.value.exit_code == 2
    with pytest.raises(UserError, match="finetuning_type: lora"):
        make_plan(full_1b(), free_bytes=8 * GIB, longest=1024, step_tokens=1024)
    forced = make_plan(lora_8b(), free_bytes=8 * GIB, longest=1024, step_tokens=1024, tokens=1024)
    assert forced.choice.layers == 32  # the person's own number is tried, as thriftily as can be


def test_layers_are_never_recomputed_against_the_yaml():
    model = lora_8b()
    free = model.peak_bytes(8192, Choice(16), 8192) / SPENT_SHARE
    assert make_plan(model, free_bytes=free, longest=8192, step_tokens=8192).recompute
    with pytest.raises(UserError):
        make_plan(model, free_bytes=free, longest=8192, step_tokens=8192, may_recompute=False)


def test_a_forecast_reads_config_json_alone_and_loads_no_torch(folder):
    code = (
        "import sys\nfrom surefoot.config import make_config\nfrom surefoot.model.forecast import forecast\n"
        f"cfg = make_config({{'model_name_or_path': {str(folder / 'only')!r}, 'dataset': 'd', 'template': 'default',"
        "'output_dir': 'o', 'finetuning_type': 'lora'})\n"
        "plan = forecast(cfg, {'longest': 100, 'mean': 50}, free_bytes=2**30, cpu=False)\n"
        "print(plan.tokens_per_pass, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert outcome.stdout.split(maxsplit=1)[1:] == ["[]\n"], outcome.stderr


def test_a_config_without_sizes_is_refused(folder, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="lacks a size"):
        forecast(config(tmp_path), {"longest": 9, "mean": 9}, free_bytes=GIB, cpu=True)


def test_4_bit_weights_are_counted_packed(folder):
    from surefoot.model.quantized import quantized_bytes_per_parameter

    wide = read_shapes(LLAMA_8B)
    (folder / "8b").mkdir(exist_ok=True)
    (folder / "8b" / "config.json").write_text(json.dumps(LLAMA_8B | {"dtype": "bfloat16"}))
    lengths = {"longest": 512, "mean": 512}
    cfg = config(folder / "8b", quantization_bit=4, bf16=True)
    plan = forecast(cfg, lengths, free_bytes=80 * GIB, cpu=False)
    packed = wide.layers * wide.layer_linears * quantized_bytes_per_parameter(4, True)
    rest = 2 * (wide.parameters - wide.layers * wide.layer_linears)
    assert plan.model.frozen_bytes == pytest.approx(packed + rest, rel=0.001)
    assert plan.model.frozen_bytes / GIB == pytest.approx(5.3, abs=0.3)


def test_all_optimizers_that_the_keys_accept_are_known():
    from surefoot.config.schema import Config

    kinds = get_args(Config.model_fields["optim"].annotation)
    assert not kinds or set(kinds) >= set(OPTIMIZER_BYTES)
