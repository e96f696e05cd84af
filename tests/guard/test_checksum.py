"""A flipped bit in a frozen weight is named, nothing else is, and the file mends it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from preflight_scenes import tiny, with_lora
from torch import nn

from surefoot.errors import UserError
from surefoot.guard.checksum import WeightChecksums, read_tensor, reload_tensor, word_sum
from surefoot.guard.names import leaf_name

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float64]
SHAPES = [(7,), (1,), (3, 5), (8, 16), (2, 3, 5)]


class Zoo(nn.Module):
    """Frozen tensors of every dtype and of odd and even sizes, some transposed, some inside a larger storage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for dtype in DTYPES:
            for shape in SHAPES:
                values = (torch.randn(shape) * 50).to(dtype)
                self._add(f"plain_{dtype}_{shape}", values)
            self._add(f"turned_{dtype}", (torch.randn(6, 5) * 50).to(dtype).T)
            self._add(f"inside_{dtype}", (torch.randn(40) * 50).to(dtype)[3:20])
            self._add(f"gaps_{dtype}", (torch.randn(8, 9) * 50).to(dtype)[:, ::2])
        self.trained = nn.Parameter(torch.randn(4))

    def _add(self, name: str, values: torch.Tensor) -> None:
        self.register_parameter(name.replace("torch.", "").replace(".", "_"), nn.Parameter(values, requires_grad=False))


ZOO = Zoo()
SUMS = WeightChecksums(ZOO)
FROZEN = [name for name, p in ZOO.named_parameters() if not p.requires_grad]


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    """Flip one bit of one value in a tensor's own memory."""
    index = torch.unravel_index(torch.tensor(place), tensor.shape)
    storage = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
    offset = tensor.storage_offset() + sum(int(i) * s for i, s in zip(index, tensor.stride(), strict=True))
    storage[offset * tensor.element_size() + bit // 8] ^= 1 << (bit % 8)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_single_flipped_bit_is_named_and_nothing_else(data):
    name = data.draw(st.sampled_from(FROZEN))
    tensor = ZOO.get_parameter(name).data
    place = data.draw(st.integers(0, tensor.numel() - 1))
    bit = data.draw(st.integers(0, 8 * tensor.element_size() - 1))
    flip(tensor, place, bit)
    try:
        assert SUMS.changed(ZOO) == [name]
    finally:
        flip(tensor, place, bit)
    assert SUMS.changed(ZOO) == []


def test_the_sum_is_over_the_whole_memory_and_any_layout():
    numbers = torch.arange(1, 13, dtype=torch.int64).view(3, 4)
    assert int(word_sum(numbers)) == int(word_sum(numbers.T)) == 78
    assert int(word_sum(numbers[:, ::2])) == 1 + 3 + 5 + 7 + 9 + 11
    assert int(word_sum(torch.tensor([1, 2, 250], dtype=torch.uint8))) == 253
    wide = torch.full((5_000_001,), 3, dtype=torch.int16)  # odd, and more than one chunk
    assert int(word_sum(wide)) == 15_000_003


def test_training_changes_no_frozen_sum_and_names_are_hugging_face():
    model = with_lora(tiny(dtype=torch.float16))
    sums = WeightChecksums(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    assert sums.changed(model) == []
    flip(model.get_base_model().model.layers[1].mlp.down_proj.base_layer.weight.data, 5, 14)
    assert sums.changed(model) == ["model.layers.1.mlp.down_proj.weight"]
    assert sums.changed(model) == ["model.layers.1.mlp.down_proj.weight"], "until it is mended"
    sums.renew(model)
    assert sums.changed(model) == []


def test_a_module_made_an_island_is_no_fault_but_a_flip_in_it_is():
    model = with_lora(tiny(dtype=torch.float16))
    sums = WeightChecksums(model)
    weight = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    weight.data = weight.data.float()
    assert sums.changed(model) == []
    flip(weight.data, 0, 30)
    assert sums.changed(model) == ["model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.parametrize("shards", ["1KB", "50GB"])
@pytest.mark.parametrize("held", [torch.float16, torch.float32])
def test_a_damaged_tensor_is_read_again_exactly(tmp_path, shards, held):
    base = tiny(dtype=torch.float32)
    base.save_pretrained(tmp_path, max_shard_size=shards)
    model = with_lora(base.to(held))
    sums = WeightChecksums(model)
    name = "model.layers.1.self_attn.o_proj.weight"
    weight = model.get_base_model().model.layers[1].self_attn.o_proj.base_layer.weight
    before, identity = weight.detach().clone(), id(weight)
    flip(weight.data, 9, 12)
    weight.data[2, 3] = math.nan
    assert reload_tensor(model, sums.changed(model)[0], tmp_path)
    assert torch.equal(weight, before) and weight.dtype == held and id(weight) == identity
    assert sums.changed(model) == []
    assert read_tensor(tmp_path, name)[0].suffix == ".safetensors"


def test_a_longer_or_shorter_prefix_in_the_file_is_understood(tmp_path):
    from safetensors.torch import load_file, save_file

    model = tiny().requires_grad_(False)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    norm = model.model.norm.weight
    for rename in (lambda n: f"language.{n}", lambda n: n.removeprefix("model.")):
        save_file({rename(name): tensor for name, tensor in stored.items()}, file)
        norm.data.fill_(7.0)
        assert reload_tensor(model, "model.norm.weight", tmp_path)
        assert torch.equal(norm, stored["model.norm.weight"])


def test_what_no_file_holds_is_left_alone(tmp_path):
    model = tiny().requires_grad_(False)
    model.save_pretrained(tmp_path)
    embedding = model.model.embed_tokens.weight
    model.resize_token_embeddings(128)
    embedding = model.model.embed_tokens.weight
    embedding.data[100] = 5.0
    grown = embedding.detach().clone()
    assert not reload_tensor(model, "model.embed_tokens.weight", tmp_path)
    assert torch.equal(embedding, grown)
    assert not reload_tensor(model, "model.layers.9.mlp.up_proj.weight", tmp_path)
    assert not reload_tensor(model, "model.norm.weight", "some-hub/id")
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="not a whole safetensors file"):
        reload_tensor(model, "model.norm.weight", tmp_path)


def test_a_file_that_holds_other_numbers_does_not_overwrite_a_merged_weight(tmp_path):
    """An adapter was merged after loading: the file's tensor is not what the model had."""
    model = tiny().requires_grad_(False)
    model.save_pretrained(tmp_path)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data += 0.25
    sums = WeightChecksums(model)
    flip(weight.data, 3, 30)
    damaged = weight.detach().clone()
    (name,) = sums.changed(model)
    assert not sums.reload(model, name, tmp_path)
    assert torch.equal(weight, damaged)
    norm = model.model.norm.weight
    flip(norm.data, 3, 30)
    assert sums.reload(model, "model.norm.weight", tmp_path)
    assert sums.changed(model) == [name]


def test_trained_copies_are_not_taken_for_the_frozen_weight():
    model = with_lora(tiny(tie_word_embeddings=False), target_modules=["q_proj"], modules_to_save=["lm_head"])
    frozen = [leaf_name(n) for n, p in model.named_parameters() if not p.requires_grad]
    assert "lm_head.weight" in frozen
    sums = WeightChecksums(model)
    flip(model.get_base_model().lm_head.original_module.weight.data, 1, 30)
    assert sums.changed(model) == ["lm_head.weight"]
