"""Checkpoints that appear whole, are verified by reading them back, and are never rotated away unverified.

A checkpoint is `checkpoint-N/` with LLaMA-Factory's file names, plus `surefoot/manifest.json`: every file's size and
SHA-256, and that all its weights were found finite. A folder without a manifest that fits is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import WorkError
from surefoot.files import whole_folder, write_json

MANIFEST = Path("surefoot") / "manifest.json"
STATE = Path("surefoot") / "state.json"
PIECES = Path("surefoot") / "shards"  # of a sharded checkpoint, which has no weights in one piece
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk.

    Attributes:
        folder: where it stands.
        step: optimizer steps done when it was made.
        state: counters and settings that a resume needs; see `loop.RunState`.
    """

    folder: Path
    step: int
    state: dict[str, Any]


def save_checkpoint(
    output_dir: Path,
    step: int,
    model: Any,
    tokenizer: Any,
    tensors: dict[str, Any] | None,
    state: dict[str, Any],
    *,
    with_embeddings: bool = False,
    weights: dict[str, Any] | None = None,
    pieces: Callable[[Path], dict[str, list[Any]]] | None = None,
    go_on: Callable[[], None] = lambda: None,
) -> Path:
    """Write a checkpoint whole and verify it.

    Args:
        output_dir: of the run.
        step: optimizer steps done.
        model: a transformers or PEFT model.
        tokenizer: saved beside it.
        tensors: "optimizer.pt", "scheduler.pt" and "rng_state.pth" with what goes into each; None saves weights only.
        state: counters and fingerprint, as JSON.
        with_embeddings: as for `save_model`.
        weights: as for `save_model`.
        pieces: of a sharded model, writes weights and optimizer into a folder instead; it has verified them when it
            returns each file's size and SHA-256.
        go_on: called between files; what it raises ends the writing.

    Returns:
        The checkpoint's folder.

    Raises:
        WorkError: a weight that was written is not finite, or cannot be read back.
        UserError: the disk is full or the place cannot be written to.
    """
    folder = output_dir / f"checkpoint-{step}"
    with whole_folder(folder) as temporary:
        known: dict[str, list[Any]] = {}
        if pieces is None:
            save_model(temporary, model, tokenizer, with_embeddings=with_embeddings, weights=weights)
        else:
            known = {(PIECES / name).as_posix(): found for name, found in pieces(temporary / PIECES).items()}
            model.config.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        for name, content in (tensors or {}).items():
            go_on()
            _save_tensors(temporary / name, content)
        write_json(temporary / "trainer_state.json", {
            "global_step": step, "epoch": state["epoch"], "max_steps": state["total_steps"],
            "num_train_epochs": state["epochs"], "log_history": [],
        })  # fmt: skip
        write_json(temporary / STATE, state | {"step": step, "weights_only": tensors is None})
        go_on()
        if pieces is None:
            verify_weights(temporary)
        files = _digests(temporary, known)
        go_on()
        write_json(temporary / MANIFEST, {"step": step, "weights_finite": True, "files": files})
    return folder


def save_model(
    folder: Path,
    model: Any,
    tokenizer: Any,
    *,
    with_embeddings: bool = False,
    weights: dict[str, Any] | None = None,
) -> None:
    """Save weights (an adapter, for PEFT) as safetensors, with the tokenizer.

    Args:
        folder: to write into.
        model: a transformers or PEFT model.
        tokenizer: its tokenizer.
        with_embeddings: save frozen embeddings with an adapter, because they are not those of the base model's files.
        weights: the model's `state_dict` with whole tensors, where not what the model holds now is to be saved; None
            for its own.
    """
    more: dict[str, Any] = {} if weights is None else {"state_dict": weights}
    if hasattr(model, "peft_config"):
        # Named explicitly: "auto" would ask the hub whether the vocabulary has changed.
        model.save_pretrained(folder, save_embedding_layers=with_embeddings, **more)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's card; the run writes its own
    else:
        model.save_pretrained(folder, **more)
    tokenizer.save_pretrained(folder)


def _save_tensors(file: Path, content: Any) -> None:
    """Save through a Python file: torch's own writer reports a full disk as a wrong position in the file."""
    import torch

    refusals: list[OSError] = []

    class Sink:
        def write(self, data: bytes) -> int:
            try:
                return handle.write(data)
            except OSError as error:
                refusals.append(error)
                raise

        def flush(self) -> None:
            handle.flush()

    with file.open("wb") as handle:
        try:
            torch.save(content, Sink())  # type: ignore[arg-type]  # write and flush are all that it calls
        except RuntimeError as error:
            if refusals:
                raise refusals[0] from error
            raise


