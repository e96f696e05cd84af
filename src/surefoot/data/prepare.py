"""From the YAML's datasets to training items and a report: the data room's way in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot.data import tokenized
from surefoot.data.assemble import PackSettings, Part, batches_of, lay_out_rows, pack_table
from surefoot.data.cache import cache_entry, cache_folder, fingerprint, template_fingerprint, tokenizer_fingerprint
from surefoot.data.catalog import DatasetEntry, find_datasets
from surefoot.data.columns import check_columns, guess_formatting
from surefoot.data.encoded import Encoding, Progress, encode_dataset, notes_of, quiet
from surefoot.data.judge import refuse_unusable
from surefoot.data.mixing import choose_rows, mix, split
from surefoot.data.notes import RowNotes
from surefoot.data.pretrain import block_bos
from surefoot.data.report import DataReport, decode_runs
from surefoot.data.sources import RowSource, open_source
from surefoot.data.store import StoreWriter, TokenStore
from surefoot.data.stream import StreamPart, TokenStream
from surefoot.data.table import TokenTable
from surefoot.errors import UserError

if TYPE_CHECKING:
    from surefoot.config import Config
    from surefoot.data.messages import Sample
    from surefoot.data.template import Template

LOOKED_AT = 1000
"""Rows at the beginning of a stream that are encoded for the report."""


@dataclass
class PreparedData:
    """What the loop trains on.

    Attributes:
        train: the training items; None when the YAML names no dataset.
        evals: the validation items by name; "" where there is only one set.
        report: what became of the rows.
    """

    train: TokenTable | TokenStream | None = None
    evals: dict[str, TokenTable] = field(default_factory=dict)
    report: DataReport = field(default_factory=DataReport)


def prepare_data(cfg: Config, tokenizer: Any, template: Template, *, progress: Progress = quiet) -> PreparedData:
    """Read, encode, mix, pack and split the datasets; what was encoded before comes from the cache.

    Args:
        cfg: the YAML.
        tokenizer: the model's, with `template.fix_tokenizer` applied.
        template: the run's.
        progress: hears how it goes.

    Returns:
        The training items, the validation items and the report.

    Raises:
        UserError: something about the data is wrong: a file, a column, a name, no usable row, tokens of another model.
        WorkError: a preprocessing process died.
    """
    encoding = Encoding.of(cfg, tokenizer, template, progress)
    found = bool(cfg.tokenized_path) and tokenized.exists(cfg.tokenized_path or "")
    if found:
        data = _load_tokenized(cfg, encoding)
    elif not cfg.dataset and not cfg.eval_dataset:
        raise UserError(
            "the YAML names no data", hint="add `dataset: name`, as dataset_info.json lists it", key="dataset"
        )
    elif cfg.streaming:
        data = _prepare_stream(cfg, encoding)
    else:
        data = _prepare_tables(cfg, encoding)
    report = data.report
    report.cutoff_len, report.packed = cfg.cutoff_len, cfg.packing
    if isinstance(data.train, TokenTable):
        report.lengths = data.train.lengths
    report.eval_items = {name: len(table) for name, table in data.evals.items()}
    first = _first_item(data)
    if first is not None:
        report.example_id = ", ".join(first.row_ids)
        report.example = decode_runs(first, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    refuse_unusable(report, data.train is not None, cfg)
    if cfg.tokenized_path and not found:
        assert not isinstance(data.train, TokenStream)  # the YAML's checks refuse it
        tokenized.save(cfg.tokenized_path, recipe_of(cfg, encoding), data.train, data.evals, report)
    return data


def _prepare_tables(cfg: Config, encoding: Encoding) -> PreparedData:
    rng = np.random.RandomState(cfg.seed)  # LLaMA-Factory draws num_samples from NumPy's old generator
    data = PreparedData()
    if cfg.dataset:
        group = _build_group(cfg, encoding, cfg.dataset, "dataset", rng)
        data.train, data.report.train = group.table, group.notes
        data.report.left_over, data.report.not_reached = group.left_over, group.not_reached
        data.report.notes += group.warnings
        if cfg.val_size and len(group.table):
            kept, held_out = split(len(group.table), cfg.val_size, cfg.seed)
            data.train, data.evals[""] = group.table.select(kept), group.table.select(held_out)
    _add_evals(cfg, encoding, data, rng)
    return data


def _add_evals(cfg: Config, encoding: Encoding, data: PreparedData, rng: np.random.RandomState) -> None:
    names: Sequence[str] = cfg.eval_dataset or ()
    together = [[name] for name in dict.fromkeys(names)] if cfg.eval_on_each_dataset else [list(names)]
    for group_names in together if names else []:
        group = _build_group(cfg, encoding, group_names, "eval_dataset", rng)
        data.evals[group_names[0] if cfg.eval_on_each_dataset else ""] = group.table
        data.report.evals += group.notes
        data.report.notes += group.warnings


@dataclass
class _Group:
    """The items of several datasets together."""

    table: TokenTable
    notes: list[RowNotes]
    left_over: int
    not_reached: int
    warnings: list[str]


def _build_group(cfg: Config, encoding: Encoding, names: Sequence[str], key: str, rng: np.random.RandomState) -> _Group:
    parts, warnings = [], []
    for entry, source in open_datasets(cfg, names, key):
        warnings += entry.warnings
        if entry.num_samples is None:
            store = encode_dataset(entry, source, encoding, cfg.max_samples, None)
            chosen = np.arange(notes_of(store).read, dtype=np.int64)
        else:
            check_columns(entry, source, encoding.stage)
            chosen = choose_rows(sum(1 for _ in source.rows()), entry.num_samples, cfg.max_samples, rng)
            store = encode_dataset(entry, source, encoding, None, chosen)
        parts.append(Part(store, chosen))
    mixed = mix([len(part.chosen) for part in parts], cfg.mix_strategy, cfg.interleave_probs, cfg.seed)
    positions = lay_out_rows(parts, mixed)
    rows = TokenTable([part.store for part in parts], positions[positions >= 0])
    table, left_over = rows, 0
    pack = pack_settings(cfg, encoding)
    if pack is not None:
        everywhere = TokenTable(rows.stores)
        batches = list(batches_of(positions, pack.batch))
        table, left_over = pack_table(everywhere, batches, pack, overwrite=cfg.overwrite_cache)
    notes = [notes_of(part.store) for part in parts]
    not_reached = sum(len(part.chosen) for part in parts) - len(np.unique(mixed))
    return _Group(table, notes, left_over, not_reached, warnings)


def open_datasets(cfg: Config, names: Sequence[str], key: str) -> list[tuple[DatasetEntry, RowSource]]:
    """Find datasets and make sure that they are for this stage.

    Args:
        cfg: the YAML.
        names: the datasets' names.
        key: the YAML key that they stand under.

    Returns:
        Each dataset with its rows.

    Raises:
        UserError: a dataset is not there, or is for another stage.
    """
    opened = []
    for entry in find_datasets(names, cfg.dataset_dir, key=key):
        if entry.ranking or "kto_tag" in entry.written_columns:
            what = "pairs of answers (ranking)" if entry.ranking else "judged answers (kto_tag)"
            raise UserError(
                f"dataset '{entry.name}' holds {what}, which stage: {cfg.stage} cannot train on",
                hint="choose a dataset with one answer a row",
                key=key,
            )
        source = open_source(entry, cfg)
        opened.append((guess_formatting(entry, source) if entry.by_path else entry, source))
    return opened


def pack_settings(cfg: Config, encoding: Encoding) -> PackSettings | None:
    """How the YAML wants rows packed; None = not at all."""
    if not cfg.packing:
        return None
    return PackSettings(
        capacity=cfg.effective_cutoff_len,
        batch=cfg.preprocessing_batch_size,
        joined=cfg.packing_mode == "joined" and not encoding.blocks,
        blocks=encoding.blocks,
        bos_id=block_bos(encoding.tokenizer) if encoding.blocks else None,
    )


def _prepare_stream(cfg: Config, encoding: Encoding) -> PreparedData:
    data = PreparedData(report=DataReport(streaming=True))
    if cfg.dataset:
        opened = open_datasets(cfg, cfg.dataset, "dataset")
        for entry, source in opened:
            if entry.num_samples is not None:
                raise UserError(
                    f"dataset '{entry.name}': num_samples cannot be drawn from a stream, whose length is not known",
                    hint="set `streaming: false`, or remove num_samples",
                    key="streaming",
                )
            check_columns(entry, source, encoding.stage)
            data.report.notes += entry.warnings
        stream = TokenStream(
            [StreamPart(source, encoding.encoder(entry)) for entry, source in opened],
            cfg.mix_strategy,
            cfg.interleave_probs,
            cfg.seed,
            cfg.buffer_size,
            cfg.preprocessing_batch_size,
            encoding.fingerprint,
            pack_settings(cfg, encoding),
            held_out=int(cfg.val_size),
        )
        data.train = stream
        data.report.train = [RowNotes(entry.name) for entry, _ in opened]
        for _ in stream.encoded_rows(data.report.train, limit=LOOKED_AT):
            pass
        if cfg.val_size:
            data.evals[""] = _hold_out(stream)
    _add_evals(cfg, encoding, data, np.random.RandomState(cfg.seed))
    return data


def _hold_out(stream: TokenStream) -> TokenTable:
    """The stream's first usable rows, which it then leaves out."""
    key = fingerprint("held out", stream.fingerprint)
    names = [part.encoder.entry.name for part in stream.parts]
    with cache_entry(key) as temporary, StoreWriter(temporary, names) as writer:
        for count, sample in enumerate(stream.encoded_rows()):
            if count == stream.held_out:
                break
            writer.add_sample(sample)
        writer.finish({"fingerprint": key})
    return TokenTable([TokenStore(cache_folder() / key)])


