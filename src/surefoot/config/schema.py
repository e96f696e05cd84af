"""The one flat, frozen object that every room reads its settings from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from surefoot.config.key import Purpose
from surefoot.config.keys_data import DataKeys
from surefoot.config.keys_finetuning import FinetuningKeys
from surefoot.config.keys_generating import GeneratingKeys
from surefoot.config.keys_model import ModelKeys
from surefoot.config.keys_surefoot import SurefootKeys
from surefoot.config.keys_training import TrainingKeys
from surefoot.errors import Problem


class Config(SurefootKeys, GeneratingKeys, TrainingKeys, FinetuningKeys, DataKeys, ModelKeys):
    """All settings of one command, under LLaMA-Factory's names, checked and final.

    Build it with `load_config` or `make_config`: constructing it directly checks types only and derives nothing.
    """

    _source: Path | None = PrivateAttr(None)
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)
    _filled: dict[str, Any] = PrivateAttr(default_factory=dict)
    _warnings: list[Problem] = PrivateAttr(default_factory=list)
    _purpose: Purpose = PrivateAttr("train")

    @property
    def source(self) -> Path | None:
        """The file that was read, or None."""
        return self._source

    @property
    def given(self) -> dict[str, Any]:
        """What the person wrote, secrets included: never print or store it whole."""
        return self._given

    @property
    def filled(self) -> dict[str, Any]:
        """The settings worth telling that the person left out, with the values that they got."""
        return self._filled

    @property
    def warnings(self) -> list[Problem]:
        """What the person should know, though nothing is wrong enough to stop."""
        return self._warnings

    @property
    def purpose(self) -> Purpose:
        """The command that these settings are for."""
        return self._purpose

    @property
    def tokens_per_pass(self) -> int | str:
        """Tokens that one forward and backward pass may hold, or `auto`: the key `memory`."""
        return self.memory

    @property
    def effective_cutoff_len(self) -> int:
        """Tokens that a sample may have: LLaMA-Factory takes one off where packing is asked for by name."""
        asked = bool(self._given.get("packing")) or self.neat_packing
        return self.cutoff_len - 1 if asked else self.cutoff_len

    def to_yaml(self) -> str:
        """Write the settings as YAML that loads to the same settings; secrets are left out, and named."""
        from surefoot.config.write import write_yaml

        return write_yaml(self)
