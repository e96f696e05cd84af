"""Write the quickstart's rows: questions about dates and units, each answered by one line of JSON.

    python examples/quickstart/make_rows.py

Makes the folder `rows` beside this script: `train.jsonl` and `heldout.jsonl` (alpaca rows) and `dataset_info.json`. The
same seed gives the same rows. No date and no conversion (number, unit, unit) of the held-out rows is among the training
rows, so a right answer to one of them cannot be remembered.
"""

from __future__ import annotations

import argparse
import calendar
import datetime
import json
import random
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

ROWS = Path(__file__).resolve().parent / "rows"
MONTHS = [datetime.date(2000, month, 1).strftime("%B") for month in range(1, 13)]

# from, to, how often `to` goes into `from` as a power of ten
CONVERSIONS = [("km", "m", 3), ("kg", "g", 3), ("l", "ml", 3), ("g", "mg", 3), ("m", "cm", 2), ("cm", "mm", 1)]
SPELLED = {
    "km": "kilometres", "m": "metres", "cm": "centimetres", "mm": "millimetres", "kg": "kilograms", "g": "grams",
    "mg": "milligrams", "l": "litres", "ml": "millilitres",
}  # fmt: skip
UNIT_QUESTIONS = [
    "Convert {number} {a} to {b}.",
    "How many {b} are {number} {a}?",
    "What is {number} {a} in {b}?",
    "{number} {a} in {b}",
    "Express {number} {a} in {b}, please.",
    "I measured {number} {a}. How much is that in {b}?",
]
DATE_QUESTIONS = [
    "When is {date}?",
    "Write {date} as an ISO date.",
    "The meeting is on {date}.",
    "Normalise this date: {date}",
    "{date}",
    "Please file it under {date}.",
]


def ordinal(day: int) -> str:
    """3 -> 3rd."""
    ending = "th" if 10 <= day % 100 <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


DATE_FORMS: list[Callable[[datetime.date], str]] = [
    lambda d: f"{d.day} {MONTHS[d.month - 1]} {d.year}",
    lambda d: f"{MONTHS[d.month - 1]} {d.day}, {d.year}",
    lambda d: f"{MONTHS[d.month - 1]} {ordinal(d.day)}, {d.year}",
    lambda d: f"the {ordinal(d.day)} of {MONTHS[d.month - 1]} {d.year}",
    lambda d: f"{d.day} {MONTHS[d.month - 1][:3]} {d.year}",
    lambda d: f"{MONTHS[d.month - 1][:3]} {d.day} {d.year}",
    lambda d: f"{d.year}/{d.month}/{d.day}",
    lambda d: f"{d.day}.{d.month}.{d.year}",
]


def date_row(rng: random.Random) -> tuple[str, str, str]:
    """A question about a date, its answer, and what identifies the problem whatever its wording."""
    year, month = rng.randrange(1950, 2050), rng.randrange(1, 13)
    # half of them with a day below ten, since the zero in front is what a small model finds hard
    first, end = rng.choice(((1, 10), (10, calendar.monthrange(year, month)[1] + 1)))
    date = datetime.date(year, month, rng.randrange(first, end))
    question = rng.choice(DATE_QUESTIONS).format(date=rng.choice(DATE_FORMS)(date))
    answer = json.dumps({"date": date.isoformat()})
    return question[0].upper() + question[1:], answer, answer


def unit_row(rng: random.Random) -> tuple[str, str, str]:
    """A question about a conversion, its answer, and what identifies the problem whatever its wording."""
    a, b, power = rng.choice(CONVERSIONS)
    tenths = rng.randrange(11, rng.choice((100, 1000)))
    number = rng.choice((Decimal(rng.randrange(2, 100)), Decimal(tenths) / 10))
    value = number.scaleb(power)
    spell = rng.random() < 0.5
    names = (SPELLED[a], SPELLED[b]) if spell else (a, b)
    question = rng.choice(UNIT_QUESTIONS).format(number=plain(number), a=names[0], b=names[1])
    answer = f'{{"value": {plain(value)}, "unit": "{b}"}}'
    return question, answer, f"{plain(number)} {a} {b}"


def plain(number: Decimal) -> str:
    """Decimal digits without an exponent and without zeros that say nothing: 3500, 0.25."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def make_rows(training: int, heldout: int, seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Half dates, half conversions, every problem once.

    Args:
        training: how many rows to learn from.
        heldout: how many to score.
        seed: makes the choice; the same seed gives the same rows.

    Returns:
        The training rows and the held-out rows.
    """
    rng = random.Random(seed)
    makers, problems = (date_row, unit_row), {}
    while len(problems) < training + heldout:
        question, answer, problem = makers[len(problems) % 2](rng)
        problems.setdefault(problem, {"instruction": question, "input": "", "output": answer})
    rows = list(problems.values())
    return rows[heldout:], rows[:heldout]


def main() -> None:
    """Write the rows and the dataset_info.json that names them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", type=int, default=560, help="rows to learn from")
    parser.add_argument("--heldout", type=int, default=100, help="rows to score")
    parser.add_argument("--seed", type=int, default=7)
    wanted = parser.parse_args()
    training, heldout = make_rows(wanted.training, wanted.heldout, wanted.seed)
    ROWS.mkdir(exist_ok=True)
    for name, rows in (("train", training), ("heldout", heldout)):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (ROWS / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    info = {"json_answers": {"file_name": "train.jsonl"}, "json_answers_heldout": {"file_name": "heldout.jsonl"}}
    (ROWS / "dataset_info.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    print(f"{len(training)} training rows and {len(heldout)} held-out rows in {ROWS}")
    for row in training[:4]:
        print(f"   {row['instruction']}  ->  {row['output']}")


if __name__ == "__main__":
    main()
