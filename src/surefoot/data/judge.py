"""Is there anything to train on, and is it as whole as the person wants it?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.data.notes import LOUD_SHARE, RowNotes
from surefoot.errors import Problem, UserError

if TYPE_CHECKING:
    from surefoot.config import Config
    from surefoot.data.report import DataReport

SHOWN = 5  # row ids in a message


def refuse_unusable(report: DataReport, has_training_set: bool, cfg: Config) -> None:
    """Stop before training on nothing, or on less than `strict_data` allows.

    Args:
        report: what became of the rows.
        has_training_set: False when the YAML names only an eval_dataset.
        cfg: the YAML.

    Raises:
        UserError: no usable row, no trained token, no item after packing; with `strict_data` any row dropped or cut.
    """
    groups = [("dataset", report.train)] if has_training_set else []
    for key, group in [*groups, ("eval_dataset", report.evals)] if report.evals else groups:
        _refuse_unlabelled(key, group, cfg)
        _refuse_empty(key, group)
    if has_training_set and not report.streaming and not len(report.lengths):
        raise UserError(
            f"packing left no training item: the rows have {sum(n.tokens for n in report.train):,} tokens together,"
            f" and an item takes {cfg.effective_cutoff_len}",
            hint="lower cutoff_len, or set `packing: false`",
            key="cutoff_len",
        )
    if cfg.strict_data:
        problems = [problem for notes in [*report.train, *report.evals] for problem in _lost(notes, cfg)]
        if problems:
            raise UserError.from_problems(problems)


def _refuse_empty(key: str, group: list[RowNotes]) -> None:
    if any(notes.used for notes in group):
        return
    lines = []
    for notes in group:
        for reason, listed in notes.dropped.items():
            lines.append(f"{reason}: {listed.count:,} ({', '.join(listed.ids(notes.name)[:SHOWN])})")
    read = sum(notes.read for notes in group)
    raise UserError(
        f"none of the {read:,} rows can be used: {'; '.join(lines) or 'there are none'}",
        hint="look at one of these rows, and at columns, tags and formatting in dataset_info.json",
        key=key,
    )


def _refuse_unlabelled(key: str, group: list[RowNotes], cfg: Config) -> None:
    unlabelled = [notes for notes in group if notes.without_labels.count]
    if any(notes.used for notes in group) or not unlabelled:
        return
    example = unlabelled[0].without_labels.ids(unlabelled[0].name)[0]
    raise UserError(
        f"no row has a token to train on: all labels are masked (for instance {example})",
        hint=f"raise cutoff_len ({cfg.cutoff_len}): it may cut the answers off; or shorten the prompts",
        key="cutoff_len" if any(notes.truncated.count for notes in group) else key,
    )


def _lost(notes: RowNotes, cfg: Config) -> list[Problem]:
    problems = []
    loud = LOUD_SHARE * notes.read
    for reason, listed in notes.dropped.items() if notes.dropped_count > loud else ():
        ids = ", ".join(listed.ids(notes.name)[:SHOWN])
        message = f"dataset '{notes.name}': {listed.count:,} of {notes.read:,} rows cannot be used, {reason}: {ids}"
        problems.append(Problem(message, "mend these rows, or set `strict_data: false`", "strict_data"))
    if notes.truncated.count > loud:
        ids = ", ".join(notes.truncated.ids(notes.name)[:SHOWN])
        message = (
            f"dataset '{notes.name}': {notes.truncated.count:,} of {notes.read:,} rows are longer than cutoff_len"
            f" = {cfg.cutoff_len}: {ids}"
        )
        problems.append(Problem(message, "raise cutoff_len, or set `strict_data: false`", "strict_data"))
    return problems
