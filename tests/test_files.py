"""Files that appear whole, folders that one process writes into, and the system's refusals in words."""

from __future__ import annotations

import errno
import multiprocessing

import pytest

from surefoot.errors import UserError
from surefoot.files import explain_disk_errors, only_writer, whole_folder


def try_to_hold(folder, answers):
    try:
        with only_writer(folder):
            answers.put("held")
    except UserError as error:
        answers.put(error.problems[0].message)


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    for held in (True, False):
        if held:
            with only_writer(tmp_path / "run"):
                process = context.Process(target=try_to_hold, args=(tmp_path / "run", answers))
                process.start()
                assert "another run is writing into" in answers.get(timeout=60)
                process.join()
        else:
            process = context.Process(target=try_to_hold, args=(tmp_path / "run", answers))
            process.start()
            assert answers.get(timeout=60) == "held"
            process.join()


def test_a_folder_that_nothing_was_put_into_goes_again(tmp_path):
    with pytest.raises(KeyError), only_writer(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
        raise KeyError
    assert not (tmp_path / "a").exists()
    with only_writer(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "file").touch()
    assert (tmp_path / "a" / "b" / "file").exists()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EFBIG, "too large"),
        (errno.EROFS, "no permission"),
        (errno.ENOTDIR, "a file stands where a folder must be"),
        (errno.ENAMETOOLONG, "too long"),
    ],
)
def test_the_systems_refusals_are_said_in_words(tmp_path, number, said):
    for error in (
        OSError(number, "its words"),
        RuntimeError(f"Error while serializing: its words (os error {number})"),
    ):
        with pytest.raises(UserError, match=said) as caught, explain_disk_errors(tmp_path / "file"):
            raise error
        assert str(tmp_path / "file") in str(caught.value) and caught.value.problems[0].hint


def test_what_is_not_about_the_disk_stays_what_it_is(tmp_path):
    for error in (
        OSError(errno.EIO, "broken"),
        ValueError("no"),
        FileNotFoundError(errno.ENOENT, "no", "/elsewhere/x"),
    ):
        with pytest.raises(type(error)) as caught, explain_disk_errors(tmp_path / "file"):
            raise error
        assert caught.value is error


def test_a_folder_that_could_not_be_filled_is_not_there(tmp_path):
    with pytest.raises(UserError, match="the disk is full"), whole_folder(tmp_path / "model") as folder:
        (folder / "half").touch()
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []
