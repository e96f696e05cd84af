"""`surefoot doctor --deep`: run the probes in a subprocess with a time limit; a crash is a finding, not the end."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from surefoot.machine.snapshot import Snapshot

#: Names of the probes, repeated here so that asking for them does not import torch; a test keeps the two equal.
NAMES = (
    "gemm float32",
    "gemm bfloat16",
    "gemm float16",
    "lora gemm bfloat16",
    "lora gemm float16",
    "sdpa math",
    "sdpa flash",
    "sdpa efficient",
    "fp16 subnormals",
    "nf4 round trip",
    "copy checksum",
    "compiled layer",
)


@dataclass(frozen=True)
class ProbeResult:
    """How one probe went.

    Attributes:
        name: the probe.
        ok: whether the device computed rightly (or the probe does not apply).
        detail: the error found, or what happened instead.
    """

    name: str
    ok: bool
    detail: str

    def to_json(self) -> dict[str, object]:
        """Write the JSON form."""
        return {"name": self.name, "ok": self.ok, "detail": self.detail}


def run_probes(
    device: str, names: tuple[str, ...] = NAMES, seconds: float = 120.0, command: list[str] | None = None
) -> Iterator[ProbeResult]:
    """Run probes on a device.

    Args:
        device: `cpu` or `cuda:N`.
        names: which probes.
        seconds: how long any one of them may be silent.
        command: the program to run instead of `python -m surefoot.doctor.probes`; tests put a crashing one there.

    Yields:
        One result a probe, in order, as it becomes known.
    """
    left = list(names)
    while left:
        done, end = 0, ""
        for line in _lines([*(command or [sys.executable, "-m", "surefoot.doctor.probes"]), device, *left], seconds):
            if "end" in line:
                end = str(line["end"])
            elif "probe" in line:
                yield _result(line)
                done += 1
        left = left[done:]
        if left:  # the process died in this probe; go on behind it
            yield ProbeResult(left.pop(0), False, end or "the process ended without an answer")


def _result(line: dict[str, object]) -> ProbeResult:
    name, ok = str(line["probe"]), bool(line.get("ok"))
    if "raised" in line:
        return ProbeResult(name, False, str(line["raised"]))
    if "skipped" in line:
        return ProbeResult(name, ok, f"skipped: {line['skipped']}")
    error = line.get("error")
    words = (
        f"error {error:.2e} against fp64 (at most {line.get('tolerance'):.0e})"
        if isinstance(error, float)
        else "not finite"
    )
    if line.get("flushed"):
        words = "small fp16 numbers are flushed to zero in matrix products"
    if line.get("wrong_bytes"):
        words = f"bytes that changed on the way: {line['wrong_bytes']}"
    return ProbeResult(name, ok, words)


def _lines(argv: list[str], seconds: float) -> Iterator[dict[str, object]]:
    """Yield the process's JSON lines, and at last `{"end": how it ended}`; it is killed when silent too long."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []
    assert process.stdout is not None and process.stderr is not None
    readers = [threading.Thread(target=_pump, args=(process.stdout, lines.put), daemon=True)]
    readers.append(
        threading.Thread(
            target=_pump, args=(process.stderr, lambda text: errors.append(text) if text else None), daemon=True
        )
    )
    for reader in readers:
        reader.start()
    try:
        deadline = time.monotonic() + seconds
        while True:
            try:
                text = lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                process.kill()
                process.wait()
                yield {"end": f"no answer within {seconds:.0f} s: it hangs"}
                return
            if text is None:
                break
            if text.startswith("{"):
                yield json.loads(text)
                deadline = time.monotonic() + seconds
        yield {"end": _how_it_ended(process.wait(), errors)}
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _pump(stream: IO[str], put: object) -> None:
    assert callable(put)
    for text in stream:
        put(text)
    put(None)


def _how_it_ended(code: int, errors: list[str]) -> str:
    last = next((e.strip() for e in reversed(errors) if e.strip()), "")
    if code < 0:
        name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else str(-code)
        return f"the process was killed by {name}" + (f": {last[:300]}" if last else "")
    return f"the process ended with code {code}" + (f": {last[:300]}" if last else "")


def usable_device(seconds: float = 60.0) -> str:
    """Ask torch, in a process of its own, whether a GPU can be used.

    Args:
        seconds: how long it may take.

    Returns:
        `cuda:0` or `cpu`.
    """
    code = "import torch; print(torch.cuda.is_available())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return "cuda:0"  # torch hangs on the device: the probes will say so, one by one
    return "cuda:0" if done.stdout.strip() == "True" else "cpu"


def trial_load(module: str, seconds: float = 60.0, python: str = sys.executable) -> str:
    """Import a compiled add-on in a process of its own.

    Args:
        module: its import name.
        seconds: how long it may take.
        python: the interpreter to run.

    Returns:
        `ok`, or the last line of what it said, or how it died.
    """
    try:
        done = subprocess.run(
            [python, "-c", f"import {module}"], capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:.0f} s: importing it hangs"
    if done.returncode == 0:
        return "ok"
    return (
        done.stderr.strip().splitlines()[-1][:300]
        if done.returncode > 0 and done.stderr.strip()
        else _how_it_ended(done.returncode, [])
    )


def run_deep(machine: Snapshot, device: str = "auto", python: Path | None = None) -> Iterator[ProbeResult]:
    """Run everything that `--deep` does: the probes on the device, then a trial load of each compiled add-on.

    Args:
        machine: the snapshot; what an add-on said is kept in its `python.binaries`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        python: the interpreter whose packages were looked at; None for the running one.

    Yields:
        One result a probe or add-on.
    """
    chosen = usable_device() if device == "auto" else ("cuda:0" if device == "cuda" else device)
    yield from run_probes(chosen)
    section = machine.section("python")
    for module in section.get("addons") or {}:
        answer = trial_load(module, python=str(python or sys.executable))
        section.setdefault("binaries", {}).setdefault(module, {})["load"] = answer
        yield ProbeResult(f"import {module}", answer == "ok", answer)
