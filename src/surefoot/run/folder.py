"""The run directory: LLaMA-Factory's files at its top, everything of ours in its `surefoot/` subfolder."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.errors import UserError
from surefoot.files import explain_disk_errors

if TYPE_CHECKING:
    from surefoot.config import Config

WEIGHT_FILES = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")

RESULT_FILES = ("train_results.json", "eval_results.json", "all_results.json", "trainer_state.json", "README.md")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where each file of a run stands.

    Attributes:
        path: the YAML's `output_dir`.
    """

    path: Path

    @classmethod
    def of(cls, cfg: Config) -> RunFolder:
        """The run directory that the settings name."""
        assert cfg.output_dir, "load_config fills it in"
        return cls(Path(cfg.output_dir))

    @property
    def ours(self) -> Path:
        """The subfolder for what LLaMA-Factory does not know."""
        return self.path / "surefoot"

    @property
    def resolved_yaml(self) -> Path:
        """Every setting of the run, final."""
        return self.ours / "resolved.yaml"

    @property
    def machine_json(self) -> Path:
        """What the run ran on."""
        return self.ours / "machine.json"

    @property
    def data_report(self) -> Path:
        """What became of the rows."""
        return self.ours / "data_report.json"

    @property
    def trainer_log(self) -> Path:
        """One JSON object a line, as LLaMA-Factory's board reads it."""
        return self.path / "trainer_log.jsonl"

    @property
    def trainer_state(self) -> Path:
        """The log history in transformers' format, as LLaMA-Factory's plots read it."""
        return self.path / "trainer_state.json"

    @property
    def crash_report(self) -> Path:
        """The traceback of a failure that nobody foresaw."""
        return self.ours / "crash.txt"

    def checkpoints(self) -> list[Path]:
        """The `checkpoint-N` folders in it, in the order of their steps."""
        found = [path for path in self.path.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))

    def clear_results(self) -> None:
        """Remove what an earlier run in this folder said of itself; it would pass for the new run's."""
        stale = [self.path / name for name in RESULT_FILES]
        for path in (*stale, *self.path.glob("training_*.png")):
            path.unlink(missing_ok=True)

    def tells_of_run_with(self, steps: int) -> bool:
        """Tell whether the folder's results are of a run that ended after so many steps; its card is written last."""
        try:
            results = json.loads((self.path / "all_results.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return (self.path / "README.md").exists() and results.get("train_steps") == steps

    def _spare_what_it_starts_from(self, cfg: Config) -> None:
        """Refuse to write over the model or, when the folder is emptied, over the adapter that a run starts from."""
        inputs = [("model_name_or_path", cfg.model_name_or_path)]
        if cfg.overwrite_output_dir:
            inputs += [("adapter_name_or_path", path) for path in cfg.adapter_name_or_path or []]
        own = self.path.resolve()
        for key, name in inputs:
            if name and Path(name).is_dir() and own in (Path(name).resolve(), *Path(name).resolve().parents[:1]):
                raise UserError(
                    f"{self.path} holds what the run starts from ({key}: {name}), which it would destroy",
                    hint="name another output_dir",
                    key="output_dir",
                )

    def check(self, cfg: Config) -> None:
        """Prove that the run may write here before any work is spent on it; leaves nothing behind.

        Args:
            cfg: the run's settings.

        Raises:
            UserError: it cannot be written to, or holds another run's weights and nothing says what to do with them.
        """
        with explain_disk_errors(self.path):
            weights = next((name for name in WEIGHT_FILES if (self.path / name).exists()), None)
        if weights and not self.checkpoints() and not cfg.overwrite_output_dir and not cfg.resume_from_checkpoint:
            raise UserError(
                f"{self.path} holds the result of another run ({weights}) and no checkpoint to go on from",
                hint="name another output_dir, or set `overwrite_output_dir: true` to replace that result",
                key="output_dir",
            )
        self._spare_what_it_starts_from(cfg)
        # The deepest folder first, so that they can be removed in this order.
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        probe = self.path / f".surefoot.{os.getpid()}.tmp"
        with explain_disk_errors(self.path):
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                probe.write_bytes(b"")
            finally:
                probe.unlink(missing_ok=True)
                for folder in missing:
                    with contextlib.suppress(OSError):  # it was not made, or another run has moved in
                        folder.rmdir()
