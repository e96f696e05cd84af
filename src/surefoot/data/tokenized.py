"""`tokenized_path`: encoded items in a folder of the person's choice, and proof that they fit the run.

LLaMA-Factory loads such a folder and ignores every other data key, so that tokens of another model train without a
word. Here the folder says what it was made from, and a run that asks for anything else is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surefoot.data.notes import RowNotes
from surefoot.data.report import DataReport
from surefoot.data.store import StoreWriter, TokenStore, is_store
from surefoot.data.table import TokenTable
from surefoot.errors import Problem, UserError
from surefoot.files import whole_folder, write_json

INDEX_FILE = "surefoot_tokens.json"
FORMAT = 1
_NAMES = {"tokenizer": "the tokenizer", "template": "the template", "rows": "the rows"}


def exists(path: str) -> bool:
    """Tell whether something stands at `path`; an empty folder is nothing."""
    folder = Path(path).expanduser()
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def save(
    path: str, recipe: dict[str, Any], train: TokenTable | None, evals: dict[str, TokenTable], report: DataReport
) -> None:
    """Write the items of a run.

    Args:
        path: the folder; it appears whole or not at all.
        recipe: all that decides which items they are, JSON values.
        train: the training items.
        evals: the validation items by name.
        report: what became of the rows.

    Raises:
        UserError: the folder cannot be written.
    """
    tables = {"train": train} if train is not None else {}
    tables.update({f"eval_{number}": table for number, table in enumerate(evals.values())})
    with whole_folder(Path(path).expanduser()) as folder:
        for name, table in tables.items():
            (folder / name).mkdir()
            joined = any(store.meta["joined"] for store in table.stores)
            with StoreWriter(folder / name, table.names, joined=joined) as writer:
                for sample in table:
                    writer.add_sample(sample)
                writer.finish({"fingerprint": table.fingerprint})
        kept = {
            "train": [notes.to_json() for notes in report.train],
            "evals": [notes.to_json() for notes in report.evals],
            "left_over": report.left_over,
            "not_reached": report.not_reached,
            "notes": report.notes,
        }
        index = {"format": FORMAT, "recipe": recipe, "evals": list(evals), "report": kept}
        write_json(folder / INDEX_FILE, index)


def load(path: str, recipe: dict[str, Any]) -> tuple[TokenTable | None, dict[str, TokenTable], DataReport]:
    """Read the items of a run, if they are what this run asks for.

    Args:
        path: a folder that `save` wrote.
        recipe: all that decides which items this run needs.

    Returns:
        The training items, the validation items by name, and the report.

    Raises:
        UserError: the folder is not one of ours, is damaged, or its items are of another model, template or setting.
    """
    folder = Path(path).expanduser()
    try:
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        theirs = (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists()
        made = "was tokenized by another tool" if theirs else "holds no tokenized rows"
        raise UserError(
            f"{path} {made}: nothing there says for which model and which template its tokens are",
            hint="name a folder that does not exist yet: the rows will be tokenized and saved there",
            key="tokenized_path",
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise _damaged(path, str(error)) from error
    if index.get("format") != FORMAT:
        raise _damaged(path, "it was written by another version of Surefoot")
    if problems := list(_differences(path, index["recipe"], recipe)):
        raise UserError.from_problems(problems)
    names = (["train"] if (folder / "train").exists() else []) + [f"eval_{n}" for n in range(len(index["evals"]))]
    if missing := [name for name in names if not is_store(folder / name)]:
        raise _damaged(path, f"{', '.join(missing)} is missing or cannot be read")
    try:
        tables = {name: TokenTable([TokenStore(folder / name)]) for name in names}
    except (OSError, ValueError) as error:  # numpy's words for missing and cut files
        raise _damaged(path, str(error)) from error
    evals = {name: tables[f"eval_{number}"] for number, name in enumerate(index["evals"])}
    kept = index["report"]
    report = DataReport(
        train=[RowNotes.from_json(notes) for notes in kept["train"]],
        evals=[RowNotes.from_json(notes) for notes in kept["evals"]],
        left_over=kept["left_over"],
        not_reached=kept["not_reached"],
        notes=list(kept["notes"]),
    )
    if recipe["rows"] is None:
        report.notes.append(f"the rows that {path} was made from are not here, so they could not be compared with it")
    return tables.get("train"), evals, report


def _differences(path: str, made: dict[str, Any], wanted: dict[str, Any]) -> list[Problem]:
    """Name everything that the tokens were made with and that the run asks for otherwise."""
    problems = []
    for key, want in wanted.items():
        have = made.get(key)
        unknown = key in ("dataset", "eval_dataset") and not want  # left out where the rows are not at hand
        if have == want or unknown or (key == "rows" and (have is None or want is None)):
            continue
        if key in _NAMES:
            message = f"{path} was made with another model: {_NAMES[key]} differs"
            if key == "rows":
                changed = sorted(name for name in want if (have or {}).get(name) != want[name])
                message = f"{path} was made from other rows: {', '.join(changed) or 'a dataset is gone'}"
        else:
            message = f"{path} was made with {key}: {have}, and this run asks for {want}"
        problems.append(Problem(message, "", "tokenized_path"))
    if problems:
        last = problems[-1]
        problems[-1] = Problem(
            last.message, "set what it was made with, or name a folder that does not exist yet", "tokenized_path"
        )
    return problems


def _damaged(path: str, why: str) -> UserError:
    return UserError(
        f"the tokenized rows in {path} cannot be used: {why}",
        hint="remove the folder, and they will be made again",
        key="tokenized_path",
    )
