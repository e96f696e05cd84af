"""Requests that cannot be met: one message that names the place and the fix, exit 2, nothing half written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lab import CHATML_MARKS, Job, build_model, build_tokenizer, environment, good_rows, invoke, make_job, run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    """Another model with the same tokenizer."""
    return build_model(tmp_path_factory.mktemp("models") / "wider", hidden_size=48)


@pytest.fixture
def job(model, tmp_path):
    return make_job(tmp_path / "job", model)


def snapshot(folder: Path):
    """Everything in a folder; None when there is no folder."""
    if not os.path.isdir(folder):  # noqa: PTH112  (Path.is_dir raises where the name is too long)
        return None
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def assert_refusal(done, *named: str):
    """Exit 2, and one message: what is wrong, where, and what to do."""
    code = getattr(done, "exit_code", getattr(done, "returncode", None))
    assert code == 2, f"exit {code}\n{done.stderr}"
    assert "Traceback" not in done.stderr and done.stdout == "", done.stderr
    messages = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, done.stderr
    message = done.stderr[done.stderr.index("error: ") :]
    hints = [line for line in message.splitlines() if line.startswith("  -> ")]
    assert len(hints) == 1 and len(hints[0]) > 12, message
    assert len(message.splitlines()) == 2, message
    for text in named:
        assert text in message, (text, message)


def refused(job: Job, *named: str, words: tuple[str, ...] = (), yaml: Path | None = None):
    """The request is refused, and the run directory is as it was."""
    before, beside = snapshot(job.out), set(job.folder.iterdir())
    done = invoke("train", yaml or job.yaml, *words)
    assert_refusal(done, *named)
    assert snapshot(job.out) == before
    assert set(job.folder.iterdir()) == beside, "nothing may be left beside it either"
    return done


# --- The YAML ---------------------------------------------------------------------------------------------------

YAMLS = {
    "empty": (b"", "job.yaml is empty"),
    "only comments": (b"# nothing\n\n", "job.yaml is empty"),
    "a list": (b"- model_name_or_path: x\n", "job.yaml holds no settings"),
    "a sentence": (b"train my model please", "job.yaml holds no settings"),
    "tabs": (b"model_name_or_path: x\n\tdataset: y\n", "line 2"),
    "an open bracket": (b"model_name_or_path: [x\n", "job.yaml is not valid YAML"),
    "binary": (bytes(range(256)), "job.yaml"),
    "a PNG": (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "job.yaml"),
    "zeros": (b"\x00" * 64, "job.yaml"),
    "latin-1": ("model_name_or_path: é\n".encode("latin-1"), "job.yaml"),
    "a key twice": (b"dataset: a\ndataset: b\n", "dataset: stands twice"),
    "python": (b"model_name_or_path: !!python/object/apply:os.system ['true']\n", "job.yaml"),
    "an open reference": (b"model_name_or_path: ${nowhere}\ndataset: x\n", "nowhere"),
}


@pytest.mark.parametrize("name", YAMLS)
def test_a_yaml_that_is_none(job, name):
    content, named = YAMLS[name]
    job.yaml.write_bytes(content)
    refused(job, named)


def test_a_yaml_that_is_not_there_or_is_a_folder(job):
    (job.folder / "jobs").mkdir()
    refused(job, "jop.yaml", "job.yaml", yaml=job.folder / "jop.yaml")
    refused(job, "jobs", yaml=job.folder / "jobs")


SETTINGS = {
    "a typo": ({"lora_rnak": 8}, "lora_rnak", "lora_rank"),
    "another program's key": ({"learningRate": 1e-4}, "learningRate", "learning_rate"),
    "a word for a number": ({"learning_rate": "fast"}, "learning_rate", "fast", "5e-05"),
    "a list for a number": ({"cutoff_len": [128]}, "cutoff_len"),
    "a mapping for a name": ({"template": {"name": "chatml"}}, "template"),
    "a fraction of a row": ({"per_device_train_batch_size": 1.5}, "per_device_train_batch_size"),
    "no rows a step": ({"per_device_train_batch_size": 0}, "per_device_train_batch_size"),
    "negative accumulation": ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps"),
    "no tokens": ({"cutoff_len": 0}, "cutoff_len"),
    "rank 0": ({"lora_rank": 0}, "lora_rank"),
    "not a number": ({"learning_rate": ".nan"}, "learning_rate"),
    "infinite epochs": ({"num_train_epochs": ".inf"}, "num_train_epochs"),
    "an unknown schedule": ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type", "cosine"),
    "an unknown optimizer": ({"optim": "adamv"}, "optim"),
    "two precisions": ({"fp16": True, "bf16": True}, "fp16", "bf16"),
    "two ways to evaluate": ({"val_size": 0.1, "eval_dataset": "rows"}, "val_size", "eval_dataset"),
    "evaluation of nothing": ({"eval_strategy": "steps"}, "eval_strategy", "val_size"),
    "warm-up beyond the run": ({"warmup_ratio": 1.5}, "warmup_ratio"),
    "dropout of everything": ({"lora_dropout": 1.5}, "lora_dropout"),
    "no model": ({"model_name_or_path": None}, "model_name_or_path"),
    "no data": ({"dataset": None}, "dataset"),
    "a stage of another kind": ({"stage": "dpo"}, "stage", "dpo"),
    "no logging steps": ({"logging_steps": 0}, "logging_steps"),
    "a GPU that is not there": ({"device": "cuda:7"}, "device", "GPU"),
    "a tracker that is not installed": ({"report_to": "swanlab"}, "report_to", "swanlab"),
    "no LoRA modules": ({"lora_target": []}, "lora_target"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(job, name):
    changes, *named = SETTINGS[name]
    job.set(**changes)
    if changes.get("report_to"):
        pytest.importorskip("accelerate")
        if shutil.which("swanlab"):
            pytest.skip("it is installed here")
    refused(job, *named)


def test_words_on_the_command_line_that_are_no_settings(job):
    refused(job, "nonsense", words=("nonsense",))
    refused(job, "lora_rank", words=("lora_rank=many",))


# --- The data ---------------------------------------------------------------------------------------------------

HTML = "<!DOCTYPE html><html><body>404 Not Found</body></html>"
WHOLE = json.dumps(good_rows())

ROWS = {
    "cut off": (WHOLE[: len(WHOLE) // 2], "rows.json", "line 1"),
    "cut off in a list of lines": ('{"instruction": "a", "output": "b"}\n{"instruction": "c", "out', "line 2"),
    "an empty list": ("[]", "rows"),
    "an empty file": ("", "rows"),
    "a web page": (HTML, "rows.json", "line 1"),
    "yaml": ("- instruction: a\n  output: b\n", "rows.json", "line 1"),
    "not UTF-8": (b'[{"instruction": "\xff\xfe", "output": "b"}]', "rows.json", "UTF-8"),
    "zeros": (b"\x00" * 100, "rows.json"),
    "rows below a key": (json.dumps({"data": good_rows()}), "rows"),
    "numbers": ("[1, 2, 3]", "rows"),
    "a missing comma": ('[{"instruction": "a", "output": "b"} {"instruction": "c"}]', "rows.json", "column"),
    "answers that are all null": (json.dumps([{"instruction": "a", "output": None}] * 5), "rows"),
    "answers that are all empty": (json.dumps([{"instruction": "a", "output": ""}] * 5), "rows"),
    "answers of another type": (json.dumps([{"instruction": "a", "output": {"text": 1}}] * 5), "rows"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_nothing_can_be_made_of(job, name):
    content, *named = ROWS[name]
    job.rows(content)
    refused(job, *named)


DESCRIPTIONS = {
    "columns that no row has": ({"columns": {"prompt": "question", "response": "answer"}}, "question"),
    "images": ({"columns": {"prompt": "instruction", "response": "output", "images": "images"}}, "images"),
    "a file that is not there": ({"file_name": "rose.json"}, "rose.json"),
    "a yaml file": ({"file_name": "rows.yaml"}, "rows.yaml"),
    "a picture": ({"file_name": "rows.png"}, "rows.png"),
    "a broken parquet": ({"file_name": "rows.parquet"}, "rows.parquet"),
    "an empty folder": ({"file_name": "folder"}, "folder"),
    "pairs of answers": ({"ranking": True}, "ranking"),
    "another format": ({"formatting": "sharegtp"}, "sharegtp", "sharegpt"),
    "a typo": ({"colums": {}}, "colums", "columns"),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_descriptions_of_data(job, name):
    changes, *named = DESCRIPTIONS[name]
    for file in ("rows.yaml", "rows.png", "rows.parquet"):
        job.rows(b"\x00junk", file)
    (job.folder / "data" / "folder").mkdir()
    job.dataset(**changes)
    refused(job, *named)


def test_a_dataset_that_is_not_described(job):
    refused(job, "row", "rows", words=("dataset=row",))
    job.rows('{"rows": {"file_name": ', "dataset_info.json")
    refused(job, "dataset_info.json", "line 1")
    job.rows("[1]", "dataset_info.json")
    refused(job, "dataset_info.json")
    (job.folder / "data" / "dataset_info.json").unlink()
    refused(job, "dataset_info.json")
    refused(job, "nowhere", words=(f"dataset_dir={job.folder / 'nowhere'}",))


def test_no_row_keeps_a_label(job):
    """The prompt alone fills `cutoff_len`."""
    job.rows([{"instruction": "long " * 100, "output": "x"}] * 5)
    refused(job.set(cutoff_len=1), "cutoff_len")


def test_strict_data(job):
    job.rows(good_rows() + [{"instruction": "a", "output": None}] * 4)
    refused(job.set(strict_data=True), "strict_data")


def test_a_token_cache_of_another_model(job, tmp_path, model):
    tokens = tmp_path / "tokens"
    job.set(tokenized_path=str(tokens))
    assert invoke("check", job.yaml, "--json").exit_code == 0 and tokens.is_dir()
    before = snapshot(tokens)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    build_tokenizer([*CHATML_MARKS, "<extra>"]).save_pretrained(other)
    refused(job.set(model_name_or_path=str(other)), "tokens", "another model")
    assert snapshot(tokens) == before


@pytest.mark.parametrize("kind", ["of another tool", "a file", "damaged"])
def test_a_token_cache_that_is_none(job, tmp_path, kind):
    tokens = tmp_path / "tokens"
    job.set(tokenized_path=str(tokens))
    if kind == "a file":
        tokens.write_text("tokens")
    elif kind == "of another tool":
        tokens.mkdir()
        (tokens / "dataset_dict.json").write_text("{}")
    else:
        assert invoke("check", job.yaml, "--json").exit_code == 0
        for file in (tokens / "train").iterdir():
            file.write_bytes(file.read_bytes()[:-4])
    before = snapshot(tokens)
    refused(job, "tokens")
    assert snapshot(tokens) == before


# --- The template -----------------------------------------------------------------------------------------------


def test_an_unknown_template(job):
    refused(job.set(template="chatlm"), "chatlm", "chatml")


def test_a_template_whose_marks_the_tokenizer_lacks(job):
    refused(job.set(template="llama3"), "llama3", "<|start_header_id|>")


def test_no_template_and_a_tokenizer_without_one(job):
    refused(job.set(template=None), "template")


# --- The model --------------------------------------------------------------------------------------------------


def edit_json(file: Path, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder: Path, change):
    from safetensors.torch import load_file, save_file

    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def to_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut(name, keep):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def sharded(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    lost = {"lm_head.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": lost}))


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"
MODELS = {
    "no folder": (shutil.rmtree, "model_name_or_path", "broken"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "a config that is not JSON": (lambda f: (f / "config.json").write_text("{"), "broken"),
    "a config that is a list": (lambda f: (f / "config.json").write_text("[]"), "broken"),
    "a config of no model": (lambda f: (f / "config.json").write_text("{}"), "broken"),
    "an unknown kind": (lambda f: edit_json(f / "config.json", model_type="lamma"), "lamma"),
    "a config of wrong types": (lambda f: edit_json(f / "config.json", hidden_size="wide"), "broken"),
    "an encoder-decoder": (lambda f: (f / "config.json").write_text('{"model_type": "t5"}'), "encoder-decoder"),
    "pickled weights": (to_pickle, "pytorch_model.bin", "safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    "cut weights": (cut("model.safetensors", -100), "model.safetensors"),
    "weights cut in the header": (cut("model.safetensors", 100), "model.safetensors"),
    "a pointer for weights": (lambda f: (f / "model.safetensors").write_text(LFS), "model.safetensors"),
    "empty weights": (cut("model.safetensors", 0), "model.safetensors"),
    "a lost shard": (sharded, "broken"),
    "a missing tensor": (lambda f: change_weights(f, lambda t: t.pop("model.norm.weight")), "model.norm.weight"),
    "another shape": (lambda f: edit_json(f / "config.json", intermediate_size=72), "broken"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "tokenizer"),
    "a tokenizer that is not JSON": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_folder(job, model, tmp_path, name):
    damage, *named = MODELS[name]
    folder = tmp_path / "broken"
    shutil.copytree(model, folder)
    damage(folder)
    refused(job.set(model_name_or_path=str(folder)), *named)


def test_a_model_that_is_a_file(job):
    refused(job.set(model_name_or_path=str(job.yaml)), "model_name_or_path", "job.yaml")


def test_a_token_beyond_the_vocabulary(job, tmp_path):
    """The tokenizer knows more tokens than the model has rows."""
    small = build_model(tmp_path / "small", vocab_size=200)
    refused(job.set(model_name_or_path=str(small)), "200", "resize_vocab")


# --- The adapter ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """A finished run."""
    job = make_job(tmp_path_factory.mktemp("trained") / "job", model)
    assert invoke("train", job.yaml).exit_code == 0
    return job


def test_lora_target_that_matches_nothing(job):
    refused(job.set(lora_target="q_porj"), "lora_target", "q_porj", "q_proj")


def test_lora_target_that_matches_in_part(job):
    refused(job.set(lora_target="q_proj,value_projection"), "lora_target", "value_projection", "v_proj")


def test_an_adapter_that_is_not_there(job):
    refused(job.set(adapter_name_or_path="./nowhere/adapter"), "adapter_name_or_path", "nowhere/adapter")


def without_weights(folder):
    (folder / "adapter_model.safetensors").unlink()


def other_names(folder):
    change_weights(folder, lambda t: [t.__setitem__(k.replace("q_proj", "query"), t.pop(k)) for k in list(t)])


def fewer_names(folder):
    change_weights(folder, lambda t: [t.pop(k) for k in list(t) if "q_proj" in k])


ADAPTERS = {
    "a config that is not JSON": lambda f: (f / "adapter_config.json").write_text("{"),
    "a config of nothing": lambda f: (f / "adapter_config.json").write_text("{}"),
    "a config that is a list": lambda f: (f / "adapter_config.json").write_text("[]"),
    "no weights": without_weights,
    "cut weights": cut("adapter_model.safetensors", -100),
    "weights of other modules": other_names,
    "weights that lack modules": fewer_names,
    "modules that the model lacks": lambda f: edit_json(f / "adapter_config.json", target_modules=["query"]),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_folder(job, trained, tmp_path, name):
    adapter = tmp_path / "adapter"
    shutil.copytree(trained.out, adapter, ignore=shutil.ignore_patterns("checkpoint-*", "surefoot"))
    ADAPTERS[name](adapter)
    refused(job.set(adapter_name_or_path=str(adapter)), "adapter")


def test_an_adapter_of_another_model(job, trained, wider):
    refused(job.set(model_name_or_path=str(wider), adapter_name_or_path=str(trained.out)), "adapter_name_or_path")


# --- Checkpoints and the run directory --------------------------------------------------------------------------


def test_a_checkpoint_of_another_model(job, trained, wider):
    job.set(model_name_or_path=str(wider), output_dir=str(trained.out))
    refused(job, "checkpoint-8", "model", "resume_anyway")


def test_other_settings(job, trained):
    shutil.copytree(trained.folder / "data", job.folder / "data", dirs_exist_ok=True)
    refused(job.set(output_dir=str(trained.out), learning_rate=1e-3), "learning_rate", "0.001")


@pytest.mark.parametrize("kind", ["nowhere", "not ours", "damaged"])
def test_a_checkpoint_that_is_none(job, trained, tmp_path, kind):
    folder = tmp_path / "checkpoint-8"
    if kind != "nowhere":
        shutil.copytree(trained.out / "checkpoint-8", folder)
    if kind == "not ours":
        shutil.rmtree(folder / "surefoot")
    if kind == "damaged":
        (folder / "optimizer.pt").write_bytes(b"")
    refused(job.set(resume_from_checkpoint=str(folder)), "resume_from_checkpoint", "checkpoint-8")


def test_weights_that_nobody_wants_overwritten(job, trained, tmp_path):
    shutil.copytree(trained.out, job.out, ignore=shutil.ignore_patterns("checkpoint-*"))
    refused(job, "output_dir", "overwrite_output_dir")


@pytest.mark.parametrize("place", ["a file", "below a file", "below /proc", "a name too long"])
def test_a_run_directory_that_cannot_be(job, place):
    (job.folder / "file").write_text("")
    path = {
        "a file": job.folder / "file",
        "below a file": job.folder / "file" / "run",
        "below /proc": Path("/proc/surefoot/run"),
        "a name too long": job.folder / ("x" * 300),
    }[place]
    refused(job.set(output_dir=str(path)), "output_dir" if len(path.name) > 255 else str(path))


def test_a_run_directory_that_another_run_writes_into(job):
    from surefoot.files import only_writer

    with only_writer(job.out):
        refused(job, "output_dir", "another run")
    assert not job.out.exists()


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root to mount a small disk")
def test_a_full_disk(job, trained, tmp_path):
    """A disk with room for the first checkpoint only, that fills up in the middle of the second."""
    pages = sum(file.stat().st_size // 4096 + 1 for file in (trained.out / "checkpoint-2").rglob("*"))
    room = (pages * 3 // 2 + 12) * 4096
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        job.set(output_dir=str(disk / "run"), plot_loss=False)
        done = invoke("train", job.yaml)
        assert_refusal(done, "the disk is full", "disk/run/checkpoint-")
        assert_clean_stop(job.out)
        assert any(job.out.glob("checkpoint-*")), "the disk was meant to hold one"
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_limit_on_file_sizes(job):
    """As a quota would; in a process of its own, since the limit cannot be raised again."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    done = run("train", job.yaml, preexec_fn=limit, env=environment())
    assert_refusal(done, "too large")
    assert not job.out.exists() or assert_clean_stop(job.out) is None


