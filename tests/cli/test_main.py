from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from surefoot import __version__
from surefoot.cli.main import app
from surefoot.cli.request import split_request

COMMANDS = ("train", "check", "chat", "export", "env", "version")
GOOD = "model_name_or_path: {model}\ndataset: rows\ndataset_dir: {data}\ntemplate: chatml\noutput_dir: {out}\n"


def cli(*words, **more):
    return CliRunner().invoke(app, list(words), **more)


def in_a_process(*words):
    return subprocess.run([sys.executable, "-m", "surefoot.cli.main", *words], capture_output=True, text=True)


def test_help_names_every_command():
    run = cli("--help")
    assert run.exit_code == 0 and all(f"\n  {name} " in run.stdout for name in COMMANDS)


def test_help_and_a_bad_yaml_import_nothing_heavy(tmp_path):
    heavy = ("torch", "transformers", "peft", "datasets", "matplotlib", "rich")
    (tmp_path / "bad.yaml").write_text("model_name_or_path: x\nlora_rnak: 8\n")
    for words in (["--help"], ["check", str(tmp_path / "bad.yaml"), "--json"]):
        code = (
            "import sys; from surefoot.cli.main import app\n"
            f"try: app({words!r})\n"
            "except SystemExit: pass\n"
            f"print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.stderr.strip().splitlines()[-1] == "[]", words


def test_no_command_shows_the_help():
    run = cli()
    assert run.exit_code == 2 and "Commands:" in run.output


def test_version():
    assert cli("version").stdout == cli("--version").stdout == f"surefoot {__version__}\n"


def test_env_is_json_when_asked():
    found = json.loads(cli("env", "--json").stdout)
    assert found["surefoot"] == __version__ and "torch" in found["packages"]
    assert "packages:" in cli("env").stdout


@pytest.mark.parametrize(
    ("tokens", "path", "settings"),
    [
        (["a.yaml"], "a.yaml", []),
        (["a.yaml", "x=1", "--y", "-2"], "a.yaml", ["x=1", "--y", "-2"]),
        (["x=1"], None, ["x=1"]),
        (["--x", "1"], None, ["--x", "1"]),
    ],
)
def test_a_request_is_a_path_and_settings(tokens, path, settings):
    found, rest = split_request(tokens, "train")
    assert (str(found) if found else None, rest) == (path, settings)


@pytest.mark.parametrize("command", ["train", "check", "chat", "export"])
def test_every_command_says_what_it_needs(command):
    run = cli(command)
    assert run.exit_code == 2 and f"surefoot {command}" in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize("command", ["train", "check", "chat", "export"])
@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "no.yaml"),
        ("model_name_or_path: x\nlora_rnak: 8\n", "lora_rank"),
        ("model_name_or_path: x\nlora_rank: many\n", "lora_rank"),
        ("model_name_or_path: [x\n", "no.yaml"),
    ],
)
def test_a_bad_yaml_ends_with_2_and_names_the_place(tmp_path, command, text, named):
    if text is not None:
        (tmp_path / "no.yaml").write_text(text)
    run = cli(command, str(tmp_path / "no.yaml"))
    assert run.exit_code == 2, run.output
    assert named in run.stderr and run.stderr.startswith("error: ") and "Traceback" not in run.output


def test_check_json_is_one_document_and_nothing_else(tmp_path):
    (tmp_path / "bad.yaml").write_text("model_name_or_path: x\nlora_rnak: 8\nlearning_rat: 1\n")
    run = in_a_process("check", str(tmp_path / "bad.yaml"), "--json")
    answer = json.loads(run.stdout)
    assert run.returncode == 2 and run.stderr == ""
    assert answer["ok"] is False and answer["data"] == {} and answer["plan"] == {}
    assert {error["key"] for error in answer["errors"]} >= {"lora_rnak", "learning_rat"}
    assert all(set(error) == {"key", "message", "hint"} for error in answer["errors"])


def test_overrides_reach_the_settings_in_every_form(tmp_path):
    (tmp_path / "a.yaml").write_text("model_name_or_path: x\n")
    for words in (["lora_rank=no"], ["--lora_rank", "no"], ["--lora_rank=no"]):
        run = cli("check", str(tmp_path / "a.yaml"), *words)
        assert run.exit_code == 2 and "lora_rank" in run.stderr, words


class BoomError(Exception):
    pass


def test_what_nobody_foresaw_is_one_line_and_a_file(tmp_path, monkeypatch):
    def explode(cfg, console):
        raise BoomError("the sky\nfell")

    monkeypatch.setattr("surefoot.run.job.run_job", explode)
    (tmp_path / "a.yaml").write_text(GOOD.format(model="x", data=tmp_path, out=tmp_path / "run"))
    run = cli("train", str(tmp_path / "a.yaml"))
    crash = tmp_path / "run/surefoot/crash.txt"
    assert run.exit_code == 1 and run.stderr == f"error: unexpected BoomError: the sky (traceback in {crash})\n"
    assert "explode" in crash.read_text()
    shown = cli("train", str(tmp_path / "a.yaml"), "--debug")
    assert shown.exit_code == 1 and "Traceback" in shown.stderr


def test_a_traceback_that_cannot_go_to_the_run_goes_elsewhere(tmp_path, monkeypatch):
    def explode(cfg, console):
        raise BoomError("bang")

    monkeypatch.setattr("surefoot.run.job.run_job", explode)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    (tmp_path / "a.yaml").write_text(GOOD.format(model="x", data=tmp_path, out=tmp_path / "file/run"))
    run = cli("train", str(tmp_path / "a.yaml"))
    (kept,) = tmp_path.glob("surefoot-*.txt")
    assert run.exit_code == 1 and str(kept) in run.stderr and "bang" in kept.read_text()


@pytest.mark.parametrize(("error", "code"), [("WorkError", 1), ("UserError", 2), ("KeyboardInterrupt", 130)])
def test_exit_codes(tmp_path, monkeypatch, error, code):
    from surefoot import errors

    def fail(cfg, console):
        raise getattr(errors, error)("no luck", hint="try again") if hasattr(errors, error) else KeyboardInterrupt

    monkeypatch.setattr("surefoot.run.job.run_job", fail)
    (tmp_path / "a.yaml").write_text(GOOD.format(model="x", data=tmp_path, out=tmp_path / "run"))
    run = cli("train", str(tmp_path / "a.yaml"))
    assert run.exit_code == code
    assert run.stderr == ("stopped by Ctrl-C\n" if code == 130 else "error: no luck\n  -> try again\n")
    assert not (tmp_path / "run").exists()
