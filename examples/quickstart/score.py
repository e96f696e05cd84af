"""Score the quickstart's held-out rows: how many answers are right to the letter.

    python examples/quickstart/score.py examples/quickstart.yaml                                the model as it comes
    python examples/quickstart/score.py examples/quickstart.yaml --adapter saves/quickstart     with what was trained

Plain transformers and PEFT, on purpose: what Surefoot saves works without Surefoot.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from surefoot.config import Config, load_config
from surefoot.model.demo import resolve_model_path

HELDOUT = Path(__file__).resolve().parent / "rows" / "heldout.jsonl"
LONGEST_ANSWER = 32  # tokens; the right ones have about 18


def load_model(config: Config, adapter: str | None) -> tuple[Any, Any]:
    """The YAML's model in fp32, with the adapter merged in if there is one, and its tokenizer padding on the left."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert config.model_name_or_path, "load_config asks for it"
    path = resolve_model_path(config.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model.eval(), tokenizer


def answer(model: Any, tokenizer: Any, system: str, questions: list[str]) -> list[str]:
    """Greedy answers, one a question."""
    import torch

    chats = [[{"role": "system", "content": system}, {"role": "user", "content": question}] for question in questions]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        out = model.generate(**prompts, max_new_tokens=LONGEST_ANSWER, do_sample=False)
    fresh = out[:, prompts["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(fresh, skip_special_tokens=True)]


def main() -> None:
    """Print the exact-match score and some answers; write both as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="the YAML that training uses")
    parser.add_argument("--adapter", help="folder of a trained adapter")
    parser.add_argument("--json", type=Path, help="write the score here")
    wanted = parser.parse_args()
    started = time.monotonic()
    config = load_config(wanted.config, purpose="chat")
    rows = [json.loads(line) for line in HELDOUT.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: len(row["instruction"]))  # neighbours of like length: little padding
    model, tokenizer = load_model(config, wanted.adapter)
    answers: list[str] = []
    for start in range(0, len(rows), 50):
        questions = [row["instruction"] for row in rows[start : start + 50]]
        answers += answer(model, tokenizer, config.default_system or "", questions)
    right = [got == row["output"] for got, row in zip(answers, rows, strict=True)]
    score = {"exact_match": 100 * sum(right) / len(rows), "right": sum(right), "rows": len(rows)}
    for place in range(0, len(rows), max(1, len(rows) // 5)):
        print(f"   {'right' if right[place] else 'wrong'}  {rows[place]['instruction']}  ->  {answers[place][:70]!r}")
    print(f"   {score['exact_match']:.0f} % of {len(rows)} right to the letter ({time.monotonic() - started:.0f} s)")
    if wanted.json:
        wrong = [{**row, "answer": got} for row, got, good in zip(rows, answers, right, strict=True) if not good]
        wanted.json.write_text(
            json.dumps({**score, "wrong": wrong}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
