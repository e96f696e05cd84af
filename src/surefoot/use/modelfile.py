"""The Modelfile with which Ollama serves an exported model, written from the training template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from surefoot.data.slots import TURN_NUMBER, Hole, Special

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefoot.data.slots import Format
    from surefoot.data.template import Template

CONTEXT_TOKENS = 4096
"""What LLaMA-Factory writes; Ollama's own default would cut long conversations earlier."""


def write_modelfile(template: Template, tokenizer: PreTrainedTokenizerBase) -> str:
    """Write a Modelfile for a model that lies in the same folder.

    Conversations are written as in the training, tools and thoughts aside.

    Args:
        template: of the training.
        tokenizer: as the template left it.

    Returns:
        The file's text.
    """
    lines = ["# Written by Surefoot.", "FROM .", f'TEMPLATE """{ollama_template(template, tokenizer)}"""']
    if template.default_system:
        lines.append(f'SYSTEM """{template.default_system}"""')
    for token_id in template.stop_ids(tokenizer):
        lines.append(f"PARAMETER stop {json.dumps(tokenizer.decode([token_id]), ensure_ascii=False)}")
    lines.append(f"PARAMETER num_ctx {CONTEXT_TOKENS}")
    return "\n\n".join(lines[:3]) + "\n\n" + "\n".join(lines[3:]) + "\n"


def ollama_template(template: Template, tokenizer: PreTrainedTokenizerBase) -> str:
    """Write a template in Ollama's language (Go's text/template).

    Args:
        template: of the training.
        tokenizer: for the texts of bos and eos.

    Returns:
        The text between the quotes of TEMPLATE.
    """
    prefix = _text(template.prefix, tokenizer, "")
    user = _text(template.user, tokenizer, "{{ .Content }}")
    answer = _text(template.assistant, tokenizer, "{{ .Content }}")
    system, first_user = "", user
    if template.system_in_user:
        # The system text stands inside the first user turn, so that turn is written apart from the others.
        inside = "{{ if $.System }}" + _text(template.system, tokenizer, "{{ $.System }}") + "{{ end }}{{ .Content }}"
        first_user = _text(template.user, tokenizer, inside)
        user = "{{ if eq $i 0 }}" + first_user + "{{ else }}" + user + "{{ end }}"
    elif template.takes_system:
        system = "{{ if .System }}" + _text(template.system, tokenizer, "{{ .System }}") + "{{ end }}"
    loop = "{{ range $i, $m := .Messages }}" if template.system_in_user else "{{ range .Messages }}"
    turns = '{{ if eq .Role "user" }}' + user + '{{ else if eq .Role "assistant" }}' + answer + "{{ end }}"
    return prefix + system + loop + turns + "{{ end }}"


def _text(form: Format, tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    parts = []
    for slot in form.slots:
        if isinstance(slot, Hole):
            parts.append(slot.before + content + slot.after)
        elif isinstance(slot, Special):
            token = {"bos": tokenizer.bos_token, "eos": tokenizer.eos_token, "token": slot.text}[slot.kind]
            parts.append(token or "")
        else:
            parts.append(slot)
    # Ollama counts messages, not pairs of turns; no number is nearer to the training than a wrong one.
    return "".join(parts).replace(TURN_NUMBER, "")
