from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.config import load_config
from surefoot.config.overrides import parse_overrides
from surefoot.config.source import read_source
from surefoot.errors import UserError

BASE = ["model_name_or_path=m", "dataset=d"]


def error_of(folder: Path, text: str | bytes, name: str = "job.yaml") -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        load_config(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["is empty"]),
        ("# nothing\n", ["is empty"]),
        ("- a\n- b\n", ["holds no settings"]),
        ("hello", ["holds no settings"]),
        ("a: [1\nb: 2", ["not valid YAML at line 2, column 2"]),
        ("a: 1\n\tb: 2", ["line 2, column 1", "spaces, not tabs"]),
        ("a: b: c", ["line 1, column 5"]),
        ("a: 'x\n", ["not valid YAML at line"]),
        ("a: 1\n---\nb: 2\n", ["expected a single document"]),
        ("seed: 1\nlr: 2\nseed: 3\n", ["seed: stands twice", "in line 1 and in line 3"]),
        ("lr_scheduler_kwargs:\n  a: 1\n  a: 2\n", ["a: stands twice", "in line 2 and in line 3"]),
        ("seed: ${bogus}", ["seed: cannot be worked out", "'bogus' not found", "\\${"]),
        ("run_name: ${", ["run_name", "\\${"]),
        ("seed: ${oc.env:SUREFOOT_NOT_SET}", ["seed", "SUREFOOT_NOT_SET"]),
        ("seed: ???", ["seed", "Missing mandatory value"]),
        ("a: !!python/object:os.system x", ["not valid YAML at line 1"]),
        ("a: &x [*x]", ["not valid YAML at line 1, column 4", "inside its own anchor"]),
        ("a: \x01", ["unprintable character (line 1)"]),
        (b"a: 1\nb: \xff\n", ["not UTF-8 text (line 2)"]),
        ("seed: 1\nbogus: 2\n", ["bogus: there is no such key (line 2)"]),
    ],
    ids=repr,
)
def test_a_yaml_that_cannot_be_read(tmp_path, text, parts):
    message = error_of(tmp_path, text)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["is empty"]),
        ("[1]", ["holds no settings"]),
        ('{"seed": 1,', ["not valid JSON at line 1, column 12"]),
        ('{\n"seed" 1}', ["not valid JSON at line 2"]),
        ('{"seed": 1, "seed": 2}', ["seed: stands twice"]),
        ('{"learning_rate": NaN}', ["learning_rate: must be a finite number"]),
    ],
    ids=repr,
)
def test_a_json_that_cannot_be_read(tmp_path, text, parts):
    message = error_of(tmp_path, text, "job.json")
    assert all(part in message for part in parts), message


def test_a_file_that_is_not_there(tmp_path):
    (tmp_path / "my_job.yaml").touch()
    for path, part in [
        (tmp_path / "myjob.yaml", "did you mean"),
        (tmp_path / "other.yml", "check the path"),
        (tmp_path / "no" / "x.yaml", "there is no folder"),
        (tmp_path, "is a folder"),
        (tmp_path / "x.txt", "name a .yaml, .yml or .json file"),
    ]:
        with pytest.raises(UserError) as caught:
            load_config(path)
        assert str(path) in str(caught.value)
        assert part in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    path = tmp_path / "job.yml"
    path.write_bytes("\ufeffmodel_name_or_path: m\r\ndataset: d\r\n".encode())
    assert load_config(path).model_name_or_path == "m"


def test_anchors_and_merged_mappings_work(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("model_name_or_path: &m x\nrun_name: *m\ndataset: d\n")
    assert load_config(path).run_name == "x"


@pytest.mark.parametrize(
    ("tokens", "values"),
    [
        (["learning_rate=1e-4"], {"learning_rate": 1e-4}),
        (["--learning_rate", "1e-4"], {"learning_rate": 1e-4}),
        (["--learning-rate=1e-4"], {"learning_rate": 1e-4}),
        (["--max_steps", "-1"], {"max_steps": -1}),
        (["--plot_loss"], {"plot_loss": True}),
        (["--plot_loss", "--bf16", "seed=3"], {"plot_loss": True, "bf16": True, "seed": 3}),
        (["--plot_loss", "false"], {"plot_loss": False}),
        (["seed=1", "seed=2"], {"seed": 2}),
        (["dataset=a,b"], {"dataset": "a,b"}),
        (["dataset=[a, b]"], {"dataset": ["a", "b"]}),
        (["dataset=2024"], {"dataset": "2024"}),
        (["run_name=2024"], {"run_name": "2024"}),
        (["run_name=true"], {"run_name": "true"}),
        (["run_name='2024'"], {"run_name": "2024"}),
        (["run_name="], {"run_name": None}),
        (["run_name=null"], {"run_name": None}),
        (["resume_from_checkpoint=true"], {"resume_from_checkpoint": True}),
        (["default_system=You are: good"], {"default_system": "You are: good"}),
        (["default_system=it's [bad"], {"default_system": "it's [bad"}),
        (["--default_system", "x=1"], {"default_system": "x=1"}),
        (["lr_scheduler_kwargs.num_cycles=2"], {"lr_scheduler_kwargs": {"num_cycles": 2}}),
        (['lr_scheduler_kwargs={"a": 1}'], {"lr_scheduler_kwargs": {"a": 1}}),
        (["model_name_or_path=/a b/c=d"], {"model_name_or_path": "/a b/c=d"}),
        (["no_such=3"], {"no_such": 3}),
        ([], {}),
    ],
    ids=str,
)
def test_overrides(tokens, values):
    assert read_source(None, tokens).values == values


@pytest.mark.parametrize(
    ("tokens", "part"),
    [
        (["seed"], "'seed' on the command line is no setting"),
        (["-s", "3"], "'-s' on the command line is no setting"),
        (["--"], "'--'"),
        (["=3"], "'=3'"),
        (["[=3"], "'[=3'"),
        (["a..b=3"], "'a..b=3'"),
        (["seed=[1"], "seed: '[1' cannot be read"),
        (["seed=1", "other.yaml", "x"], "'other.yaml'"),
    ],
)
def test_overrides_that_cannot_be_read(tokens, part):
    with pytest.raises(UserError) as caught:
        load_config(None, [*BASE, *tokens])
    assert part in str(caught.value)


def test_overrides_win_over_the_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("model_name_or_path: m\ndataset: d\nseed: 1\nlr_scheduler_kwargs:\n  a: 1\n  b: 2\n")
    config = load_config(path, ["--seed", "2", "lr_scheduler_kwargs.b=3"])
    assert config.seed == 2
    assert config.lr_scheduler_kwargs == {"a": 1, "b": 3}
    assert "seed" in config.given and "seed" not in config.filled


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.text("ab=-.[]{}:,'\"${}\\ \n#&*!|>%@`?1", max_size=8) | st.sampled_from(["--seed", "seed=1"]), max_size=4
    )
)
def test_no_command_line_brings_anything_but_a_clear_error(tokens):
    try:
        parse_overrides(tokens)
        read_source(None, tokens)
    except UserError as error:
        assert error.problems


@settings(max_examples=150, deadline=None)
@given(st.text("ab:-[]{},'\"${}\\ \n\t#&*!|>%@`?1é\x00", max_size=24))
def test_no_file_brings_anything_but_a_clear_error(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "job.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError):
        load_config(path)
