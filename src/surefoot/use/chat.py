"""Talk to a model in the terminal, with the prompts that it was trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surefoot.data.messages import Message
from surefoot.errors import WorkError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from surefoot.config import Config
    from surefoot.data.template import Template

HELP = "/clear forgets the conversation, /system TEXT sets the system prompt, /exit ends. Ctrl-C stops an answer."


@dataclass
class Chat:
    """A conversation with a model.

    Attributes:
        model: a causal language model in evaluation mode, with or without an adapter.
        tokenizer: its tokenizer, as the template left it.
        template: how prompts are written; the one of the training.
        cfg: the settings; the generating keys and those of the template are read.
        say: shows a sentence to the person.
        system: the system prompt; empty for the template's own.
        turns: the conversation so far: user, assistant, user, ...
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    template: Template
    cfg: Config
    say: Callable[[str], None]
    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def ask(self, text: str, show: Callable[[str], None]) -> str:
        """Put a question and stream the answer; both join the conversation.

        Args:
            text: what the person says.
            show: gets the answer piece by piece.

        Returns:
            The answer. When Ctrl-C stops it, what there was of it.
        """
        self.turns.append(Message("user", text))
        prompt = self._prompt_that_fits()
        heard: list[str] = []

        def hear(piece: str) -> None:
            heard.append(piece)
            show(piece)

        try:
            generate(
                self.model, self.tokenizer, prompt, self.generation(len(prompt)), hear, self.cfg.skip_special_tokens
            )
        except KeyboardInterrupt:
            self.say("(stopped)")
        answer = "".join(heard)
        self.turns.append(Message("assistant", answer))
        return answer

    def clear(self) -> None:
        """Forget the conversation; the system prompt stays."""
        self.turns.clear()

    def generation(self, prompt_tokens: int) -> GenerationConfig:
        """Translate the generating keys; LLaMA-Factory's rules: `max_new_tokens` wins over `max_length`."""
        return generation_config(self.cfg, self.template.stop_ids(self.tokenizer), self.tokenizer, prompt_tokens)

    def _prompt_that_fits(self) -> list[int]:
        """Encode the conversation, without its oldest turns if the model could not read all of it."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        prompt = encode_prompt(self.template, self.tokenizer, self.turns, self.system)
        dropped = 0
        while limit and len(prompt) >= limit and len(self.turns) > 2:
            del self.turns[:2]
            dropped += 2
            prompt = encode_prompt(self.template, self.tokenizer, self.turns, self.system)
        if dropped:
            self.say(f"(the model reads {limit} tokens: the oldest {dropped} turns are forgotten)")
        if limit and len(prompt) >= limit:
            self.say(f"(this prompt has {len(prompt)} tokens, the model was made for {limit}: expect a poor answer)")
        return prompt


def encode_prompt(
    template: Template, tokenizer: PreTrainedTokenizerBase, turns: Iterable[Message], system: str = ""
) -> list[int]:
    """Write a conversation as the training did, up to where the answer begins.

    Args:
        template: of the training.
        tokenizer: as the template left it.
        turns: ends with a user turn.
        system: empty for the template's own.

    Returns:
        Token ids.
    """
    conversation = [*turns, Message("assistant", "")]
    prompt, _ = template.encode_oneturn(tokenizer, conversation, system)
    return prompt


def generation_config(
    cfg: Config, stop_ids: list[int], tokenizer: PreTrainedTokenizerBase, prompt_tokens: int
) -> GenerationConfig:
    """Translate the YAML's generating keys for transformers.

    Args:
        cfg: the settings.
        stop_ids: tokens that end an answer.
        tokenizer: for the padding token.
        prompt_tokens: length of the prompt, which counts into `max_length`.

    Returns:
        What `generate` needs.
    """
    from transformers import GenerationConfig

    samples = cfg.do_sample and cfg.temperature > 0
    sampling = {"temperature": cfg.temperature, "top_p": cfg.top_p, "top_k": cfg.top_k} if samples else {}
    return GenerationConfig(
        do_sample=samples,
        num_beams=cfg.num_beams,
        max_new_tokens=cfg.max_new_tokens if cfg.max_new_tokens > 0 else max(1, cfg.max_length - prompt_tokens),
        repetition_penalty=cfg.repetition_penalty,
        length_penalty=cfg.length_penalty,
        eos_token_id=stop_ids,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0],
        use_cache=cfg.use_kv_cache,
        **sampling,
    )


def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[int],
    generation: GenerationConfig,
    show: Callable[[str], None],
    skip_special_tokens: bool,
) -> None:
    """Generate an answer and show it as it grows; with several beams, in one piece at the end.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        prompt: token ids.
        generation: how.
        show: gets the text piece by piece.
        skip_special_tokens: leave marks such as the end of a turn out of the text.

    Raises:
        WorkError: the model's scores are NaN.
    """
    import torch
    from transformers import LogitsProcessorList, TextStreamer

    def refuse_nan(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if torch.isnan(scores).any():
            raise WorkError(
                "the model's answer is not a number (NaN)",
                hint="the adapter or its base model is damaged, or needs infer_dtype=float32",
            )
        return scores

    class Stream(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                show(text)

    device = next(model.parameters()).device
    ids = torch.tensor([prompt], device=device)
    beams = generation.num_beams > 1
    stream = None if beams else Stream(tokenizer, skip_prompt=True, skip_special_tokens=skip_special_tokens)
    # A stream writes its last words only when told to end; after Ctrl-C they are still in it.
    try:
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=generation,
                streamer=stream,
                logits_processor=LogitsProcessorList([refuse_nan]),
            )
    except KeyboardInterrupt:
        if stream is not None:
            stream.end()
        raise
    if beams:
        show(str(tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=skip_special_tokens)))


def converse(chat: Chat, read: Callable[[str], str], show: Callable[[str], None]) -> None:
    """Read questions and commands until /exit or the end of the input.

    Args:
        chat: the conversation.
        read: shows a prompt and returns a line; raises EOFError at the end.
        show: gets the answers piece by piece.
    """
    chat.say(HELP)
    while True:
        try:
            line = read("You: ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/clear":
            chat.clear()
            chat.say("(forgotten)")
        elif line == "/system" or line.startswith("/system "):
            chat.system = line.removeprefix("/system").strip()
            chat.say(f"(system prompt: {chat.system or 'the template’s own'})")
        elif line in ("/help", "/?"):
            chat.say(HELP)
        elif line:
            show("Model: ")
            chat.ask(line, show)
            show("\n")


def open_chat(cfg: Config, say: Callable[[str], None]) -> Chat:
    """Load what a conversation needs.

    Args:
        cfg: the settings.
        say: shows a sentence to the person.

    Returns:
        An empty conversation.

    Raises:
        UserError: model, adapter, tokenizer or template cannot be used.
    """
    from surefoot.machine.device import choose_device
    from surefoot.model.load import load_for_inference
    from surefoot.run.prompts import load_prompts

    choice = choose_device(cfg.device)
    say(choice.message)
    tokenizer, template = load_prompts(cfg)
    model = load_for_inference(cfg, tokenizer, choice.device, cfg.infer_dtype)
    adapters = ", ".join(cfg.adapter_name_or_path or []) or "none"
    say(f"Model: {cfg.model_name_or_path}; adapter: {adapters}; template: {template.name or 'the tokenizer’s own'}.")
    return Chat(model, tokenizer, template, cfg, say)
