"""The commands on a real, tiny job, one after the other as a person would type them."""

from __future__ import annotations

import json
import shlex

import pytest
from tiny_llama import build_model
from typer.testing import CliRunner

from surefoot.cli.main import app

YAML = """
model_name_or_path: {model}
dataset: rows
dataset_dir: {data}
template: chatml
finetuning_type: lora
lora_rank: 4
learning_rate: 1.0e-2
num_train_epochs: 2
per_device_train_batch_size: 2
per_device_eval_batch_size: 4
gradient_accumulation_steps: 2
val_size: 4
eval_strategy: steps
eval_steps: 4
logging_steps: 2
save_steps: 4
cutoff_len: 128
plot_loss: true
report_to: none
device: cpu
output_dir: {out}
"""
LLAMAFACTORY_FILES = {
    "README.md", "adapter_config.json", "adapter_model.safetensors", "all_results.json", "chat_template.jinja",
    "eval_results.json", "tokenizer.json", "tokenizer_config.json", "train_results.json", "trainer_log.jsonl",
    "trainer_state.json", "training_eval_loss.png", "training_loss.png",
}  # fmt: skip


def cli(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def job(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    rows = [{"instruction": f"say {n}", "input": "", "output": f"{n} " * 5} for n in range(20)]
    rows.append({"instruction": "broken", "input": "", "output": None})
    (folder / "data").mkdir()
    (folder / "data/rows.json").write_text(json.dumps(rows))
    (folder / "data/dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    (folder / "job.yaml").write_text(YAML.format(model=tiny_llama, data=folder / "data", out=folder / "run"))
    return folder


@pytest.fixture(scope="module")
def trained(job):
    return cli("train", job / "job.yaml"), job / "run"


def test_check_gives_the_document_of_the_contract(job):
    run = cli("check", job / "job.yaml", "--json")
    assert run.exit_code == 0, run.output
    answer = json.loads(run.stdout)
    assert list(answer) == ["ok", "errors", "warnings", "data", "plan"] and answer["ok"]
    assert (answer["data"]["rows_read"], answer["data"]["rows_used"]) == (21, 20)
    assert sum(answer["data"]["dropped"].values()) == 1
    assert {"passes", "tokens_per_pass", "recompute", "memory_gib"} <= set(answer["plan"])
    assert not (job / "run").exists()


def test_check_plans_for_a_card_that_is_not_here(job):
    shown = cli("check", job / "job.yaml", "--gpu", "mi300x")
    assert shown.exit_code == 0 and "Memory on Instinct MI300X (gfx942, 192 GiB), 191.0 GiB free" in shown.stdout
    assert "tokens a pass" in shown.stdout and "spare" in shown.stdout
    plan = json.loads(cli("check", job / "job.yaml", "--json", "--gpu", "gfx90a").stdout)["plan"]
    parts = plan["weights_gib"] + plan["trained_gib"] + plan["activations_gib"] + plan["loss_gib"]
    assert plan["available_gib"] == 63.0 and plan["spare_gib"] == pytest.approx(63.0 - plan["memory_gib"], abs=0.002)
    assert plan["memory_gib"] <= parts + 0.002
    unknown = cli("check", job / "job.yaml", "--gpu", "mi300")
    assert unknown.exit_code == 2 and "Instinct MI300X" in unknown.stderr


def test_check_plans_for_several_cards(job):
    shown = cli("check", job / "job.yaml", "--gpu", "mi300x", "--cards", "8", "--speed", "1000", "--price", "2")
    assert shown.exit_code == 0, shown.output
    assert "On 8 cards" in shown.stdout and "336 GB/s among them (arithmetic, not measured)" in shown.stdout
    assert "replicas, the model on each" in shown.stdout and "sharded" in shown.stdout
    assert "tokens/s" in shown.stdout and "price" in shown.stdout
    cards = json.loads(cli("check", job / "job.yaml", "--json", "--gpu", "gfx90a", "--cards", "2").stdout)["plan"][
        "cards"
    ]
    assert cards["replicas"]["fits"] and cards["sharded"]["fits"] and cards["number"] == 2
    assert cards["bus_gbs"] is None and cards["replicas"]["tokens_per_second"] is None and cards["measured"] is False


def test_check_finds_errors_in_several_places_at_once(job):
    run = cli("check", job / "job.yaml", "--json", "template=nonesuch", f"output_dir={job / 'job.yaml'}")
    answer = json.loads(run.stdout)
    assert run.exit_code == 2 and {error["key"] for error in answer["errors"]} >= {"template", None}


def test_a_trained_run_has_llamafactorys_files(trained):
    run, folder = trained
    assert run.exit_code == 0, run.stderr
    assert {path.name for path in folder.iterdir() if path.is_file()} >= LLAMAFACTORY_FILES
    assert {"resolved.yaml", "machine.json", "data_report.json"} <= {p.name for p in (folder / "surefoot").iterdir()}
    entries = [json.loads(line) for line in (folder / "trainer_log.jsonl").read_text().splitlines()]
    losses = [(entry["current_steps"], entry["loss"]) for entry in entries if "loss" in entry]
    assert [number for number, _ in losses] == [2, 4, 6, 8] and losses[-1][1] < losses[0][1]
    assert [entry["current_steps"] for entry in entries if "eval_loss" in entry] == [4, 8]
    assert json.loads((folder / "all_results.json").read_text())["eval_loss"] > 0


def test_stdout_holds_results_only_and_its_commands_work(trained):
    run, folder = trained
    lines = run.stdout.splitlines()
    assert lines[0] == f"Adapter: {folder}" and f"Plot: {folder / 'training_loss.png'}" in lines
    chat, export = (shlex.split(line.split("surefoot ")[1]) for line in lines if "surefoot " in line)
    answered = cli(*chat, "max_new_tokens=4", "--prompt", "say 3")
    assert answered.exit_code == 0, answered.stderr
    exported = cli(*export)
    assert exported.exit_code == 0, exported.stderr
    (chat_merged,) = (shlex.split(x.split("surefoot ")[1]) for x in exported.stdout.splitlines() if "surefoot " in x)
    assert cli(*chat_merged, "max_new_tokens=4", "--prompt", "say 3").exit_code == 0


def test_stderr_tells_the_device_the_data_and_what_was_dropped(trained):
    run, _ = trained
    for text in ("Device: CPU", "Data report", "rows", "Training done: 8 steps"):
        assert text in run.stderr, text


def test_a_run_that_meets_nan_ends_with_1_and_its_log_says_so(job, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    poisoned = build_model(tmp_path / "poisoned")
    model = AutoModelForCausalLM.from_pretrained(poisoned)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(poisoned)
    out = tmp_path / "run"
    words = ("train", job / "job.yaml", f"model_name_or_path={poisoned}", f"output_dir={out}")
    run = cli(*words)
    assert run.exit_code == 1 and "Traceback" not in run.stderr and run.stdout == ""
    assert "layers.0.mlp.up_proj.weight" in run.stderr, "named before step 1"
    run = cli(*words, "guard_preflight=false", "overwrite_output_dir=true")
    assert run.exit_code == 1 and "Traceback" not in run.stderr and run.stdout == ""
    entries = [json.loads(line) for line in (out / "trainer_log.jsonl").read_text().splitlines()]
    assert entries[-1]["loss"] is None and entries[-1]["nonfinite"] is True
    assert (out / "training_loss.png").exists() and not (out / "adapter_model.safetensors").exists()


def test_a_wrong_request_leaves_no_folder_behind(job, tmp_path):
    for override in ("dataset=nonesuch", "template=nonesuch", "lora_target=nonesuch", "model_name_or_path=./nonesuch"):
        run = cli("train", job / "job.yaml", override, f"output_dir={tmp_path / 'out'}")
        assert run.exit_code == 2 and "Traceback" not in run.stderr, run.stderr
        assert "nonesuch" in run.stderr and not (tmp_path / "out").exists(), override


def test_an_adapter_with_new_tokens_can_be_talked_to_and_merged(job, tmp_path):
    out = tmp_path / "run"
    words = (job / "job.yaml", "resize_vocab=true", "add_special_tokens=<unit>,<date>", f"output_dir={out}")
    assert cli("train", *words).exit_code == 0
    assert cli("chat", out, "max_new_tokens=3", "--prompt", "hi").exit_code == 0
    exported = cli("export", out, f"export_dir={tmp_path / 'merged'}")
    assert exported.exit_code == 0, exported.stderr
    rows = json.loads((tmp_path / "merged/config.json").read_text())["vocab_size"]
    assert rows >= 261 and rows % 64 == 0


def test_a_fully_trained_model_is_its_own_folder(job, tmp_path):
    out = tmp_path / "run"
    run = cli("train", job / "job.yaml", "finetuning_type=full", f"output_dir={out}")
    assert run.exit_code == 0 and run.stdout.startswith(f"Model: {out}\n") and "Merge" not in run.stdout
    assert cli("chat", out, "max_new_tokens=3", "--prompt", "hi").exit_code == 0


def test_a_stream_is_checked_too(job):
    run = cli("check", job / "job.yaml", "--json", "streaming=true", "max_steps=2", "val_size=0", "eval_strategy=no")
    answer = json.loads(run.stdout)
    assert run.exit_code == 0 and answer["data"]["streaming"] and answer["plan"]["tokens_per_pass"] > 0


@pytest.mark.parametrize(
    ("overwrites", "how"), [(False, "command goes on"), (True, "overwrite_output_dir=false goes on")]
)
def test_a_stopped_run_says_how_it_goes_on(tmp_path, overwrites, how):
    from surefoot.run.job import JobResult
    from surefoot.train.events import TrainResult

    stopped = TrainResult(steps=3, epoch=0.5, loss=1.0, seconds=1.0, samples=6, tokens=60, stopped_by="signal")
    lines = JobResult(stopped, tmp_path, (), is_adapter=True, overwrites=overwrites).summary()
    assert len(lines) == 1 and "step 3" in lines[0] and how in lines[0]
