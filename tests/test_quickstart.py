"""The quickstart's rows are right, apart from each other and the same every time; go.py keeps its promises."""

from __future__ import annotations

import datetime
import importlib.util
import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from surefoot.config import load_config

ROOT = Path(__file__).resolve().parents[1]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_rows = load("examples/quickstart/make_rows.py")

METRES = {"km": 1000, "m": 1, "cm": Fraction(1, 100), "mm": Fraction(1, 1000)}
GRAMS = {"kg": 1000, "g": 1, "mg": Fraction(1, 1000)}
LITRES = {"l": 1, "ml": Fraction(1, 1000)}
SHORT = {name: unit for unit, name in make_rows.SPELLED.items()}


def read_date(question: str) -> datetime.date:
    """The date in a question, read independently of how it was written: y/m/d, d.m.y, or with a month's name."""
    if found := re.search(r"(\d{4})/(\d+)/(\d+)", question):
        return datetime.date(*map(int, found.groups()))
    if found := re.search(r"(\d+)\.(\d+)\.(\d{4})", question):
        day, month, year = map(int, found.groups())
        return datetime.date(year, month, day)
    months = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
    name = re.search(r"\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)", question.lower())
    day, year = re.search(r"\b(\d{1,2})(?:st|nd|rd|th)?\b", question), re.search(r"\b(\d{4})\b", question)
    assert name and day and year, question
    return datetime.date(int(year[1]), months.index(name[1]) + 1, int(day[1]))


def test_every_answer_is_right_and_on_one_line() -> None:
    training, heldout = make_rows.make_rows(400, 100, seed=3)
    for row in training + heldout:
        question, answer = row["instruction"], json.loads(row["output"])
        assert "\n" not in row["output"]
        if "date" in answer:
            assert answer == {"date": read_date(question).isoformat()}
            continue
        number = Fraction(re.search(r"\d+(\.\d+)?", question)[0])
        units = [
            SHORT.get(word, word) for word in re.findall(r"[a-z]+", question) if SHORT.get(word, word) in SHORT.values()
        ]
        if question.startswith("How many"):
            units.reverse()
        (scale,) = [table for table in (METRES, GRAMS, LITRES) if set(units) <= set(table)]
        assert answer["unit"] == units[1]
        assert Fraction(str(answer["value"])) == number * scale[units[0]] / scale[units[1]], row


def test_held_out_problems_are_not_learnt_from_whatever_their_wording() -> None:
    training, heldout = make_rows.make_rows(560, 100, seed=7)

    def problem(row: dict[str, str]) -> Any:
        number = re.search(r"\d+(\.\d+)?", row["instruction"])
        return row["output"] if "date" in row["output"] else (number and number[0], row["output"])

    assert not {problem(row) for row in training} & {problem(row) for row in heldout}
    assert len({row["instruction"] for row in training}) == 560


def test_the_same_seed_gives_the_same_rows_and_another_gives_others() -> None:
    assert make_rows.make_rows(20, 5, seed=1) == make_rows.make_rows(20, 5, seed=1)
    assert make_rows.make_rows(20, 5, seed=1) != make_rows.make_rows(20, 5, seed=2)


def test_the_yaml_is_read_without_a_warning() -> None:
    config = load_config(ROOT / "examples/quickstart.yaml", purpose="train")
    assert config.warnings == []
    assert (config.compute_dtype, config.device) == ("float32", "cpu")


@pytest.mark.slow
def test_a_few_steps_teach_the_real_model_and_plain_peft_can_read_what_it_learnt(tmp_path: Path) -> None:
    import torch

    score, folder = load("examples/quickstart/score.py"), tmp_path / "rows"
    folder.mkdir()
    training, _ = make_rows.make_rows(12, 1, seed=7)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in training))
    (folder / "dataset_info.json").write_text(json.dumps({"json_answers": {"file_name": "train.jsonl"}}))
    yaml, output = ROOT / "examples/quickstart.yaml", tmp_path / "out"
    overrides = [f"dataset_dir={folder}", f"output_dir={output}", "num_train_epochs=2", "plot_loss=false"]
    command = [sys.executable, "-m", "surefoot.cli.main", "train", str(yaml), *overrides]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr

    def loss(adapter: str | None) -> float:
        """Mean loss of the answers' tokens, by transformers alone."""
        config = load_config(yaml, purpose="chat")
        model, tokenizer = score.load_model(config, adapter)
        losses = []
        for row in training[:4]:
            chat = [
                {"role": "system", "content": config.default_system},
                {"role": "user", "content": row["instruction"]},
                {"role": "assistant", "content": row["output"]},
            ]
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            prompt = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, return_tensors="pt").input_ids
            labels = ids.clone()
            labels[:, : len(tokenizer(prompt).input_ids)] = -100
            with torch.inference_mode():
                losses.append(model(input_ids=ids, labels=labels).loss.item())
        return sum(losses) / len(losses)

    assert loss(str(output)) < 0.8 * loss(None)


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """go.py on a folder of its own, with nothing really installed."""
    module = load("go.py")
    (tmp_path / "pyproject.toml").write_text("x")
    venv = tmp_path / ".venv"
    for name, value in {"ROOT": tmp_path, "VENV": venv, "DONE": venv / "done.json", "LOG": venv / "log"}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "PYTHON", venv / "python")
    monkeypatch.setattr(module, "make_venv", lambda outside: venv.mkdir(exist_ok=True))
    return module


