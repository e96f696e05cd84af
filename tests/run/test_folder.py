from __future__ import annotations

import os

import pytest

from surefoot.config import load_config
from surefoot.errors import UserError
from surefoot.run.folder import RunFolder


def settings(folder, *more):
    arguments = ["model_name_or_path=x", "dataset=y", "template=chatml", f"output_dir={folder}", *more]
    return load_config(None, arguments, "train")


def check(folder, *more):
    cfg = settings(folder, *more)
    RunFolder.of(cfg).check(cfg)


def test_a_place_that_can_be_written_to_passes_and_is_left_as_it_was(tmp_path):
    check(tmp_path / "a/b/c")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    check(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file stands where a folder must be"):
        check(tmp_path / "file/run")
    with pytest.raises(UserError, match="a file stands where a folder must be"):
        check(tmp_path / "file")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UserError, match="no permission"):
        check(tmp_path / "locked/run")


def test_another_runs_result_is_not_overwritten_unasked(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="result of another run"):
        check(tmp_path)
    check(tmp_path, "overwrite_output_dir=true")
    (tmp_path / "checkpoint-10").mkdir()
    check(tmp_path)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-best", "checkpoint-100"):
        (tmp_path / name).mkdir()
    names = [path.name for path in RunFolder(tmp_path).checkpoints()]
    assert names == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
