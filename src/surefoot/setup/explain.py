"""`surefoot setup explain F35`: one entry of the doctor's catalogue, filled for this machine."""

from __future__ import annotations

import difflib
import re

from surefoot.doctor.diagnose import diagnose
from surefoot.doctor.finding import Finding
from surefoot.doctor.fixes import device_command, standard_values
from surefoot.doctor.rules.catalogue import all_rules
from surefoot.doctor.texts import load_texts, sentence
from surefoot.errors import UserError
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Snapshot

_WORDS = {
    "en": {
        "why": "Why", "seen": "How it is seen", "fix": "Fix", "confirm": "Confirms it",
        "here": "found on this machine:", "not": "not found on this machine: surefoot doctor looks for it",
        "job": "found only together with a training YAML: surefoot doctor X.yaml",
        "follows": "it follows from {}",
        "levels": {
            "blocks": "no GPU can be used", "wrong": "results are silently wrong", "breaks": "runs crash",
            "slow": "runs are slow", "note": "worth knowing",
        },
    },
    "zh": {
        "why": "原因", "seen": "如何看出", "fix": "修复", "confirm": "如何确认",
        "here": "本机存在：", "not": "本机未发现：由 surefoot doctor 检查",
        "job": "需要与训练 YAML 一起检查：surefoot doctor X.yaml",
        "follows": "由 {} 引起",
        "levels": {
            "blocks": "无法使用 GPU", "wrong": "结果会无声地出错", "breaks": "训练会崩溃",
            "slow": "训练变慢", "note": "值得知道",
        },
    },
}  # fmt: skip


def explain(rule_id: str, snapshot: Snapshot, language: str = "en") -> str:
    """Write one entry of the doctor's catalogue for a machine.

    Args:
        rule_id: as `F35`; small letters and missing zeros are allowed.
        snapshot: the machine. Where the finding is there, its evidence is quoted; else the entry is filled with what
            is known of the machine, and what is not known is written as `<name>`.
        language: `en` or `zh`.

    Returns:
        The entry as plain text: what, how bad, why, how it is seen, fix, confirmation.

    Raises:
        UserError: there is no such id; the message names near ones.
    """
    wanted = _known(rule_id)
    words = _WORDS[language]
    finding = next((f for f in diagnose(snapshot, language).findings if f.id == wanted), None)
    entry = finding or _unfound(wanted, Machine(snapshot), language)
    if finding is None:
        seen = [words["not" if wanted in all_rules() else "job"]]
    else:
        because = [words["follows"].format(finding.because_of)] if finding.because_of else []
        seen = [words["here"], *finding.evidence, *because]
    sections = (
        (words["why"], [entry.mechanism]),
        (words["seen"], seen),
        (words["fix"], list(entry.fix)),
        (words["confirm"], [entry.confirm]),
    )
    lines = [f"{wanted}  {entry.title}", f"({words['levels'][entry.level]})"]
    for title, inside in sections:
        lines += ["", title, *(f"  {line}" for line in inside)]
    return "\n".join(lines) + "\n"


def _known(text: str) -> str:
    """Write an id as the catalogue does, or name the near ones."""
    texts = load_texts()
    found = re.fullmatch(r"[Ff]?0*(\d{1,4})", text.strip())
    wanted = f"F{int(found.group(1)):02d}" if found else text.strip().upper()
    if wanted in texts:
        return wanted
    ids = sorted(texts, key=lambda i: int(i[1:]))
    if found:
        near = sorted(ids, key=lambda i: abs(int(i[1:]) - int(found.group(1))))[:4]
    else:
        near = difflib.get_close_matches(wanted, ids, n=4, cutoff=0.3) or _by_words(text, ids)
    near = sorted(near, key=lambda i: int(i[1:]))
    listed = "; ".join(f"{i} ({sentence(texts[i]['title'], {}, 'en')})" for i in near)
    hint = f"near ones: {listed}" if near else f"ids go from {ids[0]} to {ids[-1]}"
    raise UserError(f"the catalogue has no {text.strip()!r}", hint=hint, key="explain")


def _by_words(text: str, ids: list[str]) -> list[str]:
    """Ids whose titles share words with what was asked."""
    asked = set(re.findall(r"\w{3,}", text.lower()))
    shared = {i: len(asked & set(re.findall(r"\w{3,}", load_texts()[i]["title"].lower()))) for i in ids}
    return [i for i in sorted(ids, key=lambda i: -shared[i]) if shared[i]][:4]


def _unfound(rule_id: str, m: Machine, language: str) -> Finding:
    """An entry for a machine that does not have the fault."""
    text, values = load_texts()[rule_id], standard_values(m)
    values["device_command"] = device_command(m, values["gfx"])

    def fill(line: str) -> str:
        whole = sentence(sentence(line, values, language), values, language)
        return re.sub(r"\{(\w+)\}", r"<\1>", whole)

    return Finding(
        id=rule_id,
        level=text["level"],
        title=fill(text["title"]),
        mechanism=fill(text["why"]),
        evidence=(),
        fix=tuple(line for fix in text["fix"] if (line := fill(fix))),
        confirm=fill(text["confirm"]),
        seen=False,
    )
