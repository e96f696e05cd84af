"""The model card: what was trained, on what, how, and with which result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot import __version__
from surefoot.run.folder import RunFolder
from surefoot.train.events import RunFacts

if TYPE_CHECKING:
    from surefoot.config import Config

SETTINGS = (
    "stage", "finetuning_type", "template", "cutoff_len", "packing", "lora_rank", "lora_alpha", "lora_dropout",
    "lora_target", "learning_rate", "lr_scheduler_type", "warmup_ratio", "warmup_steps", "num_train_epochs",
    "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "weight_decay",
    "max_grad_norm", "seed",
)  # fmt: skip
OF_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target")


def model_card(
    cfg: Config,
    facts: RunFacts,
    data_report: dict[str, Any],
    metrics: dict[str, Any],
    versions: dict[str, str | None],
    plots: list[Path],
) -> str:
    """Write the card's text.

    Args:
        cfg: the run's settings.
        facts: of the run.
        data_report: what became of the rows, as `DataReport.to_json` gives it.
        metrics: of `all_results.json`.
        versions: of the packages.
        plots: the PNGs beside the card.

    Returns:
        Markdown with the front matter that model hubs read.
    """
    base = base_model(cfg)
    is_lora = cfg.finetuning_type == "lora"
    shown = [key for key in SETTINGS if is_lora or key not in OF_LORA]
    parts = [
        _front_matter(cfg, base),
        f"# {RunFolder.of(cfg).path.name}\n",
        f"{'A LoRA adapter for' if is_lora else 'A fine-tuned copy of'} {_code(base)}, trained with Surefoot "
        f"{__version__} on {', '.join(_code(name) for name in cfg.dataset or []) or 'its data'}.\n",
        "## Data\n",
        _table(_data_rows(data_report)),
        "## Settings\n",
        _table({key: getattr(cfg, key) for key in shown if getattr(cfg, key) is not None}),
        f"Numbers: {facts.precision}. Trainable: {facts.trainable_parameters:,} of {facts.total_parameters:,} "
        f"parameters. A step is {facts.samples_per_step} samples.\n",
        "## Results\n",
        _table(metrics),
        *[f"![{path.stem.replace('_', ' ')}]({path.name})\n" for path in plots],
        "## Versions\n",
        _table({name: version for name, version in versions.items() if version}),
    ]
    return "\n".join(parts)


def base_model(cfg: Config) -> str:
    """The base model's name; of a local folder only its last part, since a card is for other machines too."""
    name = str(cfg.model_name_or_path)
    return Path(name).name if Path(name).is_dir() else name


def _front_matter(cfg: Config, base: str) -> str:
    tags = ["surefoot", "llama-factory", cfg.finetuning_type]
    lines = ["---", f"library_name: {'peft' if cfg.finetuning_type == 'lora' else 'transformers'}", "license: other"]
    if not Path(str(cfg.model_name_or_path)).is_dir() and "/" in base:
        lines.append(f"base_model: {base}")
    lines += ["pipeline_tag: text-generation", "tags:", *[f"- {tag}" for tag in tags], "---\n"]
    return "\n".join(lines)


def _data_rows(report: dict[str, Any]) -> dict[str, Any]:
    dropped = report.get("dropped") or {}
    rows = {
        key: report[key] for key in ("rows_read", "rows_used", "truncated", "without_labels", "tokens") if key in report
    }
    return {key.replace("_", " "): value for key, value in rows.items()} | {
        f"dropped: {k}": v for k, v in dropped.items()
    }


def _table(rows: dict[str, Any]) -> str:
    lines = ["| | |", "|---|---|", *[f"| {name} | {_cell(value)} |" for name, value in rows.items()], ""]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(part) for part in value)
    return str(value).replace("|", "\\|").replace("\n", " ")


def _code(text: str) -> str:
    return f"`{text}`"
