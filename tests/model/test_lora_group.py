"""LoRA linears that are computed together give what each gives alone, whatever is done to one of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.model.islands import clear_island, hold_island_weights, set_island
from surefoot.model.lora import FusedLoraLinear, fuse_lora
from surefoot.model.lora_group import TOGETHER, LoraGroup, group_lora
from surefoot.model.variants import fuse_again, unfuse_lora

WIDTH, TOKENS = 16, 7


class Attention(nn.Module):
    """Queries, keys and values of one input, by which a layer is told from another only in its sizes."""

    def __init__(self, biased: tuple[str, ...]) -> None:
        super().__init__()
        for name, outputs in zip(TOGETHER, (24, 8, 16), strict=True):
            self.add_module(name, nn.Linear(WIDTH, outputs, bias=name in biased))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.get_submodule(name)(x) for name in TOGETHER], dim=-1)


class Twice(Attention):
    """Keys of another tensor than queries and values, values twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.get_submodule(name)(x * (0.5 if name == "k_proj" else 1.0)) for name in TOGETHER]
        return torch.cat([*parts, self.get_submodule("v_proj")(x)], dim=-1)


class Keyless(Attention):
    """A layer that has keys of its own and takes another's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.get_submodule(name)(x) for name in TOGETHER if name != "k_proj"], dim=-1)


def adapted(kind=Attention, biased=(), dtype=torch.float64, **settings):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    chosen: dict[str, Any] = {"r": 3, "lora_alpha": 6, "target_modules": list(TOGETHER), "init_lora_weights": False}
    config = LoraConfig(**(chosen | settings))
    model = get_peft_model(kind(biased).to(dtype), config, autocast_adapter_dtype=False)
    fuse_lora(model)
    return model


def part(model, name) -> Any:
    return model.get_submodule(f"base_model.model.{name}")


def compiled(model, groups):
    torch._dynamo.reset()
    call = torch.compile(model.base_model.model.forward, backend="aot_eager", fullgraph=True, dynamic=True)

    def run(x):
        for group in groups:
            group.look()
        return call(x)

    return run


def results(model, call=None, dtype=torch.float64, autocast=False):
    """The output, and the gradients of input and adapters."""
    torch.manual_seed(1)
    x = torch.randn(1, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = (call or model)(x)
    weights = torch.randn(y.shape, dtype=dtype)
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), wanted, allow_unused=True, materialize_grads=True)]


def same(found, wanted, bound=1e-12):
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() <= bound * theirs.norm()


def nothing_left(groups):
    return all(group._input is None and not group._ready for group in groups)


@pytest.mark.parametrize(
    ("biased", "settings"),
    [
        ((), {}),
        (TOGETHER, {"use_rslora": True}),
        (("k_proj",), {"rank_pattern": {"q_proj": 1, "v_proj": 5}, "alpha_pattern": {"k_proj": 1}}),
    ],
)
def test_together_as_alone(biased, settings):
    model = adapted(biased=biased, **settings)
    wanted = results(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (group,) = group_lora(model)
    assert [member.group for member in group.members] == [group] * 3
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    weights: list[Any] = [member.get_base_layer().weight for member in group.members]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert torch.equal(group.weight_OI, torch.cat([weight.detach() for weight in weights]))
    same(results(model, compiled(model, [group])), wanted)
    assert group.active and nothing_left([group])
    same(results(model), wanted)


@pytest.mark.parametrize(
    "settings",
    [{"target_modules": ["q_proj", "v_proj"]}, {"modules_to_save": ["k_proj"], "target_modules": ["q_proj"]}],
)
def test_without_company_each_is_alone(settings):
    model = adapted(**settings)
    wanted = results(model)
    groups = group_lora(model)
    assert [len(group.members) for group in groups] == [1] * len(settings["target_modules"])
    same(results(model, compiled(model, groups)), wanted)


@pytest.mark.parametrize("kind", [Twice, Keyless])
def test_members_with_other_inputs_or_none(kind):
    """The group's work is left aside there, and no tensor of a step outlives the next look."""
    model = adapted(kind)
    wanted = results(model)
    groups = group_lora(model)
    call = compiled(model, groups)
    for _ in range(2):
        same(results(model, call), wanted)
    groups[0].look()
    assert nothing_left(groups)


