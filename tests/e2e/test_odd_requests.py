"""What a person may do that is unusual, and what may go wrong in the middle of it."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
from lab import Job, build_model, environment, good_rows, invoke, log_entries, make_job, run, start
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def job(model, tmp_path):
    return make_job(tmp_path / "job", model)


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    job = make_job(tmp_path_factory.mktemp("trained") / "job", model)
    assert invoke("train", job.yaml).exit_code == 0
    return job


def errors(done) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


def poison(folder: Path, name: str | None = None) -> Path:
    """Make one number of a saved weight NaN."""
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[name or min(tensors)].view(-1)[0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


# --- Nothing that the person has is destroyed -------------------------------------------------------------------


def test_overwriting_never_reaches_the_base_model(job, model, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(model, own)
    before = (own / "model.safetensors").read_bytes()
    done = invoke("train", job.yaml, f"model_name_or_path={own}", f"output_dir={own}", "overwrite_output_dir=true")
    assert done.exit_code == 2 and "destroy" in done.stderr
    assert (own / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("part", [".", "checkpoint-4"])
def test_overwriting_never_reaches_the_adapter_that_it_starts_from(job, trained, tmp_path, part):
    shutil.copytree(trained.out, job.out)
    job.set(adapter_name_or_path=str(job.out / part), overwrite_output_dir=True)
    done = invoke("train", job.yaml)
    assert done.exit_code == 2 and "destroy" in done.stderr
    assert (job.out / part / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("place", ["the last save", "the third checkpoint"])
def test_a_disk_that_fills_up_late_leaves_what_was_whole(job, monkeypatch, place):
    from surefoot.train import checkpoint, run

    module = run if place == "the last save" else checkpoint
    save = module.save_model
    done_before = [0]

    def no_space(folder, model, tokenizer, **_):
        save(folder, model, tokenizer)
        done_before[0] += 1
        if place == "the last save" or done_before[0] == 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_model", no_space)
        done = invoke("train", job.yaml)
    assert done.exit_code == 2 and len(errors(done)) == 1 and "the disk is full" in done.stderr
    assert not (job.out / "adapter_model.safetensors").exists()
    last = 8 if place == "the last save" else 4
    assert max(int(p.name.split("-")[1]) for p in job.out.glob("checkpoint-*")) == last
    again = invoke("train", job.yaml)
    assert again.exit_code == 0 and f"{last} of them done before" in again.stderr
    steps = [entry["current_steps"] for entry in log_entries(job.out) if "loss" in entry]
    assert steps == list(range(1, 9))


@pytest.mark.slow
def test_of_two_runs_into_one_folder_the_second_is_refused(job):
    """The first must be neither disturbed nor waited for."""
    job.set(num_train_epochs=40.0, save_steps=1000)
    first = start("train", job.yaml, env=environment(SUREFOOT_CACHE=str(job.folder / "cache")))
    while not (job.out / "trainer_log.jsonl").exists():
        assert first.poll() is None, first.communicate()
    second = invoke("train", job.yaml)
    assert first.poll() is None, "it was meant to be still running"
    assert second.exit_code == 2 and "another run is writing into" in second.stderr
    _, stderr = first.communicate(timeout=60)
    assert first.returncode == 0, stderr


# --- Numbers that are none --------------------------------------------------------------------------------------


def test_nan_in_the_model_stops_the_run_with_1(job, model, tmp_path):
    shutil.copytree(model, tmp_path / "bad")
    poison(tmp_path / "bad", "model.layers.0.mlp.up_proj.weight")
    done = invoke("train", job.yaml, f"model_name_or_path={tmp_path / 'bad'}")
    assert done.exit_code == 1 and done.stdout == "" and len(errors(done)) == 1
    assert "up_proj" in done.stderr and not list(job.out.glob("*.safetensors"))


def test_nan_in_an_adapter_is_said_by_every_command(job, trained, tmp_path):
    bad = tmp_path / "bad"
    shutil.copytree(trained.out, bad, ignore=shutil.ignore_patterns("checkpoint-*"))
    poison(bad)
    for words in (
        ("train", job.yaml, f"adapter_name_or_path={bad}"),
        ("chat", bad, "--prompt", "say 3", "max_new_tokens=2"),
        ("chat", bad, "--prompt", "say 3", "max_new_tokens=2", "do_sample=false"),
        ("export", bad, f"export_dir={tmp_path / 'merged'}"),
    ):
        done = invoke(*words)
        assert done.exit_code == 1 and len(errors(done)) == 1, (words, done.stderr)
        assert "unexpected" not in done.stderr and ("NaN" in done.stderr or "not finite" in done.stderr)
    assert not (tmp_path / "merged").exists()


# --- Names ------------------------------------------------------------------------------------------------------

NAMES = [
    "a run",
    "zwölf 跑",
    "a,b",
    "run [1]",
    "null",
    "true",
    "1e5",
    "#1",
    "run #1",
    "a: b",
    "a=b",
    '"q"',
    "it's",
    "$HOME",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_directory_of_any_name_can_be_used(job, tmp_path, monkeypatch, name):
    """Some of these mean something to YAML, to a shell, or to lists that are separated by commas."""
    monkeypatch.chdir(tmp_path)
    job.set(output_dir=str(tmp_path / name), max_steps=1)
    done = invoke("train", job.yaml)
    assert done.exit_code == 0, done.stderr
    chat, merge = (shlex.split(line.split("surefoot ")[1]) for line in done.stdout.splitlines() if "surefoot " in line)
    for words in ((*chat, "--prompt", "x"), ("chat", name, "--prompt", "x"), merge, ("export", name)):
        answered = invoke(*words, "max_new_tokens=1")
        assert answered.exit_code == 0, (words, answered.stderr)
        if words[0] == "chat":
            assert f"adapter: {words[1]};" in answered.stderr
    assert (tmp_path / f"{name}-merged" / "model.safetensors").exists()


def test_a_run_directory_may_be_moved(trained, tmp_path):
    """What is made from it goes beside the place where it is, not where it was."""
    shutil.copytree(trained.out, tmp_path / "moved")
    done = invoke("export", tmp_path / "moved")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "moved-merged" / "model.safetensors").exists()


def test_a_tilde_is_the_home_folder(job, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    done = invoke("train", job.yaml, "output_dir=~/run", "max_steps=1")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "home/run/adapter_model.safetensors").exists() and not (tmp_path / "~").exists()


# --- Data -------------------------------------------------------------------------------------------------------


def lines(rows: list) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\r\n" for row in rows)


ENCODINGS = {
    "CRLF": ("rows.jsonl", lines),
    "a byte order mark": ("rows.json", lambda rows: b"\xef\xbb\xbf" + json.dumps(rows).encode()),
    "UTF-16": ("rows.json", lambda rows: json.dumps(rows).encode("utf-16")),
    "lines in a .json": ("rows.json", lines),
    "a list in a .jsonl": ("rows.jsonl", lambda rows: json.dumps(rows, indent=1).encode()),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_same_rows_in_another_dress_train_the_same_weights(job, trained, name):
    file, dress = ENCODINGS[name]
    job.rows(dress(good_rows()), file)
    job.dataset(file_name=file)
    assert invoke("train", job.yaml).exit_code == 0
    weights = "adapter_model.safetensors"
    assert (job.out / weights).read_bytes() == (trained.out / weights).read_bytes()


def test_rows_of_every_kind_are_counted_by_reason(job):
    odd = [
        {"instruction": "null", "output": None}, {"instruction": "", "output": "x"}, {"output": "no question"},
        {"instruction": "a list", "output": ["x"]}, "text", None, 3, [], {},
    ]  # fmt: skip
    job.rows(good_rows() + odd)
    answer = json.loads(invoke("check", job.yaml, "--json").stdout)
    data = answer["data"]
    assert answer["ok"] and data["rows_read"] == 16 + len(odd)
    assert data["rows_used"] + sum(data["dropped"].values()) == data["rows_read"] and data["rows_used"] < 20
    named = {row for ids in data["dropped_ids"].values() for row in ids}
    assert named <= {f"rows:{16 + n}" for n in range(len(odd))}
    assert len(named) == sum(data["dropped"].values()) and answer["warnings"], "more than a tenth is said loudly"


def test_one_row_far_beyond_the_cut_off(job):
    job.rows([*good_rows(), {"instruction": "long", "output": "y" * 2_000_000}])
    answer = json.loads(invoke("check", job.yaml, "--json").stdout)
    assert answer["ok"] and answer["data"]["truncated"] == 1 and answer["data"]["lengths"]["max"] <= 128


# --- Machines ---------------------------------------------------------------------------------------------------

PURE = [
    (), ("lora_rnak=8",), ("dataset=nowhere",), ("template=nowhere",), ("model_name_or_path=./no/where",),
    ("lora_target=nowhere",), ("adapter_name_or_path=./no/where",), ("resume_from_checkpoint=./no/where",),
    ("output_dir=/proc/x/y",), ("val_size=99",), ("seed=99999999999",), ("model_name_or_path=/" + "m" * 300,),
]  # fmt: skip


@pytest.mark.parametrize("words", PURE, ids=lambda words: words[0][:24] if words else "good")
def test_check_json_is_one_document_whatever_is_wrong(job, words):
    done = invoke("check", job.yaml, "--json", *words)
    answer = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1 and done.stderr == ""
    assert answer["ok"] is (not words) and done.exit_code == (2 if words else 0)
    assert len(answer["errors"]) == bool(words) and all(error["message"] for error in answer["errors"])
    assert not job.out.exists()


def test_a_bare_environment(job: Job):
    """No home, an ASCII terminal, no input: as in a container or a cron job."""
    env = environment(SUREFOOT_CACHE=str(job.folder / "cache"), LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    env = {key: value for key, value in env.items() if key not in ("HOME", "USER", "TERM", "LANG")}
    job.rows([*good_rows(), {"instruction": "grüße 你好", "output": "😀"}])
    done = run("train", job.yaml, "max_steps=2", env=env, stdin=os.open(os.devnull, os.O_RDONLY))
    assert done.returncode == 0, done.stderr
    assert str(job.out) in done.stdout
