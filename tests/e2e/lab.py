"""A place to run the real command line in: a tiny model, a few rows, a YAML, and a process to train them in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import surefoot

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"

CHATML_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3_MARKS = (
    "<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
)  # fmt: skip


def build_tokenizer(marks: Sequence[str] = CHATML_MARKS) -> Any:
    """Every byte is a token, and so is every mark; the first mark ends texts and pads them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    begins = {"bos_token": "<|begin_of_text|>"} if "<|begin_of_text|>" in marks else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=marks[0], pad_token=marks[0], **begins)


def build_model(folder: Path, marks: Sequence[str] = CHATML_MARKS, seed: int = 0, **changes: Any) -> Path:
    """Save a random Llama of two layers with its tokenizer, as `model_name_or_path` can name it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer(marks)
    settings = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "initializer_range": 0.1,
    }  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(settings | changes))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def good_rows(count: int = 16) -> list[dict[str, Any]]:
    """Rows of unequal lengths that a run can be made of."""
    return [{"instruction": f"say {n}", "input": "", "output": f"{n} " * (n % 5 + 2)} for n in range(count)]


@dataclass
class Job:
    """A folder with a model, rows and a YAML.

    Attributes:
        folder: holds `data/`, `job.yaml`, and `run/` once it has been trained.
        settings: of the YAML.
    """

    folder: Path
    settings: dict[str, Any]

    @property
    def yaml(self) -> Path:
        """The YAML as it stands."""
        return self.folder / "job.yaml"

    @property
    def out(self) -> Path:
        """The run directory."""
        return Path(self.settings["output_dir"])

    def rows(self, content: Any, name: str = "rows.json") -> Path:
        """Write the rows' file: as JSON, or as it is when it is text or bytes."""
        file = self.folder / "data" / name
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return file

    def dataset(self, **description: Any) -> None:
        """Describe the dataset `rows` in dataset_info.json."""
        self.rows({"rows": {"file_name": "rows.json"} | description}, "dataset_info.json")

    def set(self, **changes: Any) -> Job:
        """Change settings and write the YAML; None removes a key."""
        self.settings |= changes
        self.settings = {key: value for key, value in self.settings.items() if value is not None}
        # JSON is YAML.
        self.yaml.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in self.settings.items()))
        return self


def make_job(folder: Path, model: Path, **changes: Any) -> Job:
    """Set up a job that trains 8 steps in a moment."""
    (folder / "data").mkdir(parents=True)
    settings = {
        "model_name_or_path": str(model), "dataset": "rows", "dataset_dir": str(folder / "data"),
        "template": "chatml", "lora_rank": 4, "learning_rate": 1e-2, "num_train_epochs": 2.0,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "save_steps": 2,
        "cutoff_len": 128, "report_to": "none", "device": "cpu", "output_dir": str(folder / "run"),
    }  # fmt: skip
    job = Job(folder, settings)
    job.rows(good_rows())
    job.dataset()
    return job.set(**changes)


def environment(**more: str) -> dict[str, str]:
    """The variables of a child process: one thread, the tested package first on the path."""
    paths = [str(Path(surefoot.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    if "PYTHONPATH" in more:
        paths.insert(0, more.pop("PYTHONPATH"))
    base = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    # A terminal's width would break lines of the report.
    return base | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "200"} | more


def start(*words: Any, cwd: Path | None = None, env: Mapping[str, str] | None = None, **more: Any) -> subprocess.Popen:
    """Start the command line in a process of its own."""
    command = [sys.executable, "-m", "surefoot", *map(str, words)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        command, cwd=cwd, env=dict(env or environment()), text=True, encoding="utf-8", **(pipes | more)
    )


def run(*words: Any, timeout: float = 120, **more: Any) -> subprocess.CompletedProcess:
    """Run the command line in a process of its own until it ends."""
    process = start(*words, **more)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def invoke(*words: Any) -> Any:
    """Run the command line in this process."""
    from typer.testing import CliRunner

    from surefoot.cli.main import app

    return CliRunner().invoke(app, [str(word) for word in words])


def log_entries(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's trainer_log.jsonl."""
    return [json.loads(line) for line in (out / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()]