def assert_clean_stop(out: Path):
    """What stands there is whole; nothing passes for a finished run."""
    from surefoot.train.checkpoint import find_checkpoints, read_checkpoint

    for folder in find_checkpoints(out):
        read_checkpoint(folder)
    assert not [p for p in out.rglob("*") if p.name.endswith((".tmp", ".old", ".removed"))]
    assert not (out / "adapter_model.safetensors").exists() and not (out / "all_results.json").exists()


# --- Other commands ---------------------------------------------------------------------------------------------


def test_chat_and_export_of_what_is_no_run(trained, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    (tmp_path / "file").write_text("")
    for command in ("chat", "export"):
        assert_refusal(invoke(command, tmp_path / "nowhere"), "nowhere")
        assert_refusal(invoke(command, tmp_path / "empty"), "empty")
    assert_refusal(invoke("export", trained.out, f"export_dir={tmp_path / 'full'}"), "full")
    assert_refusal(invoke("export", trained.out, f"export_dir={tmp_path / 'file'}"), "file")
    assert_refusal(invoke("export", trained.out, f"export_dir={tmp_path / 'file' / 'x'}"), "file")
    assert_refusal(invoke("export", trained.out, "export_dir=/proc/surefoot/model"), "/proc/surefoot/model")
    assert {p.name for p in tmp_path.iterdir()} == {"empty", "full", "file"}


# --- In processes of their own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "check", "chat", "export"])
def test_a_bad_yaml_needs_no_torch(job, command):
    """Thus `surefoot check` answers in a moment; seen by what is imported, not by the clock."""
    job.set(lora_rnak=8)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "surefoot", command, str(job.yaml)],
        capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    done.stderr = "".join(f"{x}\n" for x in done.stderr.splitlines() if not x.startswith("import time"))
    done.stdout = done.stdout.removesuffix("not ok\n") if command == "check" else done.stdout
    assert_refusal(done, "lora_rnak", "lora_rank")
    assert "surefoot.config.load" in imported
    assert not imported & {"torch", "transformers", "peft", "datasets", "numpy", "matplotlib"}


def test_a_refusal_in_a_real_process(job):
    """Nothing is said beyond what the in-process tests see: no library's warnings, no interpreter's noise."""
    job.set(model_name_or_path="./nowhere/model")
    assert_refusal(run("train", job.yaml, cwd=job.folder, env=environment()), "nowhere/model")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"optim_args": "momentun=0.9"}, "optim_args"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_circles": 3}}, "lr_scheduler_kwargs"),
    ],
)
def test_arguments_that_an_optimizer_or_a_schedule_lacks(job, settings, key):
    """`check` finds them before a model is loaded, as `train` does after."""
    job.rows(good_rows())
    refused(job.set(**settings), key)
    done = invoke("check", job.yaml, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 2 and [error["key"] for error in found["errors"]] == [key]