def fake_pip(
    go: ModuleType, monkeypatch: pytest.MonkeyPatch, torch: dict[str, str | None], after: dict[str, str]
) -> list[str]:
    """pip that notes what it is asked, constraints spelled out, and leaves `after` as the environment's torch."""
    asked: list[str] = []

    def pip(*arguments: str) -> None:
        words = [Path(word).read_text().strip() if word.endswith("constraints.txt") else word for word in arguments]
        asked.append(" ".join(words))
        torch["venv"] = after.get(arguments[1], torch["venv"])

    monkeypatch.setattr(go, "pip", pip)
    monkeypatch.setattr(go, "torch_version", lambda python: torch["venv" if python == go.PYTHON else "outside"])
    return asked


def test_a_torch_that_is_there_is_pinned_and_never_installed(go: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    torch: dict[str, str | None] = {"outside": "2.9.0+rocm6.4", "venv": "2.9.0+rocm6.4"}
    asked = fake_pip(go, monkeypatch, torch, {})
    go.make_venv("")
    go.set_up(["demo"])
    assert asked == [f"install --constraint torch==2.9.0+rocm6.4 --editable {go.ROOT}[demo]"]
    go.set_up(["demo"])
    assert len(asked) == 1  # nothing to do the second time
    go.set_up(["demo", "dev"])
    (go.ROOT / "pyproject.toml").write_text("y")
    go.set_up(["demo"])
    assert len(asked) == 3


def test_a_torch_that_got_replaced_is_an_error(go: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    torch: dict[str, str | None] = {"outside": "2.9.0+rocm6.4", "venv": "2.9.0+rocm6.4"}
    fake_pip(go, monkeypatch, torch, {"--constraint": "2.13.0"})
    go.make_venv("")
    with pytest.raises(go.GoError, match=r"replaced torch 2\.9\.0\+rocm6\.4 with 2\.13\.0"):
        go.set_up(["demo"])


def test_only_where_there_is_no_torch_one_is_installed(go: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    torch: dict[str, str | None] = {"outside": None, "venv": None}
    asked = fake_pip(go, monkeypatch, torch, {go.TORCH: "2.13.0+cpu"})
    monkeypatch.setattr(go.importlib.util, "find_spec", lambda name: None)
    go.set_up(["demo"])
    assert asked[0] == f"install {go.TORCH}" and "torch==2.13.0+cpu" in asked[1]


def test_a_broken_torch_is_not_quietly_replaced(go: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_pip(go, monkeypatch, {"outside": None, "venv": None}, {})
    monkeypatch.setattr(go.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(go.GoError, match="cannot be imported"):
        go.set_up(["demo"])
    assert asked == []


@pytest.mark.parametrize(("before", "after", "code"), [(0.0, 93.0, 0), (0.0, 80.0, 1), (40.0, 93.0, 1)])
def test_the_quickstart_fails_unless_the_model_learnt(
    before: float, after: float, code: int,
    go: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(go, "set_up", lambda extras: None)
    monkeypatch.setattr(go, "SCRIPTS", go.VENV / "bin")

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "--json" in command:
            file = Path(command[command.index("--json") + 1])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"exact_match": after if "--adapter" in command else before}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(go.subprocess, "run", run)
    assert go.quickstart() == code
    shown = capsys.readouterr().out
    assert "training_loss.png" in shown and "surefoot chat" in shown and "surefoot export" in shown


def test_a_stage_that_fails_ends_it(go: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(go.GoError, match="exit code 3: some stage"):
        go.stage("some stage", [sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("ERROR: Temporary failure in name resolution", "registry could not be reached"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: something else", "Run this again"),
    ],
)
def test_what_pip_says_is_explained(output: str, says: str, go: ModuleType) -> None:
    assert says in go.explain_pip(output) and output in go.explain_pip(output)
