"""Takes secrets and names of people and machines out of a snapshot before it is written anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_SECRET_NAME = re.compile(
    r"(TOKEN|SECRET|PASSW|PASSPHRASE|API_?KEY|ACCESS_?KEY|PRIVATE|CREDENTIAL|AUTH|COOKIE|SESSION|NETRC|WANDB_KEY)", re.I
)
_PATTERNS = (
    (re.compile(r"(?<=://)[^/\s@:]+(:[^/\s@]*)?@"), "***@"),
    (re.compile(r"\b(hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[bap]-|pypi-|AKIA|ya29\.)[A-Za-z0-9_\-.]{8,}"), "***"),
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.I), r"\1 ***"),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.?[A-Za-z0-9_-]*"), "***"),
    (
        re.compile(
            r"((?:token|password|passwd|secret|api[_-]?key|access[_-]?key|auth)[\"']?\s*[=:]\s*[\"']?)[^\s\"'&,;]+",
            re.I,
        ),
        r"\1***",
    ),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S), "***"),
    (re.compile(r"/(home|Users)/[^/\s:'\",]+"), r"/\1/<user>"),
    (re.compile(r"\b([0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.I), "<mac>"),
    (re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b"), "<mail>"),
)


class Masker:
    """Masks texts.

    Args:
        names: user names and the home folder's last part; replaced as whole words by `<user>`.
        hosts: host names; replaced by `<host>`.
        homes: home folders; replaced by `/home/<user>`.
    """

    def __init__(self, names: Iterable[str], hosts: Iterable[str], homes: Iterable[str] = ()) -> None:
        self._words = [
            *(
                (re.compile(re.escape(h)), "/home/<user>")
                for h in sorted(set(homes), key=len, reverse=True)
                if len(h) > 2
            ),
            *(
                (re.compile(rf"(?<![\w-]){re.escape(h)}(?![\w-])", re.I), "<host>")
                for h in sorted(set(hosts), key=len, reverse=True)
                if len(h) > 2
            ),
            *(
                (re.compile(rf"(?<![\w-]){re.escape(n)}(?![\w-])"), "<user>")
                for n in sorted(set(names), key=len, reverse=True)
                if len(n) > 2
            ),
        ]

    def text(self, text: str) -> str:
        """Mask one text."""
        for pattern, word in (*self._words, *_PATTERNS):
            text = pattern.sub(word, text)
        return text

    def tree(self, value: Any, key: str = "") -> Any:
        """Mask everything in a JSON-like value; an entry whose name speaks of a secret loses its value whole."""
        if isinstance(value, dict):
            return {self.text(k) if isinstance(k, str) else k: self.tree(v, str(k)) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.tree(item) for item in value]
        if isinstance(value, str):
            return "***" if value and "/" not in key and _SECRET_NAME.search(key) else self.text(value)
        return value
