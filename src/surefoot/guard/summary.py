"""The end of a run in a few sentences: how often the guard spoke, what it changed, and what that cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.guard.diagnosis import Diagnosis


def summarize(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tell what the guard did, from its journal.

    Args:
        events: lines of `guard.jsonl`, oldest first. Of their extras are read, where they are there: `steps_redone`,
            `seconds`, and `step_seconds_before` and `step_seconds_after` (median of healthy steps).

    Returns:
        Sentences for a person; empty when nothing happened.
    """
    alarms = [event for event in events if event["event"] == "alarm"]
    actions = [event for event in events if event["event"] == "action" and event.get("action")]
    stops = [event for event in events if event["event"] == "stopped"]
    findings = [event for event in events if event["event"] == "preflight"]
    if not (alarms or actions or stops or findings):
        return []
    lines = []
    if findings:
        lines.append(f"Guard: {_count(len(findings), 'finding')} before step 1: {_joined(map(_named, findings))}.")
    if alarms or not findings:
        lines.append(_alarms(alarms, events))
    lines += [_action(event) for event in _without_repeats(actions)]
    lines += [f"Guard: stopped at step {event['step']}: {event.get('action') or _named(event)}." for event in stops]
    lines += [f"Accused: {event['action']}." for event in events if event["event"] == "accused"]
    if alarms or actions:
        lines.append(_cost(events))
    return lines


def _alarms(alarms: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> str:
    steps = list(dict.fromkeys(event["step"] for event in alarms))
    if not steps:
        return "Guard: no alarm."
    classes = Counter(str(event["class"]) for event in events if event["event"] == "diagnosis" and event.get("class"))
    named = f" ({_joined(f'{n} x {name}' if n > 1 else name for name, n in classes.items())})" if classes else ""
    shown = ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")
    return f"Guard: {_count(len(alarms), 'alarm')}, at step{'s' if len(steps) > 1 else ''} {shown}{named}."


def _action(event: Mapping[str, Any]) -> str:
    where = event.get("module")
    action = str(event["action"]).rstrip(".")
    place = f" [{where}]" if where and where not in action else ""
    reference = {"RANGE": " against float32", "KERNEL": " against reference kernels"}.get(str(event.get("class")), "")
    how = {True: f", checked{reference}", False: ", and it did not hold"}.get(event.get("verified"), "")  # type: ignore[arg-type]
    return f"Changed at step {event['step']}: {action}{place}{how}{_slower(event)}."


def _slower(event: Mapping[str, Any]) -> str:
    before, after = event.get("step_seconds_before"), event.get("step_seconds_after")
    if not before or not after:
        return ""
    share = after / before - 1.0
    if abs(share) < 0.005:
        return "; steps take as long as before"
    return f"; a step takes {after:.3g} s instead of {before:.3g} s ({share:+.1%})"


def _cost(events: Sequence[Mapping[str, Any]]) -> str:
    lost = sum(event.get("steps_lost") or 0 for event in events)
    redone = sum(event.get("steps_redone") or 0 for event in events)
    # `resumed` counts the same seconds again, up to the first good step.
    seconds = sum(event.get("seconds") or 0.0 for event in events if event["event"] == "action")
    parts = [f"{_count(lost, 'step')} lost", f"{_count(redone, 'step')} done again"]
    if seconds:
        parts.append(f"{seconds:.1f} s of looking for the cause and checking the cure")
    return f"Cost: {_joined(parts)}."


def _without_repeats(actions: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Keep an action the first time that it was taken: after a restart from step 0 the same plan is applied again."""
    kept: dict[tuple[Any, Any], Mapping[str, Any]] = {}
    for event in actions:
        kept.setdefault((event["action"], event.get("module")), event)
    return list(kept.values())


def _named(event: Mapping[str, Any]) -> str:
    where = event.get("module") or event.get("place") or ", ".join(list(event.get("samples") or ())[:3])
    return f"{event.get('class') or 'cause not known'}{f' in {where}' if where else ''}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _joined(parts: Iterable[str]) -> str:
    listed = list(parts)
    return ", ".join(listed[:-1]) + (" and " if len(listed) > 1 else "") + listed[-1] if listed else ""


def hint_for(diagnosis: Diagnosis) -> str:
    """Return what a person can do about a fault that stopped a run."""
    hints = {
        "WEIGHTS": "load a sound checkpoint: training on would spread it",
        "DATA": "mend or remove these rows",
        "MATH": "the expression itself has no finite value here; no number format cures it",
        "TRANSIENT": "test the device: `surefoot doctor --deep`",
        "OPTIMIZER": "lower learning_rate, or check adam_epsilon",
    }
    return hints.get(diagnosis.fault, "the last checkpoint is untouched")
