from __future__ import annotations

import pytest

from surefoot.errors import UserError
from surefoot.use.target import find_target, load_target

SETTINGS = (
    "model_name_or_path: some/base\ntemplate: chatml\nlora_rank: 4\nlearning_rate: 1.0e-3\nlr_scheduler_type: cosine\n"
)


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    (folder / "surefoot").mkdir(parents=True)
    (folder / "surefoot/resolved.yaml").write_text(SETTINGS)
    return folder


def make(folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("place", [".", "checkpoint-5"])
def test_a_run_directory_and_its_checkpoints_are_the_base_with_their_adapter(run_dir, place):
    folder = make(run_dir / place, "adapter_config.json")
    cfg = load_target(folder, [], "chat")
    assert (cfg.model_name_or_path, cfg.adapter_name_or_path, cfg.template) == ("some/base", [str(folder)], "chatml")


def test_a_fully_trained_run_is_its_own_model(run_dir):
    make(run_dir, "config.json")
    cfg = load_target(run_dir, ["finetuning_type=full"], "chat")
    assert (cfg.model_name_or_path, cfg.adapter_name_or_path, cfg.template) == (str(run_dir), None, "chatml")


def test_a_merged_folder_inside_a_run_forgets_the_runs_adapter(run_dir):
    make(run_dir, "adapter_config.json")
    merged = make(run_dir / "merged", "config.json")
    cfg = load_target(merged, [], "chat")
    assert (cfg.model_name_or_path, cfg.adapter_name_or_path, cfg.template) == (str(merged), None, "chatml")


def test_a_model_folder_needs_no_yaml(tmp_path):
    folder = make(tmp_path / "model", "config.json")
    cfg = load_target(folder, ["template=chatml"], "chat")
    assert (cfg.model_name_or_path, cfg.template) == (str(folder), "chatml")


def test_what_the_person_types_wins(run_dir):
    make(run_dir, "adapter_config.json")
    cfg = load_target(run_dir, ["--temperature", "0.1", "template=default"], "chat")
    assert (cfg.temperature, cfg.template) == (0.1, "default")


@pytest.mark.parametrize(
    ("name", "message"),
    [("adapter_config.json", "settings that it was trained with"), ("notes.txt", "neither an adapter nor a model")],
)
def test_other_folders_are_refused_with_the_reason(tmp_path, name, message):
    with pytest.raises(UserError, match=message):
        find_target(make(tmp_path / "odd", name))


def test_a_path_that_does_not_exist_is_said_to(tmp_path):
    with pytest.raises(UserError, match="no file or folder"):
        load_target(tmp_path / "nonesuch", [], "chat")


def test_a_run_that_has_saved_nothing_yet_says_so(run_dir):
    with pytest.raises(UserError, match="has not saved a model yet"):
        find_target(run_dir)
