"""The YAML: typed fields with LLaMA-Factory's names, defaults, cross-checks and "did you mean"."""

from surefoot.config.key import Purpose
from surefoot.config.load import load_config, make_config
from surefoot.config.schema import Config
from surefoot.config.table import KeyInfo, all_keys

__all__ = ["Config", "KeyInfo", "Purpose", "all_keys", "load_config", "make_config"]
