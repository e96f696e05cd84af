"""Print the table of all keys as Markdown: `python -m surefoot.config.docs [--lang zh] [--write docs/keys.md]`."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from surefoot.config.explain import shown
from surefoot.config.meanings_zh import MEANINGS
from surefoot.config.table import GROUPS, KeyInfo, all_keys
from surefoot.files import write_text

Lang = Literal["en", "zh"]

WORDS: dict[str, dict[str, str]] = {
    "en": {
        "title": "Every key of the YAML",
        "intro": "Surefoot reads LLaMA-Factory's YAML. Each of its {theirs} keys is here, and {ours} of our own. "
        "**works**: does what it does there. **accepted**: may stand there and has nothing to do; the reason is given, "
        "and a run says so when it is set. **not yet**: refused by name when set to something else than its default, "
        "with what to use instead. Any other key is an error that names the nearest ones.",
        "made": "This page is written by `python -m surefoot.config.docs`; edit the declarations in "
        "`src/surefoot/config/keys_*.py` instead.",
        "head": "| key | value | default | status | meaning |",
        "works": "works",
        "accepted": "accepted",
        "not_yet": "not yet",
        "refused": "Not yet",
        "none": "none",
        "follows": "see meaning",
        "model": "Model",
        "data": "Data",
        "finetuning": "Finetuning",
        "training": "Training",
        "generating": "Generating",
        "surefoot": "Surefoot's own",
        "count": "{works} work, {accepted} have nothing to do, {not_yet} are not there yet.",
        "bool": "true, false",
        "int": "whole number",
        "float": "number",
        "str": "text",
        "names": "names",
        "numbers": "numbers",
        "dict": "mapping",
        "any": "anything",
    },
    "zh": {
        "title": "YAML 的全部键",
        "intro": "Surefoot 读取 LLaMA-Factory 的 YAML。它的 {theirs} 个键全部列在这里，另有 {ours} 个我们自己的键。"
        "**可用**：作用与原来相同。**接受**：可以写，但无事可做；给出原因，设置时运行会提示。"
        "**尚未支持**：设为默认值以外的值时按名称拒绝，并说明替代办法。其他任何键都会报错并给出最接近的名称。",
        "made": "本页由 `python -m surefoot.config.docs --lang zh` 生成；"
        "请修改 `src/surefoot/config/keys_*.py` 中的声明。",
        "head": "| 键 | 值 | 默认值 | 状态 | 含义 |",
        "works": "可用",
        "accepted": "接受",
        "not_yet": "尚未支持",
        "refused": "尚未支持",
        "none": "无",
        "follows": "见含义",
        "model": "模型",
        "data": "数据",
        "finetuning": "微调",
        "training": "训练",
        "generating": "生成",
        "surefoot": "Surefoot 自有",
        "count": "可用 {works} 个，无事可做 {accepted} 个，尚未支持 {not_yet} 个。",
        "bool": "true、false",
        "int": "整数",
        "float": "数字",
        "str": "文本",
        "names": "名称列表",
        "numbers": "数字列表",
        "dict": "映射",
        "any": "任意",
    },
}


def keys_page(lang: Lang = "en") -> str:
    """Write the page that lists every key.

    Args:
        lang: en or zh.

    Returns:
        Markdown.
    """
    words = WORDS[lang]
    table = all_keys()
    ours = sum(info.group == "surefoot" for info in table.values())
    lines = [f"# {words['title']}", "", words["intro"].format(theirs=len(table) - ours, ours=ours), "", words["made"]]
    for group in GROUPS:
        rows = [info for info in table.values() if info.group == group]
        count = Counter(info.status for info in rows)
        counts = words["count"].format(**{status: count[status] for status in ("works", "accepted", "not_yet")})
        lines += ["", f"## {words[group]} ({len(rows)})", "", counts, "", group_table(group, lang)]
    return "\n".join(lines) + "\n"


def group_table(group: str, lang: Lang = "en") -> str:
    """Write the table of one group.

    Args:
        group: model, data, finetuning, training, generating or surefoot.
        lang: en or zh.

    Returns:
        Markdown without a final line break.
    """
    rows = [_row(info, lang) for info in all_keys().values() if info.group == group]
    return "\n".join([WORDS[lang]["head"], "|---|---|---|---|---|", *rows])


def _row(info: KeyInfo, lang: Lang) -> str:
    words = WORDS[lang]
    meaning = MEANINGS[info.name] if lang == "zh" else info.meaning
    if info.reason:
        meaning += " " + getattr(info.reason, lang)
    by_reason: dict[str, list[str]] = {}
    for value, reason in info.refused.items():
        by_reason.setdefault(getattr(reason, lang), []).append(f"`{value}`")
    for reason, values in by_reason.items():
        meaning += f" {words['refused']}: {', '.join(values)}. {reason}"
    cells = [f"`{info.name}`", _values(info, words), _default(info, words), words[info.status], meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(info: KeyInfo, words: dict[str, str]) -> str:
    if info.default is None:
        return words["none"] if info.nullable else words["follows"]
    if isinstance(info.default, list):
        return f"`{', '.join(info.default)}`" if info.default else words["none"]
    return f"`{info.default or repr(info.default)}`" if isinstance(info.default, str) else f"`{shown(info.default)}`"


def _values(info: KeyInfo, words: dict[str, str]) -> str:
    found: list[str] = []
    for kind in info.types:
        item = get_args(kind)[0] if get_origin(kind) is list else None
        if get_origin(kind) is Literal or get_origin(item) is Literal:
            found += [f"`{value}`" for value in get_args(item or kind) if value not in info.refused]
        elif item is not None:
            found.append(words["numbers"] if item is float else words["names"])
        else:
            found.append(words[_word(kind)])
    if words["float"] in found:
        found = [word for word in found if word != words["int"]]
    return ", ".join(found)


def _word(kind: Any) -> str:
    if kind in (bool, int, float, str):
        return kind.__name__
    return "any" if kind is Any else "dict"


def main() -> None:
    """Print the page, or write it to a file."""
    parser = argparse.ArgumentParser(prog="python -m surefoot.config.docs", description=__doc__)
    parser.add_argument("--lang", choices=get_args(Lang), default="en", help="language of the page")
    parser.add_argument("--write", type=Path, help="write it there instead of printing it")
    arguments = parser.parse_args()
    page = keys_page(arguments.lang)
    if arguments.write:
        write_text(arguments.write, page)
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
