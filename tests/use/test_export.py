from __future__ import annotations

import json

import pytest
import torch
from tiny_llama import build_adapter, build_model
from typer.testing import CliRunner

from surefoot.cli.main import app
from surefoot.config import load_config
from surefoot.errors import UserError, WorkError
from surefoot.use import export as export_module
from surefoot.use.export import check_export_dir, export_model, work_dtype


def settings(base, folder, *more):
    return load_config(None, [f"model_name_or_path={base}", f"export_dir={folder}", "template=chatml", *more], "export")


def silent(message):
    pass


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "merged"


def test_the_merged_model_says_what_the_adapter_says_and_anyone_can_load_it(tiny_llama, tiny_adapter, folder):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = export_model(settings(tiny_llama, folder, f"adapter_name_or_path={tiny_adapter}"), silent)
    merged = AutoModelForCausalLM.from_pretrained(folder).eval()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), tiny_adapter).eval()
    ids = torch.tensor([[5, 77, 130, 9]])
    with torch.inference_mode():
        assert torch.allclose(merged(ids).logits, adapted(ids).logits, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.padding_side == "left"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in merged.generation_config.eos_token_id
    assert (folder / "Modelfile").read_text().startswith("# Written by Surefoot.")
    report = json.loads((folder / "surefoot/export.json").read_text())["merge_check"]
    assert report["ok"] and report["conclusive"] and report["top1_agreement"] == 1.0
    assert done.check.rms_effect > 0.1, "the adapter of this test must do something"


@pytest.mark.parametrize("fault", ["not merged", "merged twice", "one layer only"])
def test_a_wrong_merge_is_caught_and_nothing_is_left(tiny_llama, tiny_adapter, folder, monkeypatch, fault):
    def wrong(model):
        layers = [m for m in model.modules() if hasattr(m, "lora_A")]
        if fault == "not merged":
            return model.unload()
        if fault == "merged twice":
            for layer in layers:
                layer.lora_B["default"].weight.data *= 2
        if fault == "one layer only":
            layers[-1].lora_B["default"].weight.data.zero_()
        return model.merge_and_unload()

    monkeypatch.setattr(export_module, "merge", wrong)
    with pytest.raises(WorkError, match="not the model that was trained"):
        export_model(settings(tiny_llama, folder, f"adapter_name_or_path={tiny_adapter}"), silent)
    assert list(folder.parent.iterdir()) == []


def test_a_weight_that_is_not_finite_is_caught(tiny_llama, tiny_adapter, folder, monkeypatch):
    def poisoned(model):
        merged = model.merge_and_unload()
        # A token that no probe contains: the logits of the probes stay finite.
        merged.get_input_embeddings().weight.data[3, 0] = float("nan")
        return merged

    monkeypatch.setattr(export_module, "merge", poisoned)
    with pytest.raises(WorkError, match="not finite"):
        export_model(settings(tiny_llama, folder, f"adapter_name_or_path={tiny_adapter}"), silent)
    assert not folder.exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_is_saved_and_passes(tiny_llama, tiny_adapter, folder, dtype):
    from safetensors import safe_open

    arguments = (f"adapter_name_or_path={tiny_adapter}", f"infer_dtype={dtype}")
    done = export_model(settings(tiny_llama, folder, *arguments), silent)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {str(file.get_tensor(key).dtype) for key in file.keys()} == {f"torch.{dtype}"}  # noqa: SIM118
    assert (done.check.saved, done.check.computed, done.check.conclusive) == (dtype, "float32", True)


def test_auto_keeps_the_dtype_of_the_base(tmp_path, folder):
    base = build_model(tmp_path / "half", "bfloat16")
    adapter = build_adapter(base, tmp_path / "half-lora")
    done = export_model(settings(base, folder, f"adapter_name_or_path={adapter}"), silent)
    assert done.check.saved == "bfloat16" and done.check.ok


def test_a_model_too_large_for_float32_is_compared_in_its_own_dtype(tmp_path, folder, monkeypatch):
    base = build_model(tmp_path / "half", "bfloat16")
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    monkeypatch.setattr("surefoot.model.memory.free_memory", lambda device: 2 * size)
    cfg = settings(base, folder, f"adapter_name_or_path={build_adapter(base, tmp_path / 'half-lora')}")
    assert work_dtype(cfg, "cpu") == "auto"
    done = export_model(cfg, silent)
    assert (done.check.computed, done.check.ok, done.check.conclusive) == ("bfloat16", True, True)


def test_a_base_without_an_adapter_can_be_exported_too(tiny_llama, folder):
    done = export_model(settings(tiny_llama, folder), silent)
    assert done.check.rms_effect is None and done.check.max_abs_diff == 0.0


def test_an_export_may_replace_an_export_but_nothing_else(tiny_llama, folder):
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="replaces the whole folder"):
        check_export_dir(settings(tiny_llama, folder))
    (folder / "thesis.tex").unlink()
    export_model(settings(tiny_llama, folder), silent)
    export_model(settings(tiny_llama, folder), silent)


def test_a_place_that_is_a_file_is_refused_before_any_work(tiny_llama, folder):
    folder.write_text("")
    run = CliRunner().invoke(app, ["export", str(tiny_llama), "template=chatml", f"export_dir={folder}"])
    assert run.exit_code == 2 and "export_dir" in run.stderr and "Traceback" not in run.stderr


def test_the_command_prints_where_it_is_and_a_chat_line_that_works(tiny_llama, tiny_adapter, folder):
    arguments = [f"model_name_or_path={tiny_llama}", f"adapter_name_or_path={tiny_adapter}", f"export_dir={folder}"]
    run = CliRunner().invoke(app, ["export", *arguments, "template=chatml"])
    assert run.exit_code == 0, run.stderr
    (line,) = [line for line in run.stdout.splitlines() if "surefoot chat" in line]
    words = line.split("surefoot ")[1].split()
    assert CliRunner().invoke(app, [*words, "max_new_tokens=3", "--prompt", "hi"]).exit_code == 0
