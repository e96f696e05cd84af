from __future__ import annotations

import io

import pytest
from typer.testing import CliRunner

from surefoot.cli.main import app
from surefoot.config import load_config
from surefoot.use.chat import Chat, converse, open_chat

GREEDY = ["template=chatml", "do_sample=false", "max_new_tokens=12", "device=cpu"]


@pytest.fixture(scope="module")
def loaded(tiny_llama):
    return open_chat(load_config(None, [f"model_name_or_path={tiny_llama}", *GREEDY], "chat"), lambda message: None)


@pytest.fixture
def chat(loaded):
    said = []
    session = Chat(loaded.model, loaded.tokenizer, loaded.template, loaded.cfg, said.append)
    session.said = said
    return session


def by_hand(chat, text):
    """The same answer through transformers' own generate, from the text of the training's prompt."""
    import torch

    ids = torch.tensor([chat.tokenizer.encode(text, add_special_tokens=False)])
    output = chat.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
        eos_token_id=chat.template.stop_ids(chat.tokenizer), pad_token_id=chat.tokenizer.pad_token_id,
    )  # fmt: skip
    return chat.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_the_answer_is_the_models_to_the_training_prompt_and_arrives_in_pieces(chat):
    pieces = []
    answer = chat.ask("hello", pieces.append)
    assert answer == "".join(pieces) == by_hand(chat, PROMPT)
    assert [turn.role for turn in chat.turns] == ["user", "assistant"]


def test_the_second_question_sees_the_first_and_its_answer(chat):
    first = chat.ask("hello", lambda piece: None)
    second = chat.ask("again", lambda piece: None)
    again = f"{PROMPT}{first}<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    assert second == by_hand(chat, again)


def test_commands_clear_the_turns_and_set_the_system_prompt(chat):
    lines = iter(["hello", "/system Be brief.", "/clear", "hello", "/exit", "never read"])
    shown = []
    converse(chat, lambda question: next(lines), shown.append)
    assert next(lines) == "never read"
    assert chat.turns[0].content == "hello" and len(chat.turns) == 2
    expected = by_hand(chat, "<|im_start|>system\nBe brief.<|im_end|>\n" + PROMPT)
    assert chat.turns[1].content == expected and "".join(shown).endswith(f"Model: {expected}\n")


def test_the_end_of_the_input_ends_the_conversation(chat):
    def read(question):
        raise EOFError

    converse(chat, read, lambda piece: None)
    assert chat.turns == []


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(chat, monkeypatch):
    pieces = []

    def show(piece):
        pieces.append(piece)
        raise KeyboardInterrupt

    answer = chat.ask("hello", show)
    assert pieces and answer.startswith(pieces[0])
    assert chat.turns[-1].content == answer and "(stopped)" in chat.said


def test_turns_that_the_model_cannot_read_are_forgotten_oldest_first_and_said(chat):
    for _ in range(3):
        chat.ask("x" * 150, lambda piece: None)
    assert len(chat.turns) < 6 and any("forgotten" in sentence for sentence in chat.said)


def test_stop_words_end_the_answer(chat):
    assert chat.tokenizer.convert_tokens_to_ids("<|im_end|>") in chat.generation(5).eos_token_id


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["temperature=0"], {"do_sample": False}),
        (["do_sample=true", "top_k=7"], {"do_sample": True, "top_k": 7}),
        (["max_new_tokens=-1", "max_length=100"], {"max_new_tokens": 90}),
        (["num_beams=3"], {"num_beams": 3}),
    ],
)
def test_generating_keys_reach_generate(loaded, tiny_llama, overrides, expected):
    cfg = load_config(None, [f"model_name_or_path={tiny_llama}", *GREEDY, *overrides], "chat")
    generation = Chat(loaded.model, loaded.tokenizer, loaded.template, cfg, print).generation(10)
    assert {key: getattr(generation, key) for key in expected} == expected


def test_several_beams_answer_in_one_piece(loaded, tiny_llama):
    cfg = load_config(None, [f"model_name_or_path={tiny_llama}", *GREEDY, "num_beams=2"], "chat")
    pieces = []
    answer = Chat(loaded.model, loaded.tokenizer, loaded.template, cfg, print).ask("hello", pieces.append)
    assert pieces == [answer]


def test_the_command_answers_a_prompt_on_stdout_only(chat, tiny_llama):
    run = CliRunner().invoke(app, ["chat", str(tiny_llama), *GREEDY, "--prompt", "hello"])
    assert run.exit_code == 0, run.stderr
    assert run.stdout == by_hand(chat, PROMPT) + "\n"


def test_the_command_reads_a_pipe(chat, tiny_llama, monkeypatch):
    run = CliRunner().invoke(app, ["chat", str(tiny_llama), *GREEDY], input="hello\n")
    assert run.exit_code == 0 and run.stdout == f"Model: {by_hand(chat, PROMPT)}\n"


def test_an_adapter_changes_the_answer(tiny_llama, tiny_adapter):
    arguments = [f"model_name_or_path={tiny_llama}", f"adapter_name_or_path={tiny_adapter}", *GREEDY]
    adapted = open_chat(load_config(None, arguments, "chat"), lambda message: None)
    with adapted.model.disable_adapter():
        plain = adapted.ask("hello", lambda piece: None)
    adapted.clear()
    assert adapted.ask("hello", lambda piece: None) != plain


def test_stdin_without_a_terminal_is_not_echoed(monkeypatch):
    from surefoot.cli.chat import _read

    monkeypatch.setattr("sys.stdin", io.StringIO("a line\n"))
    assert _read("You: ") == "a line\n"
    with pytest.raises(EOFError):
        _read("You: ")
