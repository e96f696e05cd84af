"""The page in an incident's folder that a person reads first."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from surefoot.guard.check import shown
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.seen import Seen


def incident_page(place: Path, record: dict[str, Any], diagnosis: Diagnosis, seen: Seen) -> str:
    """Say what happened, and how to run it again.

    Args:
        place: where the folder will stand.
        record: what `incident.json` holds.
        diagnosis: what was found.
        seen: what the step gave.

    Returns:
        Markdown.
    """
    device, versions = record["device"], record["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    evidence = "\n".join(f"- {sentence}" for sentence in diagnosis.evidence) or "- (none recorded)"
    weights = f"- Trained weights of that step: {_weights(record['weights'])}."
    command = f"surefoot replay {shlex.quote(str(place))}"
    return f"""# Step {record["step"]}: {headline(diagnosis)}

{evidence}
- Loss {seen.loss:g}; {len(seen.bad_gradients)} of {len(seen.gradients)} trained tensors with bad gradients.
- Rows: {shown([row for sample in record["samples"] for row in sample["row_ids"]])}.
- {device["name"]} ({device["torch"]}); {packages}; autocast {record["autocast"]}, loss scale {record["loss_scale"]:g}.
{weights}

Run it again: `{command}`

On another machine copy this folder, and add `--model PATH` if the base model lies elsewhere there. `--device cpu` and
`--dtype float32` tell whether it happens there too.

The folder holds the token ids of the rows above and the run's settings: who gets it can read them.
"""


def headline(diagnosis: Diagnosis) -> str:
    """Name a fault in a few words, as "RANGE in model.layers.2.self_attn (bmm, forward): attention scores"."""
    where = f" in {diagnosis.module}" if diagnosis.module else ""
    how = ", ".join(part for part in (diagnosis.op, diagnosis.phase) if part)
    place = f": {diagnosis.place}" if diagnosis.place else ""
    return f"{diagnosis.fault}{where}{f' ({how})' if how else ''}{place}"


def _weights(weights: dict[str, Any]) -> str:
    if weights["kept"]:
        return f"here, {weights['bytes'] / 2**20:.1f} MiB"
    size = f"{weights['bytes'] / 2**30:.1f} GiB, too large to keep here"
    if weights["checkpoint"]:
        return f"{size}; {weights['checkpoint']} of the run is the last before it (`--weights FOLDER`)"
    return f"{size}, and the run had no checkpoint before it"