def _first_item(data: PreparedData) -> Sample | None:
    if isinstance(data.train, TokenStream):
        return next(data.train.one_pass_in_order(), None)
    tables = [table for table in (data.train, *data.evals.values()) if table is not None and len(table)]
    return tables[0][0] if tables else None


def recipe_of(cfg: Config, encoding: Encoding) -> dict[str, Any]:
    """All that decides which items a run trains on, for `tokenized_path`.

    Args:
        cfg: the YAML.
        encoding: how its rows are encoded.

    Returns:
        JSON values by name; YAML keys under their own names.
    """
    keys = [
        *("stage", "cutoff_len", "train_on_prompt", "mask_history", "packing", "neat_packing", "packing_mode"),
        *("max_samples", "val_size", "mix_strategy", "interleave_probs", "eval_on_each_dataset", "seed"),
    ]
    return {
        "tokenizer": tokenizer_fingerprint(encoding.tokenizer),
        "template": template_fingerprint(encoding.template),
        **{key: getattr(cfg, key) for key in keys},
        "dataset": list(cfg.dataset or ()),
        "eval_dataset": list(cfg.eval_dataset or ()),
        "rows": _row_fingerprints(cfg),
    }


def _row_fingerprints(cfg: Config) -> dict[str, str] | None:
    """A fingerprint of each dataset's rows; None when they are not here to be looked at."""
    try:
        opened = open_datasets(cfg, cfg.dataset or (), "dataset")
        opened += open_datasets(cfg, cfg.eval_dataset or (), "eval_dataset")
    except UserError:
        return None
    return {entry.name: fingerprint(source.fingerprint(), entry.shape, entry.num_samples) for entry, source in opened}


def _load_tokenized(cfg: Config, encoding: Encoding) -> PreparedData:
    train, evals, report = tokenized.load(cfg.tokenized_path or "", recipe_of(cfg, encoding))
    return PreparedData(train, evals, report)