def verify_weights(folder: Path) -> None:
    """Read every saved weight back and see that it is finite.

    Args:
        folder: with *.safetensors files.

    Raises:
        WorkError: there is none, one cannot be read, or a tensor holds NaN or infinity.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WorkError(f"{folder} holds no weights after saving", hint="please report this")
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (no mapping)
                    tensor = handle.get_tensor(name)
                    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                        raise WorkError(
                            f"{name} is not finite: {folder.name} was not kept", hint="the checkpoint before is"
                        )
        except SafetensorError as error:
            raise WorkError(f"{file} cannot be read back: {error}", hint="is the disk healthy?") from error


def find_checkpoints(output_dir: Path) -> list[Path]:
    """List a run's checkpoint folders, oldest first, whether they are whole or not."""
    found = [
        (int(m.group(1)), f)
        for f in output_dir.glob("checkpoint-*")
        if (m := re.fullmatch(r"checkpoint-(\d+)", f.name))
    ]
    return [folder for _, folder in sorted(found)]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify a checkpoint against its manifest and read its state.

    Args:
        folder: a checkpoint folder.

    Returns:
        The checkpoint.

    Raises:
        WorkError: it has no manifest, or a file is missing or not what was written.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        expected = manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        raise WorkError(f"{folder} is not a whole Surefoot checkpoint: {error}", hint="resume from another") from error
    found = _digests(folder)
    changed = sorted(name for name in expected if found.get(name) != expected[name])
    if changed:
        what = "is not what was written" if changed[0] in found else "is missing"
        raise WorkError(f"{folder} is damaged: {changed[0]} {what}", hint="resume from another")
    return Checkpoint(folder, int(manifest["step"]), state)


def rotate(output_dir: Path, limit: int | None, keep: set[Path]) -> list[Path]:
    """Remove the oldest checkpoints beyond the limit, but never the newest verified one.

    Args:
        output_dir: of the run.
        limit: `save_total_limit`; None or 0 keeps all.
        keep: folders that must stay, as the best one.

    Returns:
        The folders that were removed.
    """
    folders = find_checkpoints(output_dir)
    if not limit or len(folders) <= limit:
        return []
    newest_whole = next((f for f in reversed(folders) if _is_whole(f)), None)
    kept = keep | ({newest_whole} if newest_whole else set())
    removable = [folder for folder in folders if folder not in kept]
    doomed = removable[: len(folders) - limit]
    remove_folders(doomed)
    return doomed


def remove_weights(output_dir: Path) -> list[str]:
    """Remove the weights and checkpoints of a run that is overwritten, so that none is ever taken for the new run's.

    Args:
        output_dir: of the run.

    Returns:
        The names of what was removed.
    """
    folders = find_checkpoints(output_dir)
    remove_folders(folders)
    files = [*output_dir.glob("*.safetensors"), *output_dir.glob("*.safetensors.index.json")]
    for file in files:
        file.unlink()
    return [path.name for path in (*folders, *files)]


def sweep(output_dir: Path) -> None:
    """Remove what a killed run left half written, in the folder itself and in its `surefoot/`."""
    for replaced in output_dir.glob(".checkpoint-*.old"):
        name = replaced.name.split(".")[1]
        if not (output_dir / name).exists():  # killed between taking the old one away and putting the new one there
            replaced.rename(output_dir / name)
    for leftover in [*output_dir.glob(".*"), *(output_dir / "surefoot").glob(".*")]:
        if leftover.is_dir() and leftover.name.startswith((".checkpoint-", ".writing.")):
            shutil.rmtree(leftover, ignore_errors=True)
        elif leftover.is_file() and re.search(r"\.\d+\.tmp$", leftover.name):
            leftover.unlink(missing_ok=True)


def remove_folders(folders: list[Path]) -> None:
    """Remove checkpoints, so that a kill in the middle leaves no folder that looks like one."""
    for folder in folders:
        doomed = folder.with_name(f".{folder.name}.removed")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _is_whole(folder: Path) -> bool:
    try:
        read_checkpoint(folder)
    except WorkError:
        return False
    return True


def digest_of(file: Path) -> list[Any]:
    """Read a file and return its size in bytes and its SHA-256."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while block := handle.read(READ_BYTES):
            digest.update(block)
    return [file.stat().st_size, digest.hexdigest()]


def _digests(folder: Path, known: dict[str, list[Any]] | None = None) -> dict[str, list[Any]]:
    """Return each file's size and SHA-256, without the manifest itself; those that are known are not read."""
    names = {file.relative_to(folder): file for file in sorted(folder.rglob("*")) if file.is_file()}
    known = known or {}
    return {
        name.as_posix(): known[name.as_posix()] if name.as_posix() in known else digest_of(file)
        for name, file in names.items()
        if name != MANIFEST
    }
