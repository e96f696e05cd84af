"""A run on N cards: every figure against arithmetic by hand, for a Llama of 8B."""

from __future__ import annotations

import json
import math

import pytest

from surefoot.cli.check import cards_lines
from surefoot.config import make_config
from surefoot.errors import UserError
from surefoot.machine.cards import find_card
from surefoot.model.forecast import model_of
from surefoot.model.memory import GIB
from surefoot.model.scale import Known, replica, sent_bytes, shard, spread_run, to_json
from surefoot.run.check import _refuse_misfit

HIDDEN, LAYERS, INNER, KEYS, ROWS = 4096, 32, 14336, 1024, 128256
LLAMA_8B = {
    "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": INNER, "vocab_size": ROWS, "tie_word_embeddings": False,
    "dtype": "bfloat16",
}  # fmt: skip
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER  # q and o, k and v, gate, up and down
ENDS = 2 * ROWS * HIDDEN
ALL = LAYERS * LAYER + ENDS + (2 * LAYERS + 1) * HIDDEN
LENGTHS = {"longest": 1024, "mean": 256}


def config(folder, **changes):
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    settings = {"model_name_or_path": str(folder), "dataset": "d", "template": "llama3", "output_dir": "o",
                "bf16": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}  # fmt: skip
    return make_config(settings | changes)


def test_a_full_fine_tune_is_divided_by_the_cards(tmp_path):
    cfg = config(tmp_path, finetuning_type="full")
    model = model_of(cfg, cpu=False)
    assert model.trained == ALL
    assert model.trained_bytes == 16 * ALL  # float32 weights, gradients and two moments
    part = shard(model, 8)
    assert part.trained_bytes == pytest.approx(16 * ALL / 8, rel=1e-6)
    assert (
        part.frozen_bytes == 2 * (2 * LAYER + ENDS) + 4 * LAYER
    )  # two layers and the ends in bf16, a layer's gradients
    copy = replica(model)
    assert (copy.trained_bytes, copy.frozen_bytes) == (16 * ALL, 512 * 2**20)


def test_adapters_stay_whole_and_frozen_weights_are_divided(tmp_path):
    model = model_of(config(tmp_path, finetuning_type="lora", lora_rank=8), cpu=False)
    adapters = LAYERS * 8 * (2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KEYS) + 3 * (HIDDEN + INNER))
    assert model.trained == adapters
    assert model.frozen_bytes == 2 * ALL
    part = shard(model, 4)
    assert part.trained == adapters
    assert part.frozen_bytes == pytest.approx(2 * ALL / 4 + 2 * (2 * LAYER + ENDS), rel=1e-9)


def test_what_a_card_sends(tmp_path):
    lora = model_of(config(tmp_path, finetuning_type="lora", lora_rank=8), cpu=False)
    assert sent_bytes(lora, 8, sharded=False, passes=3) == 2 * 7 / 8 * 4 * lora.trained
    gathered = 2 * (LAYERS * LAYER + ENDS)
    assert sent_bytes(lora, 8, sharded=True, passes=3) == pytest.approx(
        3 * 7 / 8 * 2 * gathered + 2 * 7 / 8 * 4 * lora.trained, rel=1e-9
    )
    full = model_of(config(tmp_path, finetuning_type="full"), cpu=False)
    assert sent_bytes(full, 8, sharded=False, passes=3) == 2 * 7 / 8 * 4 * ALL
    assert sent_bytes(full, 8, sharded=True, passes=3) == pytest.approx(3 * 7 / 8 * (2 * gathered + 4 * ALL), rel=1e-9)


def test_a_run_that_fits_no_single_card_fits_sharded(tmp_path):
    cfg = config(tmp_path, finetuning_type="full")
    card = find_card("gfx90a")  # 63 GiB free; the state alone is 120 GiB
    found = spread_run(cfg, model_of(cfg, cpu=False), LENGTHS, 8, free_bytes=card.free_bytes, cpu=False)
    told = to_json(found, Known(8, card.bus_gbs(8), None, None, 2048.0, 1e6))
    assert not told["replicas"]["fits"] and "this run needs" in told["replicas"]["missing"]
    assert told["sharded"]["fits"] and told["sharded"]["memory_gib"] < 63
    assert told["bus_gbs"] is None and told["sharded"]["link_seconds_per_step"] is None
    plan = {"cards": told | {"rows_per_step": 64}}
    with pytest.raises(UserError, match="on each of 8 cards") as refused:
        _refuse_misfit(cfg, plan)
    assert "fsdp: full_shard auto_wrap" in refused.value.problems[0].hint
    lines = cards_lines(plan["cards"])
    assert "speed of their links unknown (arithmetic, not measured)" in lines[0]
    assert "does not fit" in lines[1] and "GiB a card" in lines[2] and "need --speed" in lines[3]


def test_speed_and_price_follow_from_what_was_measured_on_one_card(tmp_path):
    cfg = config(tmp_path, finetuning_type="lora", lora_rank=8)
    card = find_card("mi300x")
    assert card.bus_gbs(8) == 7 * 48
    model = model_of(cfg, cpu=False)
    found = spread_run(cfg, model, LENGTHS, 8, free_bytes=card.free_bytes, cpu=False)
    known = Known(8, card.bus_gbs(8), speed=10_000.0, price=2.0, step_tokens=2048.0, run_tokens=3.6e7)
    told = to_json(found, known)["replicas"]
    wait = 2 * 7 / 8 * 4 * model.trained / 336e9
    assert told["link_seconds_per_step"] == pytest.approx(wait, abs=1e-5)
    assert told["sent_gib_per_step"] == pytest.approx(2 * 7 / 8 * 4 * model.trained / GIB, abs=1e-4)
    pace = 8 * 2048 / (2048 / 10_000 + wait)
    assert told["tokens_per_second"] == pytest.approx(pace, abs=0.1)
    assert told["hours"] == pytest.approx(3.6e7 / pace / 3600, abs=1e-3)
    assert told["price"] == pytest.approx(told["hours"] * 8 * 2.0, abs=0.02)
    assert math.isclose(told["memory_gib"], round(found[0].plan.peak_gib(), 3))
