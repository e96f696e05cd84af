"""The two YAMLs of the issue, unchanged, through the real command line on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from lab import EXAMPLES, LLAMA3_MARKS, build_model, environment, invoke, log_entries, run
from omegaconf import OmegaConf

HERE = Path(__file__).parent
NO_GPU = "No AMD or NVIDIA card is in sight"

# Put on a child's path as `sitecustomize`: notes in which dtypes each kind of linear layer reads and answers.
PROBE = """
import atexit, json, os, pathlib
import torch

seen = set()

def note(module, inputs, output):
    if "Linear" in type(module).__name__ and module.training and torch.is_grad_enabled():
        base = getattr(module, "base_layer", module)
        seen.add((type(module).__name__, str(base.weight.dtype), str(output.dtype)))

torch.nn.modules.module.register_module_forward_hook(note)
atexit.register(lambda: seen and pathlib.Path(os.environ["SEEN"]).write_text(json.dumps(sorted(seen))))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder as a person has it: the model beside the data, in LLaMA-Factory's default `dataset_dir`."""
    folder = tmp_path_factory.mktemp("article")
    build_model(folder / "tiny-llama3", LLAMA3_MARKS)
    shutil.copytree(EXAMPLES, folder / "data")
    (folder / "probe").mkdir()
    (folder / "probe" / "sitecustomize.py").write_text(PROBE)
    return folder


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        ("article_fp16", "torch.float16", "Precision: float16 autocast, float32 trainable parameters."),
        ("article_fp32", "torch.float32", "Precision: float32, float32 trainable parameters."),
    ],
)
def test_the_yaml_trains_and_plots_as_it_stands(place, name, dtype, said):
    seen = place / f"{name}.json"
    env = environment(PYTHONPATH=str(place / "probe"), SEEN=str(seen), SUREFOOT_CACHE=str(place / "cache"))
    done = run("train", HERE / f"{name}.yaml", cwd=place, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert said in lines
    assert sum(NO_GPU in line for line in lines) == 1 and not any("warning" in line.lower() for line in lines)

    out = place / "saves" / f"tiny-llama3-lora-{name}"
    assert f"Plot: {out.relative_to(place) / 'training_loss.png'}" in done.stdout.splitlines()
    assert (out / "training_loss.png").read_bytes().startswith(b"\x89PNG")
    # 62 rows, 8 a step, 3 epochs: transformers' defaults.
    assert [entry["current_steps"] for entry in log_entries(out)][:2] == [10, 20]
    assert all(entry["total_steps"] == 24 and entry.get("loss", 1.0) > 0 for entry in log_entries(out))

    # What the layers really computed in, not what the run says of itself.
    kinds = {tuple(kind) for kind in json.loads(seen.read_text())}
    assert any("Lora" in kind for kind, _, _ in kinds)
    assert {(weight, output) for _, weight, output in kinds} == {(dtype, dtype)}, kinds


def test_the_yamls_are_those_of_the_issue():
    """Nothing may creep in that would make them easier."""
    (half, full) = (OmegaConf.to_container(OmegaConf.load(HERE / f"article_fp{bits}.yaml")) for bits in (16, 32))
    assert half == {
        "model_name_or_path": "./tiny-llama3", "dataset": "alpaca_en_demo", "template": "llama3",
        "finetuning_type": "lora", "lora_target": "all", "bf16": False, "fp16": True, "optim": "adamw_torch",
        "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "max_grad_norm": 1.0, "logging_steps": 10,
        "save_steps": 500, "plot_loss": True, "overwrite_cache": False, "preprocessing_num_workers": 4,
    }  # fmt: skip
    assert full == half | {"fp16": False, "compute_dtype": "float32"}


@pytest.mark.parametrize("how", ["device=cpu", "use_cpu=true"])
def test_a_card_that_torch_cannot_use_stops_the_run_unless_the_cpu_is_asked_for(place, monkeypatch, how):
    from surefoot.machine import device

    monkeypatch.chdir(place)
    monkeypatch.setattr(device, "cards_in_sight", lambda root=Path("/"): ["AMD card at 0000:c1:00.0"])
    words = ("train", HERE / "article_fp32.yaml", "max_steps=1", f"output_dir={how}")
    refused = invoke(*words)
    assert refused.exit_code == 2 and not (place / how).exists()
    (error,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert "AMD card at 0000:c1:00.0" in error and "surefoot doctor" in refused.stderr
    allowed = invoke(*words, how)
    assert allowed.exit_code == 0, allowed.stderr
    assert "Device: CPU, as the YAML asks." in allowed.stderr
