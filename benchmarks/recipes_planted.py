"""The recipes of `tests/faults` for any seed: where each fault is planted, what must be said of it, how it must end.

A seed gives the model's weights, the rows, the order of the data and, where it makes sense, another layer, row,
tensor, dtype or way of doing the same harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fault_runs import VOCABULARY, Job
from plants import (
    MARK,
    OnceHook,
    OptimizerPlant,
    Unwritten,
    add_to_loss,
    break_compiled,
    break_fused_attention,
    element,
    flip_bit,
    huge_product,
    huge_scores,
    huge_stream,
    masked_ratio,
    mean_of_means,
    noisy_rows,
    poison_marked,
    replace_norm,
    root_of_zero,
    scaled,
)
from recipes_lab import (
    SINGLE,
    Case,
    Expected,
    Lab,
    halve_trained,
    once,
    start_scale_at,
    weight_of,
    with_token,
    without_labels,
)

DTYPES: tuple[dict[str, Any], ...] = ({}, {"fp16": None, "bf16": True}, SINGLE)
IN_ORDER = {"disable_shuffling": True}
LONG_RUN = SINGLE | {"max_steps": 60, "learning_rate": 3e-3}
AT = 40  # of a long run: what is planted strikes after this step
PROJECTIONS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


# --- number range -----------------------------------------------------------------------------------------------


def r1(lab: Lab) -> Case:
    layer = lab.layer(2)
    model = lab.model(huge_scores(layer))
    expected = Expected(("RANGE",), f"model.layers.{layer}.self_attn", "bmm", "forward")
    return Case(lab.job(model), expected, lab.in_float32(model))


def r2(lab: Lab, shrink: float = 1.0) -> Case:
    layer = lab.layer(1)
    model = lab.model(huge_product(layer, shrink=shrink))
    expected = Expected(("RANGE",), f"model.layers.{layer}.mlp", "mul", "forward")
    return Case(lab.job(model), expected, lab.in_float32(model))


def r2_fits(lab: Lab) -> Case:
    return r2(lab, shrink=1e-3)


def r3(lab: Lab) -> Case:
    first, second = lab.pick([(0, 1), (1, 3), (0, 2), (2, 3), (1, 2)])
    model = lab.model(huge_stream(first, second), "llama", mlp_bias=True, attention_bias=True)
    return Case(lab.job(model), Expected(("RANGE",), f"model.layers.{second}", "add", "forward"), lab.in_float32(model))


def r4(lab: Lab) -> Case:
    name = f"layers.{lab.layer(1)}.{lab.pick(('input_layernorm', 'post_attention_layernorm'))}"
    model = lab.model(scaled("model.embed_tokens.weight", 2000.0))
    job, reference = lab.job(model), lab.job(model, **SINGLE, guard="off")
    for each in (job, reference):
        replace_norm(each.module("model"), name)
    return Case(job, Expected(("RANGE",), f"model.{name}", "mul", "forward"), reference.train())


def r5(lab: Lab) -> Case:
    token = 40 + 7 * (lab.seed % 5)
    model = lab.model(element("model.embed_tokens.weight", 0.0, token))
    rows = with_token(lab.rows(), lab.pick((0, 5, 11, 14, 3)), token, 20)
    job, reference = lab.job(model, rows), lab.job(model, rows, **SINGLE, guard="off")
    for each in (job, reference):
        replace_norm(each.module("model"), "layers.0.input_layernorm", eps=1e-8)
    expected = Expected(("RANGE",), "model.layers.0.input_layernorm", "rsqrt", "forward")
    return Case(job, expected, reference.train())


def r6(lab: Lab) -> Case:
    model = lab.model(scaled("lm_head.weight", 2.0))
    reference = lab.job(model).train()
    start_scale_at(lab, 2.0**24)
    return Case(lab.job(model), Expected(("SCALE",), None, "_to_copy", "backward"), reference)


def r24(lab: Lab) -> Case:
    reference = lab.job().train()
    start_scale_at(lab, 2.0 ** lab.pick((-140, -149, -130, -145, -135)))
    return Case(lab.job(), Expected(("SCALE",), phase="backward"), reference)


# --- data, masks, mathematics -----------------------------------------------------------------------------------


def r7_always(lab: Lab) -> Case:
    add_to_loss(lab.patch, root_of_zero)
    return Case(lab.job(**lab.pick(DTYPES)), Expected(("MATH",), None, "div", "backward", ends="stops"))


def r7_one_batch(lab: Lab) -> Case:
    flags, index = IN_ORDER | lab.pick(DTYPES), lab.pick((9, 4, 11, 2, 7))
    rows = with_token(lab.rows(), index, MARK)
    reference = lab.healthy(rows=without_labels(rows, [index]), **flags)
    add_to_loss(lab.patch, root_of_zero, marked_only=True)
    return Case(lab.job(rows=rows, **flags), Expected(("MATH",), None, "div", "backward"), reference)


def r8(lab: Lab) -> Case:
    first = lab.pick((6, 2, 8, 4, 10))
    rows = lab.rows()
    reference = lab.healthy(rows=[*rows[:first], *rows[first + 2 :]], **IN_ORDER)
    job = lab.job(rows=without_labels(rows, (first, first + 1)), **IN_ORDER)
    return Case(job, Expected(("DATA",), None, "div", "forward"), reference)


def r9(lab: Lab) -> Case:
    rows = without_labels(lab.rows(), range(lab.seed % 2, 16, 2))
    flags = IN_ORDER | SINGLE
    return Case(lab.job(rows=rows, **flags, memory=24), Expected(("none",)), lab.healthy(rows=rows, **flags))


def r10(lab: Lab) -> Case:
    index = lab.pick((5, 0, 15, 8, 12))
    told = f"rows:{index} has token id {VOCABULARY}"
    return Case(
        lab.job(rows=with_token(lab.rows(), index, VOCABULARY)), Expected(("refused",), ends="stops", told=told)
    )


def r11(lab: Lab) -> Case:
    from transformers.models.qwen2 import modeling_qwen2

    hidden = lab.pick((2, 1, 3, 4, 2))

    def left_padded(fill: float) -> Callable[..., torch.Tensor]:
        def mask(config: Any = None, inputs_embeds: Any = None, **_: Any) -> torch.Tensor:
            length = inputs_embeds.shape[1]
            allowed = torch.ones(length, length, dtype=torch.bool).tril()
            allowed[:, :hidden] = False
            zeros = torch.zeros(1, 1, length, length, dtype=inputs_embeds.dtype)
            return zeros.masked_fill(~allowed, fill)

        return mask

    def job(fill: float, **changes: Any) -> Job:
        lab.patch.setattr(modeling_qwen2, "create_causal_mask", left_padded(fill))
        made = lab.job(model, **SINGLE, memory=24, **changes)  # a row a pass: the mask knows of one only
        made.loaded.model.get_base_model().set_attn_implementation("eager")
        return made

    model = lab.model()
    # Emptied rows carry no label and nothing sees them, so any finite filling gives the same losses.
    reference = job(torch.finfo(torch.float32).min, guard="off").train()
    expected = Expected(("DATA",), "model.layers.0.self_attn", "_softmax", "forward")
    return Case(job(float("-inf")), expected, reference)


def r18(lab: Lab) -> Case:
    rows = lab.rows(unequal=True)
    flags = SINGLE | {"memory": 24, "per_device_train_batch_size": 4}
    mean_of_means(lab.patch, tokens=20)
    return Case(lab.job(rows=rows, **flags), Expected(("DATA",), None, ends="stops"))


def r22(lab: Lab) -> Case:
    way = lab.pick(("write", "literal", "multiply", "outside", "infinity"))
    index = lab.pick((15, 13, 9, 11, 7))
    flags = IN_ORDER | {"num_train_epochs": 2.0} | lab.pick(DTYPES)
    rows = with_token(lab.rows(), index, MARK)
    reference = lab.healthy(rows=without_labels(rows, [index]), **flags)
    job = lab.job(rows=rows, **flags)
    poison_marked(job.module("model.embed_tokens"), way)
    return Case(job, Expected(("DATA",), phase="forward"), reference)


def r22_once(lab: Lab) -> Case:
    flags = {"lora_dropout": 0.1} | lab.pick(DTYPES)
    job, reference = lab.job(**flags), lab.healthy(**flags)
    place = lab.pick(("mlp", "self_attn.o_proj", "mlp.down_proj", "self_attn.v_proj", "input_layernorm"))
    hook = OnceHook(job.module(f"model.layers.{lab.layer(2)}.{place}"), float("nan"))
    once(job, 4, hook.arm)
    return Case(job, Expected(("TRANSIENT",), phase="forward"), reference)


def r26(lab: Lab) -> Case:
    flags, index = IN_ORDER | lab.pick(DTYPES[::-1]), lab.pick((9, 4, 11, 2, 7))
    rows = with_token(lab.rows(), index, MARK)
    reference = lab.healthy(rows=without_labels(rows, [index]), **flags)
    add_to_loss(lab.patch, masked_ratio, marked_only=True)
    return Case(lab.job(rows=rows, **flags), Expected(("MATH",), None, "exp", "forward"), reference)


# --- kernels ----------------------------------------------------------------------------------------------------


def r21(lab: Lab) -> Case:
    flags = {"flash_attn": "sdpa"} | lab.pick(DTYPES)
    rows, layer = lab.rows(8, length=100), lab.layer(2)
    reference = lab.healthy(rows=rows, **flags)
    job = lab.job(rows=rows, **flags)
    break_fused_attention(lab.patch, [job.module(f"model.layers.{layer}.self_attn")])
    return Case(job, Expected(("KERNEL",), f"model.layers.{layer}.self_attn", "BugBackward", "backward"), reference)


def r21_compiled(lab: Lab) -> Case:
    rows, layer = lab.rows(8), lab.layer(1)
    reference = lab.healthy(rows=rows, **SINGLE)
    job = lab.job(rows=rows, **SINGLE, compile=True)
    break_compiled(lab.patch, [job.module(f"model.layers.{layer}")])
    torch.compiler.reset()
    return Case(job, Expected(("KERNEL",), f"model.layers.{layer}", "torch.compile"), reference)


def r25(lab: Lab) -> Case:
    flags = SINGLE | {"flash_attn": "sdpa", "guard_preflight": False}
    rows, layer = lab.rows(8, length=100), lab.layer(2)
    reference = lab.healthy(rows=rows, **flags)
    lab.patch.setattr(Unwritten, "armed", False)
    job = lab.job(rows=rows, **flags)
    break_fused_attention(lab.patch, [job.module(f"model.layers.{layer}.self_attn")], Unwritten)
    once(job, 2, lambda: setattr(Unwritten, "armed", True))
    module = f"model.layers.{layer}.self_attn"
    return Case(job, Expected(("KERNEL",), module, "UnwrittenBackward", "backward"), reference)


# --- weights, optimizer, state ----------------------------------------------------------------------------------


def r12(lab: Lab) -> Case:
    reference = lab.job().train()
    job = lab.job()
    halve_trained(job, torch.float16)
    return Case(job, Expected(("OPTIMIZER",)), reference)


def r13(lab: Lab) -> Case:
    flags = {"optim": "adamw_torch", "guard_preflight": False}
    reference = lab.healthy(**flags)
    job = lab.job(**flags)
    halve_trained(job, torch.float16)
    return Case(job, Expected(("OPTIMIZER",), phase="optimizer"), reference)


def r14(lab: Lab) -> Case:
    flags = {
        "finetuning_type": "full", "learning_rate": 1e-5, "fp16": None, "bf16": True, "lora_target": None,
        "lora_rank": None, "guard_preflight": False,
    }  # fmt: skip
    model = lab.model(dtype=torch.float32)
    job, reference = lab.job(model, **flags), lab.healthy(model, **flags)
    halve_trained(job, torch.bfloat16)
    return Case(job, Expected(("STAGNATION",), phase="optimizer"), reference)


def r15(lab: Lab, **flags: Any) -> Case:
    name = f"model.layers.{lab.layer(3)}.{lab.pick(('self_attn.v_proj', *PROJECTIONS[1:]))}"
    value = lab.pick((float("nan"), float("inf")))
    model = lab.model(element(f"{name}.weight", value, 3, 5 + lab.seed))
    return Case(lab.job(model, **flags), Expected(("WEIGHTS",), name, None, ends="stops"))


def r15_no_look(lab: Lab) -> Case:
    return r15(lab, guard_preflight=False)


def r15_memory(lab: Lab) -> Case:
    name = f"model.layers.{lab.layer(3)}.{lab.pick(('self_attn.v_proj', *PROJECTIONS[1:]))}"
    job, reference = lab.job(), lab.healthy()
    weight = weight_of(job, name)
    once(job, 3, lambda: weight.data[3].fill_(float("nan")))
    return Case(job, Expected(("TRANSIENT", "WEIGHTS"), name, None, "forward"), reference)


def r16(lab: Lab) -> Case:
    first = lab.pick((50, 60, 70, 45, 80))
    return Case(lab.job(lab.model(noisy_rows(first, first + 9))), Expected(("WEIGHTS",)), lab.healthy())


def r17(lab: Lab, factor: float = 100.0, steps: int = 5) -> Case:
    model = lab.model(dtype=torch.float32)
    reference = lab.healthy(model, **LONG_RUN)
    at = AT + 3 * (lab.seed % 5)
    plant = OptimizerPlant(lambda call: factor if at <= call < at + steps else 1.0)
    lab.undo.append(plant.remove)
    return Case(lab.job(model, **LONG_RUN), Expected(("SPIKE", "TREND"), since=at), reference)


def r17_for_good(lab: Lab) -> Case:
    return r17(lab, 40.0, 10_000)


def r19_moments(lab: Lab) -> Case:
    model = lab.model(dtype=torch.float32)
    reference = lab.healthy(model, **LONG_RUN)
    plant = OptimizerPlant()
    lab.undo.append(plant.remove)
    job = lab.job(model, **LONG_RUN)
    at = AT + 3 * (lab.seed % 5)
    once(job, at, plant.lose_second_moments)
    return Case(job, Expected(("SPIKE",), phase="optimizer", since=at), reference)


def r19_checkpoint(lab: Lab) -> Case:
    """The moments are lost on the disk: the checkpoint is passed over and the one before it taken."""
    flags = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(lab.folder / "run")}
    reference = lab.healthy(**(flags | {"output_dir": str(lab.folder / "whole")}))
    lab.job(max_steps=6, **flags).train()
    for file in (lab.folder / "run" / "checkpoint-6").rglob("optimizer.pt"):
        state = torch.load(file, weights_only=True)
        for moments in state["state"].values():
            moments["exp_avg_sq"].zero_()
        torch.save(state, file)
    for file in (lab.folder / "run").glob("*.safetensors"):
        file.unlink()
    job = lab.job(resume_from_checkpoint=True, resume_anyway=True, **flags)
    return Case(job, Expected(("told",), told="checkpoint-6"), reference)


def r20(lab: Lab) -> Case:
    name = lab.pick(("lm_head", *(f"model.layers.{lab.layer(1)}.{part}" for part in PROJECTIONS[1:])))
    model = lab.model(dtype=torch.float32)
    flags = SINGLE | {"lora_dropout": 0.1}
    job, reference = lab.job(model, **flags), lab.healthy(model, **flags)
    weight = weight_of(job, name)
    once(job, 3, lambda: flip_bit(weight, 30, 7 + 100 * lab.seed))
    return Case(job, Expected(("TRANSIENT",), name, None, "forward"), reference)


def r20_hidden(lab: Lab) -> Case:
    name = f"model.layers.{lab.layer(2)}.self_attn.q_proj"
    model = lab.model(dtype=torch.float32)
    job, reference = lab.job(model, **SINGLE), lab.healthy(model, **SINGLE)
    weight = weight_of(job, name)
    once(job, 3, lambda: flip_bit(weight, lab.pick((30, 20, 28, 15, 24)), 7 + 100 * lab.seed))
    return Case(job, Expected(("TRANSIENT",), name, None, "forward"), reference)


def r23_tie(lab: Lab) -> Case:
    model = lab.model(tie_word_embeddings=True)
    job, reference = lab.job(model), lab.healthy(model)
    base = job.model.get_base_model()
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone(), requires_grad=False)
    return Case(job, Expected(("WEIGHTS",), "lm_head"), reference)


def r23_leak(lab: Lab) -> Case:
    from transformers import AttentionInterface

    from surefoot.data.batch import lay_out
    from surefoot.model.attention import EAGER_NAME, packed_eager

    model = lab.model()
    reference = lab.healthy(model, **SINGLE)
    job = lab.job(model, **SINGLE)

    def leaky(module: Any, query: Any, key: Any, value: Any, mask: Any = None, scaling: Any = None,
              dropout: float = 0.0, **kwargs: Any) -> Any:  # fmt: skip
        kwargs["packed_layout"] = lay_out((query.shape[2],))
        return packed_eager(module, query, key, value, mask, scaling, dropout, **kwargs)

    AttentionInterface.register(EAGER_NAME, leaky)
    lab.undo.append(lambda: AttentionInterface.register(EAGER_NAME, packed_eager))
    return Case(job, Expected(("told",), told="not packed"), reference)


def healthy(lab: Lab) -> Case:
    flags = lab.pick(DTYPES)
    return Case(lab.job(**flags), Expected(("none",)), lab.healthy(**flags))


RECIPES: dict[str, tuple[str, Callable[[Lab], Case]]] = {
    "R0": ("nothing is planted", healthy),
    "R1": ("attention scores beyond float16", r1),
    "R2": ("MLP product beyond float16", r2),
    "R2b": ("the same, output fits", r2_fits),
    "R3": ("residual stream beyond float16", r3),
    "R4": ("silent infinity in a hand-written norm", r4),
    "R5": ("an epsilon that float16 lacks", r5),
    "R6": ("loss scale too high", r6),
    "R7": ("sqrt at 0 in every batch", r7_always),
    "R7b": ("sqrt at 0 in one batch", r7_one_batch),
    "R8": ("a batch without labels", r8),
    "R9": ("passes without labels, token mean", r9),
    "R10": ("token id beyond the vocabulary", r10),
    "R11": ("mask that empties rows", r11),
    "R12": ("trained parameters in float16", r12),
    "R13": ("the same, no look before step 1", r13),
    "R14": ("bfloat16 updates below half a unit", r14),
    "R15": ("bad number in a frozen weight", r15),
    "R15b": ("the same, no look before step 1", r15_no_look),
    "R15c": ("the same, in memory only", r15_memory),
    "R16": ("untrained vocabulary rows", r16),
    "R17": ("learning rate x100 for 5 steps", r17),
    "R17b": ("learning rate x40 for good", r17_for_good),
    "R18": ("mean of means", r18),
    "R19": ("second moments lost", r19_moments),
    "R19b": ("moments lost in a checkpoint", r19_checkpoint),
    "R20": ("exponent bit flipped", r20),
    "R20b": ("flip that nothing shows", r20_hidden),
    "R21": ("kernel writes NaN in the backward", r21),
    "R21b": ("fault in one compiled layer", r21_compiled),
    "R22": ("poisoned sample", r22),
    "R22b": ("fault that happens once", r22_once),
    "R23": ("head lost its tie", r23_tie),
    "R23b": ("packed rows leak", r23_leak),
    "R24": ("loss scale collapsed", r24),
    "R25": ("gradient from unwritten memory", r25),
    "R26": ("exp overflows in an unselected branch", r26),
}
"""Number: title and plant. R27 needs two processes: `tests/ranks` has it."""
