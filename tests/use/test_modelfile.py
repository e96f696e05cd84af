from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_llama import build_tokenizer

from surefoot.data.template import get_template
from surefoot.use.modelfile import ollama_template, write_modelfile


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_chatml_reads_as_ollama_writes_it(tokenizer):
    template = replace(get_template("chatml", tokenizer), default_system="Be brief.")
    assert write_modelfile(template, tokenizer) == (
        "# Written by Surefoot.\n\nFROM .\n\n"
        'TEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}'
        '{{ range .Messages }}{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        "<|im_start|>assistant\n"
        '{{ else if eq .Role "assistant" }}{{ .Content }}<|im_end|>\n{{ end }}{{ end }}"""\n\n'
        'SYSTEM """Be brief."""\nPARAMETER stop "<|endoftext|>"\nPARAMETER stop "<|im_end|>"\n'
        'PARAMETER stop "<|im_start|>"\nPARAMETER num_ctx 4096\n'
    )


def test_a_system_text_inside_the_first_user_turn_stands_there_only(tokenizer):
    template = get_template("mistral", tokenizer)
    assert template.system_in_user
    text = ollama_template(template, tokenizer)
    assert text.startswith("{{ range $i, $m := .Messages }}")
    first, others = text.split("{{ else }}", 1)
    assert "$.System" in first and "System" not in others


def test_every_brace_that_opens_closes(tokenizer):
    from surefoot.data.template_table import read_template_table

    for name in read_template_table():
        text = ollama_template(get_template(name, tokenizer), tokenizer)
        opened = text.count("{{ if ") + text.count("{{ range ")
        assert opened == text.count("{{ end }}"), name
        assert "{{content}}" not in text and "{{idx}}" not in text, name
