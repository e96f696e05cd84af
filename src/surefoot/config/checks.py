"""Settings that contradict each other, or ask for nothing that can be done. Each rule names the keys and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from surefoot.config.key import TRAIN, Purpose
from surefoot.config.sharding import ELEMENTWISE, read_sharding
from surefoot.config.zero import deepspeed_problems
from surefoot.errors import Problem, UserError

Values = dict[str, Any]


def contradictions(values: Values, given: Values, purpose: Purpose) -> Iterator[Problem]:
    """Check the settings against each other.

    Args:
        values: every key with its final value.
        given: what the person wrote.
        purpose: the command.

    Yields:
        What is wrong.
    """
    if not values["model_name_or_path"]:
        hint = "name a folder, a hub id, or demo:smollm2-135m-instruct"
        yield Problem("is missing: which model?", hint, key="model_name_or_path")
    yield from _long_names(values)
    yield from _adapters(values)
    yield from _quantization(values, purpose)
    yield from _fp8(values)
    yield from _device(values, given)
    if purpose in TRAIN:
        yield from _data(values, given)
        yield from _stage(values)
        yield from _weights(values)
        yield from _sharding(values)
        yield from _run(values, given)
        yield from _evaluation(values)
        yield from deepspeed_problems(values)
    if purpose == "chat" and values["do_sample"] and values["temperature"] == 0:
        yield Problem("is 0, which nothing can be drawn with", "set `do_sample: false` instead", key="temperature")


def _long_names(values: Values) -> Iterator[Problem]:
    """No file system has names of more than 255 bytes; asking one for such a file is an error of its own."""
    keys = ("model_name_or_path", "output_dir", "export_dir", "dataset_dir", "tokenized_path", "resume_from_checkpoint")
    named = [(key, values[key]) for key in keys]
    named += [(key, name) for key in ("dataset", "eval_dataset", "adapter_name_or_path") for name in values[key] or []]
    for key, name in named:
        if isinstance(name, str) and max(len(part.encode("utf-8", "replace")) for part in name.split("/")) > 255:
            yield Problem(f"holds a name of more than 255 bytes: {name[:40]}…", "give it a shorter one", key=key)


def _adapters(values: Values) -> Iterator[Problem]:
    if values["adapter_name_or_path"] and values["finetuning_type"] != "lora":
        message = f"adapters go with `finetuning_type: lora`, not {values['finetuning_type']}"
        hint = "merge them first with `surefoot export`, or set `finetuning_type: lora`"
        yield Problem(message, hint, key="adapter_name_or_path")


def _quantization(values: Values, purpose: Purpose) -> Iterator[Problem]:
    """Check what does not go with weights in 4 or 8 bits, as LLaMA-Factory does."""
    key, bits = "quantization_bit", values["quantization_bit"]
    if bits is None or purpose == "export":  # an export merges into the weights as the files hold them
        return
    if values["quantization_method"] != "bnb":
        message = f"{values['quantization_method']} is not supported yet"
        yield Problem(message, "leave it out for bitsandbytes", key="quantization_method")
    elif bits not in (4, 8):
        yield Problem(f"is {bits}, but bitsandbytes has 4 and 8 bits", "write `quantization_bit: 4`", key=key)
    if values["finetuning_type"] != "lora":
        message = f"is for `finetuning_type: lora`, not {values['finetuning_type']}: packed weights cannot be trained"
        yield Problem(message, "remove it, or set `finetuning_type: lora`", key=key)
    for grown in ("resize_vocab", "add_tokens", "add_special_tokens"):
        if values[grown]:
            hint = f"remove it, or train without `{key}`"
            yield Problem("adds rows to the embeddings, which a quantised model cannot have", hint, key=grown)
    if values["create_new_adapter"] and values["adapter_name_or_path"]:
        hint = "merge the old adapter first with `surefoot export`"
        yield Problem("merges the old adapter, which quantised weights cannot take", hint, key="create_new_adapter")
    if len(values["adapter_name_or_path"] or []) > 1:
        hint = "merge them first with `surefoot export`"
        yield Problem("names several adapters, but a quantised model takes one", hint, key="adapter_name_or_path")
    if values["train_from_scratch"]:
        yield Problem("leaves no weights to quantise", f"remove it, or remove `{key}`", key="train_from_scratch")


def _fp8(values: Values) -> Iterator[Problem]:
    """Check what frozen weights in 8-bit floats ask for: adapters over plain weights, in compiled layers."""
    if not values["fp8"]:
        return
    if values["finetuning_type"] != "lora":
        message = f"holds frozen weights in 8 bits, and `finetuning_type: {values['finetuning_type']}` trains them"
        yield Problem(message, "remove it, or set `finetuning_type: lora`", key="fp8")
    if values["quantization_bit"] is not None:
        yield Problem("does not go with `quantization_bit`", "remove one of them", key="fp8")
    if values["compile"] is False:
        yield Problem("is computed by compiled layers", "remove `compile: false`", key="fp8")


def _sharding(values: Values) -> Iterator[Problem]:
    """Check what `fsdp` asks for, and what does not go with a model in pieces."""
    try:
        asked = read_sharding(values["fsdp"], values["fsdp_config"])
    except UserError as error:
        yield from error.problems
        return
    if asked is None:
        return
    if values["fp8"]:
        yield Problem("holds whole weights beside those that `fsdp` shards", "remove one of them", key="fp8")
    if values["finetuning_type"] != "lora" and values["optim"] not in ELEMENTWISE:
        message = f"{values['optim']} looks at whole matrices, of which `fsdp` leaves each process some rows"
        yield Problem(message, f"use one of {', '.join(ELEMENTWISE)}, or remove `fsdp`", key="optim")
    if values["deepspeed"]:
        yield Problem("cannot be joined with `deepspeed`", "keep one of them", key="fsdp")


def _device(values: Values, given: Values) -> Iterator[Problem]:
    wanted = given.get("device")
    if (values["use_cpu"] or values["no_cuda"]) and wanted not in (None, "auto", "cpu"):
        yield Problem(f"is {wanted}, but `use_cpu` asks for the CPU", "remove one of them", key="device")


def _data(values: Values, given: Values) -> Iterator[Problem]:
    size, streaming = values["val_size"], values["streaming"]
    if not values["dataset"]:
        yield Problem("is missing: which data?", "name one or more entries of dataset_info.json", key="dataset")
    if size and values["eval_dataset"]:
        yield Problem("cannot be joined with `eval_dataset`", "remove one of them", key="val_size")
    if isinstance(size, float) and size >= 1:
        hint = f"write `val_size: {int(size)}` for a number of rows, or a share below 1"
        yield Problem(f"{size} is neither a share below 1 nor a whole number of rows", hint, key="val_size")
    if streaming and 0 < size < 1:
        hint = "give a whole number of rows, such as `val_size: 1000`"
        yield Problem("cannot be a share of a stream, whose length is not known", hint, key="val_size")
    if streaming and values["max_samples"] is not None:
        yield Problem("cannot be joined with `streaming`", "limit the run with `max_steps`", key="max_samples")
    if streaming and values["max_steps"] <= 0:
        yield Problem("needs `max_steps`: a stream has no length", "add `max_steps: 1000`, say", key="streaming")
    if streaming and values["tokenized_path"]:
        yield Problem("cannot be joined with `streaming`", "remove one of them", key="tokenized_path")
    yield from _mixing(values)
    if values["packing"] and values["cutoff_len"] < 2:
        yield Problem("must be at least 2 when samples are packed", "write `cutoff_len: 2048`, say", key="cutoff_len")


def _mixing(values: Values) -> Iterator[Problem]:
    shares = values["interleave_probs"]
    if shares is None:
        return
    if values["mix_strategy"] == "concat":
        hint = "set `mix_strategy: interleave_under`, or remove the shares"
        yield Problem("means nothing when data sets are simply joined", hint, key="interleave_probs")
    for key in ("dataset", "eval_dataset"):
        if values[key] and len(values[key]) != len(shares):
            message = f"gives {len(shares)} shares for the {len(values[key])} data sets of `{key}`"
            yield Problem(message, "give one share a data set", key="interleave_probs")
    if any(share < 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        message = f"must be shares that add up to 1, but they add up to {sum(shares):g}"
        yield Problem(message, "write, say, `interleave_probs: 0.3,0.7`", key="interleave_probs")


def _stage(values: Values) -> Iterator[Problem]:
    if values["mask_history"] and values["train_on_prompt"]:
        hint = "`mask_history` trains on less, `train_on_prompt` on more: remove one of them"
        yield Problem("cannot be joined with `train_on_prompt`", hint, key="mask_history")
    if values["stage"] != "sft":
        for key in ("neat_packing", "mask_history", "train_on_prompt"):
            if values[key]:
                yield Problem(f"is for `stage: sft`, not {values['stage']}", "remove it", key=key)


def _weights(values: Values) -> Iterator[Problem]:
    kind = values["finetuning_type"]
    if kind != "lora":
        for key in ("use_rslora", "use_dora"):
            if values[key]:
                hint = "remove it, or set `finetuning_type: lora`"
                yield Problem(f"is for `finetuning_type: lora`, not {kind}", hint, key=key)
    if kind == "freeze" and values["freeze_trainable_layers"] == 0 and not values["freeze_extra_modules"]:
        yield Problem("is 0, so nothing would train", "give a number of layers", key="freeze_trainable_layers")
    if kind in ("lora", "freeze"):
        key = "lora_target" if kind == "lora" else "freeze_trainable_modules"
        if not values[key]:
            yield Problem("is empty, so nothing would train", "write `all`, or name modules", key=key)


def _run(values: Values, given: Values) -> Iterator[Problem]:
    if given.get("bf16") and given.get("fp16"):
        yield Problem("is true, and `bf16` is too", "keep one of them", key="fp16")
    if not values["do_train"]:
        hint = "remove `do_train: false`; evaluation without training is not there yet"
        yield Problem("is false, but this command trains", hint, key="do_train")
    if "none" in (named := given.get("report_to") or []) and len(named) > 1:
        yield Problem("names none and a tracker", "keep one of them", key="report_to")
    for what in ("logging", "save", "eval"):
        key, steps = f"{what}_steps", values[f"{what}_steps"]
        if values[f"{what}_strategy"] != "steps":
            continue
        if not steps:
            hint = f"give a number of steps, or set `{what}_strategy: no`"
            yield Problem("must be above 0", hint, key="logging_steps" if what == "eval" else key)
        elif steps > 1 and isinstance(steps, float):
            hint = f"write `{key}: {round(steps)}`, or a share below 1"
            yield Problem(f"{steps:g} is neither a share below 1 nor a whole number of steps", hint, key=key)
    warmup = values["warmup_steps"]
    if isinstance(warmup, float) and warmup > 1:
        hint = f"write `warmup_steps: {round(warmup)}`, or a share below 1"
        yield Problem(f"{warmup:g} is neither a share below 1 nor a whole number of steps", hint, key="warmup_steps")


def _evaluation(values: Values) -> Iterator[Problem]:
    strategy = values["eval_strategy"]
    has_data = bool(values["eval_dataset"]) or values["val_size"] > 0
    if values["do_eval"] and not has_data:
        key = "eval_strategy" if strategy != "no" else "do_eval"
        hint = "add `val_size: 0.1` to hold out a tenth of the rows, or name an `eval_dataset`"
        yield Problem("asks for evaluation, but there is no data to evaluate on", hint, key=key)
    if values["save_strategy"] == "best" and strategy == "no":
        yield Problem("best needs evaluation to tell it", "add `eval_strategy: steps`", key="save_strategy")
    if values["early_stopping_steps"] and strategy == "no":
        yield Problem("needs evaluation", "add `eval_strategy: steps`", key="early_stopping_steps")
    metric = values["metric_for_best_model"]
    if metric and metric.endswith("accuracy") and not values["compute_accuracy"]:
        yield Problem(f"{metric} is not computed", "add `compute_accuracy: true`", key="metric_for_best_model")
    elif metric and not metric.endswith(("loss", "accuracy")):
        message = f"there is no metric {metric}"
        yield Problem(message, "the choices are loss and accuracy", key="metric_for_best_model")
    if values["load_best_model_at_end"]:
        yield from _best_model(values)


def _best_model(values: Values) -> Iterator[Problem]:
    key, save, strategy = "load_best_model_at_end", values["save_strategy"], values["eval_strategy"]
    if strategy == "no":
        yield Problem("needs evaluation to tell the best", "add `eval_strategy: steps`", key=key)
    elif save not in (strategy, "best"):
        hint = f"set `save_strategy: {strategy}`"
        yield Problem(
            f"needs a checkpoint at every evaluation, but saves by {save} and evaluates by {strategy}", hint, key=key
        )
    elif save == "steps":
        saves, evals = values["save_steps"], values["eval_steps"] or values["logging_steps"]
        ratio = saves / evals if evals else 0.0
        if abs(ratio - round(ratio)) > 1e-9 or round(ratio) < 1:
            message = f"needs `save_steps` ({saves:g}) to be a multiple of `eval_steps` ({evals:g})"
            yield Problem(message, f"set `save_steps: {evals:g}`", key=key)


def deviations(values: Values, given: Values, purpose: Purpose) -> Iterator[Problem]:
    """Name what Surefoot does otherwise than LLaMA-Factory on purpose, where these settings meet it.

    Args:
        values: every key with its final value.
        given: what the person wrote.
        purpose: the command.

    Yields:
        One warning a deviation.
    """
    if purpose not in TRAIN:
        return
    joined = values["packing_mode"] == "joined"
    if given.get("packing") and not values["neat_packing"] and values["stage"] == "sft" and not joined:
        message = (
            "the samples of a pack do not see each other, which in LLaMA-Factory they do unless `neat_packing` is on"
        )
        yield Problem(message, "set `packing_mode: joined` for LLaMA-Factory's way", key="packing")
    if values["neat_packing"] and joined:
        message = "joined has no effect with `neat_packing`, which keeps samples apart"
        yield Problem(message, "remove one of them", key="packing_mode")
    if values["neat_packing"] and given.get("packing") is False:
        yield Problem(
            "turns packing on although `packing: false` stands there", "remove one of them", key="neat_packing"
        )
