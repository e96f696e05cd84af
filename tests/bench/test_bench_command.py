"""`surefoot bench` as a person types it, on a tiny job on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from surefoot.bench import ceilings, job
from surefoot.cli.main import app

YAML = """
model_name_or_path: {model}
dataset: rows
dataset_dir: {data}
template: chatml
finetuning_type: lora
lora_rank: 4
max_steps: 3
save_steps: 1
eval_strategy: steps
eval_steps: 1
val_size: 4
overwrite_output_dir: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
cutoff_len: 128
device: cpu
report_to: none
output_dir: {out}
"""


def cli(*words):
    return CliRunner().invoke(app, ["bench", *(str(word) for word in words)])


@pytest.fixture(scope="module", autouse=True)
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "ROUND_SECONDS", 0.001)
        patch.setattr(ceilings, "LARGEST_SIDE", {"cpu": 256})
        patch.setattr(ceilings, "COPY_BYTES", {"cpu": 2**20})
        yield


@pytest.fixture(scope="module")
def yaml(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    rows = [{"instruction": f"say {n}", "input": "", "output": f"{n} " * 5} for n in range(20)]
    (folder / "data").mkdir()
    (folder / "data/rows.json").write_text(json.dumps(rows))
    (folder / "data/none.json").write_text(json.dumps([{"instruction": "a", "input": "", "output": None}]))
    (folder / "data/dataset_info.json").write_text(
        json.dumps({name: {"file_name": f"{name}.json"} for name in ("rows", "none")})
    )
    (folder / "job.yaml").write_text(YAML.format(model=tiny_llama, data=folder / "data", out=folder / "run"))
    # What a run has left: a bench neither goes on from it nor overwrites it, whatever the YAML says.
    (folder / "run/checkpoint-2").mkdir(parents=True)
    (folder / "run/surefoot").mkdir()
    for name in ("adapter_model.safetensors", "checkpoint-2/trainer_state.json", "surefoot/guard.jsonl"):
        (folder / "run" / name).write_text("theirs")
    return folder / "job.yaml"


def files_below(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_job_is_measured_and_its_folder_untouched(yaml, tmp_path):
    before = files_below(yaml.parent)
    run = cli(yaml, "--steps", 2, "--json", "--out", tmp_path / "out")
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert files_below(yaml.parent) == before
    assert list(found) == ["device", "name", "torch", "ceilings", "job", "plot"]
    step = found["job"]
    assert step["steps"] == len(step["step_ms"]) == 2 and step["dtype"] == "float32"
    assert step["tokens"] > step["trained_tokens"] > 0 and step["memory_gib"] > 0
    rates = [tokens / ms * 1e3 for tokens, ms in zip(step["step_tokens"], step["step_ms"], strict=True)]
    assert step["tokens_per_second"] == pytest.approx(sum(rates) / 2)
    assert step["tokens"] == sum(step["step_tokens"]) / 2 and step["ms"] == pytest.approx(sum(step["step_ms"]) / 2)
    assert step["share"] == pytest.approx(step["tokens_per_second"] / step["ceiling_tokens_per_second"])
    assert step["ceiling_tokens_per_second"] == pytest.approx(
        step["tokens"] * step["tflops"] * 1e12 / step["arithmetic"]["total"]
    )
    assert [rate["name"] for rate in step["shapes"]] == [
        "q_proj, o_proj", "k_proj, v_proj", "gate_proj, up_proj", "down_proj", "head"
    ]  # fmt: skip
    assert step["profile"]["kinds"]["GEMM"] > 0 and step["profile"]["top"][0]["ms"] > 0
    assert (tmp_path / "out/bench.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out/bench.png"]
    for sentence in ("Measuring memory copies.", "Loading the model.", "Warm-up: 1 step.", "Profiling one step."):
        assert sentence in run.stderr


def test_the_table_names_the_step_the_ceiling_and_the_kinds(yaml, tmp_path):
    run = cli(yaml, "--steps", 1, "--out", tmp_path, "finetuning_type=full", "bf16=true")
    assert run.exit_code == 0, run.output
    for words in ("Measured ceilings", "time a step", "share of the ceiling", "between operators", "GEMM", "bench.png"):
        assert words in run.stdout
    assert "Timing 1 step.\n" in run.stderr
    assert "in bfloat16" in run.stdout and "frozen 0%" in run.stdout


def test_without_a_yaml_the_machine_alone_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = cli("--json", "--device", "cpu")
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert found["job"] is None and found["plot"] == "surefoot-bench/bench.png" and (tmp_path / found["plot"]).exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("lora_rnak=8",), "lora_rnak"),
        (("dataset=none",), "none of the 1 rows can be used"),
        (("model_name_or_path=./nowhere",), "nowhere"),
        (("--steps", "0"), "nothing to time"),
        (("--device", "tpu"), "device"),
    ],
)
def test_a_wrong_request_ends_with_2_and_leaves_nothing(yaml, tmp_path, words, says):
    run = cli(yaml, "--out", tmp_path / "out", *words)
    assert run.exit_code == 2 and "error: " in run.stderr and says in run.stderr, run.output
    assert not (tmp_path / "out").exists() and run.stdout == ""


def test_a_missing_yaml_ends_with_2(tmp_path):
    run = cli(tmp_path / "none.yaml", "--out", tmp_path / "out")
    assert run.exit_code == 2 and "none.yaml" in run.stderr


def test_out_of_memory_is_one_clear_line(yaml, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate")

    monkeypatch.setattr(job, "load_model", full)
    run = cli(yaml, "--out", tmp_path / "out")
    assert run.exit_code == 1 and "error: out of memory on cpu" in run.stderr and "surefoot check" in run.stderr
    monkeypatch.setattr(job, "load_model", lambda *_: (_ for _ in ()).throw(RuntimeError("can't allocate memory: you")))
    assert "error: out of memory on cpu" in cli(yaml, "--out", tmp_path / "out").stderr
    monkeypatch.setattr(job, "load_model", lambda *_: (_ for _ in ()).throw(RuntimeError("another fault")))
    assert "another fault" in cli(yaml, "--out", tmp_path / "out").stderr


def test_a_bad_yaml_costs_no_import_of_torch(tmp_path):
    (tmp_path / "bad.yaml").write_text("model_name_or_path: x\nlora_rnak: 8\n")
    code = (
        "import sys; from surefoot.cli.main import app\n"
        f"try: app(['bench', {str(tmp_path / 'bad.yaml')!r}])\n"
        "except SystemExit as end: print(end.code, [m for m in ('torch', 'matplotlib', 'rich') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "2 []", run.stderr


def test_each_part_of_a_job_in_fp8_gets_its_own_rate(yaml, tmp_path, monkeypatch):
    """On a CPU fp8 is not measured, so a job that multiplies in it is refused; with a rate for it, it is used."""
    monkeypatch.setattr(job, "computes_in_fp8", lambda model: True)
    run = cli(yaml, "--steps", 1, "--out", tmp_path)
    assert run.exit_code == 1 and "cpu does not multiply in fp8" in run.stderr, run.output
    square = ceilings.Rate("fp8", "square", 8, 8, 8, 50.0)
    real = ceilings.measure_ceilings

    def with_fp8(*arguments):
        found = real(*arguments)
        return ceilings.Ceilings(found.copy_gb_per_second, (*found.squares, square), {})

    monkeypatch.setattr(ceilings, "measure_ceilings", with_fp8)
    run = cli(yaml, "--steps", 1, "--json", "--out", tmp_path)
    assert run.exit_code == 0, run.output
    step = json.loads(run.stdout)["job"]
    work, rate = step["arithmetic"], step["tflops"] * 1e12
    seconds = work["frozen"] / 50e12 + (work["total"] - work["frozen"]) / rate
    assert (step["frozen_dtype"], step["frozen_tflops"]) == ("fp8", 50.0)
    assert step["ceiling_tokens_per_second"] == pytest.approx(step["tokens"] / seconds)
    assert next(rate["name"] for rate in step["shapes"] if rate["dtype"] == "fp8") == "q_proj, o_proj"