@pytest.mark.parametrize("autocast", [False, True])
def test_an_island_on_one_member(autocast):
    """It has another input than the others; with float32 weights under autocast it alone would fit the group."""
    model = adapted(dtype=torch.float32)
    groups = group_lora(model)
    call = compiled(model, groups)
    member = part(model, "k_proj")
    for place in range(3):
        if place == 1:
            set_island(member, torch.float32)
        elif place == 2:
            clear_island(member)
        ours, wanted = (results(model, how, torch.float32, autocast) for how in (call, None))
        same(ours, wanted, 3e-2 if autocast else 1e-5)
        assert groups[0].active == (place != 1) and nothing_left(groups)


def test_weights_that_lie_elsewhere_are_moved_together_again():
    """As after the guard has held a layer in float32; no second piece of memory stays."""
    model = adapted()
    (group,) = group_lora(model)
    call = compiled(model, [group])
    bases: list[Any] = [member.get_base_layer() for member in group.members]
    with torch.no_grad():
        bases[1].weight.copy_(torch.ones_like(bases[1].weight))  # as a damaged weight is mended
    same(results(model, call), results(model))
    for base in bases[1:]:
        base.weight.data = base.weight.data + 1.0
    same(results(model, call), results(model))
    assert group.active
    assert len({weight.untyped_storage().data_ptr() for weight in [group.weight_OI, *(b.weight for b in bases)]}) == 1


def test_weights_of_another_dtype():
    model = adapted(dtype=torch.bfloat16)
    (group,) = group_lora(model)
    key: Any = part(model, "k_proj")
    set_island(key, torch.float32)
    hold_island_weights(key)
    group.look()
    assert key.get_base_layer().weight.dtype == torch.float32 and not group.active
    clear_island(key)
    group.look()
    assert group.active and group.weight_OI.dtype == torch.bfloat16


def test_what_peft_computes_itself():
    model = adapted()
    groups = group_lora(model)
    call = compiled(model, groups)
    undone = unfuse_lora(part(model, "k_proj"))
    same(results(model, call), results(model))
    assert not groups[0].active
    fuse_again(undone)
    same(results(model, call), results(model))
    assert groups[0].active
    with torch.no_grad(), model.disable_adapter():
        same(
            [call(torch.ones(1, 2, WIDTH, dtype=torch.float64))], [model(torch.ones(1, 2, WIDTH, dtype=torch.float64))]
        )
    model.merge_adapter()
    x = torch.ones(1, 2, WIDTH, dtype=torch.float64)
    same([call(x).detach()], [model(x).detach()])
    model.unmerge_adapter()
    same(results(model, call), results(model))


def test_copies_and_files(tmp_path):
    """A copy is grouped anew; adapters are saved as before, and whole models without shared memory."""
    from safetensors.torch import load_file

    model = adapted()
    model.save_pretrained(tmp_path / "before")
    groups = group_lora(model)
    other = copy.deepcopy(model)
    assert not any(m.group for m in other.modules() if isinstance(m, FusedLoraLinear))
    (theirs,) = group_lora(other)
    theirs.look()
    assert theirs.active and theirs.weight_OI.data_ptr() != groups[0].weight_OI.data_ptr()
    same(results(other, compiled(other, [theirs])), results(model))
    model.save_pretrained(tmp_path / "after")
    before, after = (load_file(tmp_path / when / "adapter_model.safetensors") for when in ("before", "after"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_an_error_half_way_leaves_nothing():
    model = adapted()
    groups = group_lora(model)
    call = compiled(model, groups)
    wanted = results(model, call)
    with pytest.raises(RuntimeError):
        call(torch.ones(1, 3, WIDTH + 1, dtype=torch.float64))
    assert nothing_left(groups)
    same(results(model, call), wanted)


def test_one_group_is_of_one_kind():
    model = adapted()
    v_proj = part(model, "v_proj").get_base_layer()
    v_proj.weight.data = v_proj.weight.data.float()
    assert sorted(len(group.members) for group in group_lora(model)) == [1, 1, 1]
    assert isinstance(part(model, "v_proj").group, LoraGroup)


def test_copies_in_8_bits_follow_a_weight_that_is_read_anew():
    model = adapted(dtype=torch.bfloat16)
    (group,) = [g for g in group_lora(model, narrow=True) if len(g.members) == 3]
    assert group.narrow is not None
    weight = part(model, "k_proj").get_base_layer().weight
    before = group.narrow.w_OI.float() * group.narrow.scale_1O.T
    group.look()
    assert torch.equal(group.narrow.w_OI.float() * group.narrow.scale_1O.T, before)
    with torch.no_grad():
        weight.copy_(weight * 2)
    group.look()
    now = group.narrow.w_OI.float() * group.narrow.scale_1O.T
    torch.testing.assert_close(now[24:32], 2 * before[24:32])
    assert torch.equal(now[:24], before[:24])
