"""Chat and export of runs over 4 and 8 bit bases."""

from __future__ import annotations

import pytest
import torch
from tiny_llama import build_model

pytest.importorskip("bitsandbytes", reason="bitsandbytes is optional: pip install --no-deps bitsandbytes")

from surefoot.config import load_config
from surefoot.errors import UserError
from surefoot.model.quantized import is_quantized
from surefoot.use.chat import open_chat
from surefoot.use.export import export_model


def settings(purpose, base, adapter, *more):
    words = [f"model_name_or_path={base}", f"adapter_name_or_path={adapter}", "template=chatml", *more]
    return load_config(None, words, purpose)


def silent(message):
    pass


@pytest.mark.parametrize("bits", [4, 8])
def test_chat_answers_over_packed_weights(tiny_llama, tiny_adapter, bits, caplog):
    flags = (f"quantization_bit={bits}", "do_sample=false", "max_new_tokens=8", "device=cpu")
    chat = open_chat(settings("chat", tiny_llama, tiny_adapter, *flags), silent)
    assert sum(is_quantized(module) for module in chat.model.modules()) == 14
    shown: list[str] = []
    answer = chat.ask("Hello", shown.append)
    assert answer == "".join(shown)
    assert "cast" not in caplog.text, "no input is rounded to float16 on its way to 8 bit weights"


def test_an_adapter_of_a_quantised_run_is_merged_into_the_original(tiny_llama, tiny_adapter, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    said: list[str] = []
    folder = tmp_path / "merged"
    done = export_model(
        settings("export", tiny_llama, tiny_adapter, "quantization_bit=4", f"export_dir={folder}"), said.append
    )
    assert done.check.ok and any("not in the 4 bits of the training" in sentence for sentence in said)
    merged = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert not hasattr(merged.config, "quantization_config")
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), tiny_adapter).eval()
    ids = torch.tensor([[5, 77, 130, 9]])
    with torch.inference_mode():
        assert torch.allclose(merged(ids).logits, whole(ids).logits, atol=1e-4)


def test_merging_into_packed_files_is_refused(tiny_llama, tiny_adapter, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    packed = tmp_path / "packed"
    config = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained(build_model(tmp_path / "base"), quantization_config=config).save_pretrained(
        packed
    )
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(packed)
    with pytest.raises(UserError, match=r"model_name_or_path: .* holds 4 bit weights"):
        export_model(settings("export", packed, tiny_adapter, f"export_dir={tmp_path / 'merged'}"), silent)
    assert not (tmp_path / "merged").exists()
