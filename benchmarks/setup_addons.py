"""Install the add-ons of a plan for real: `python benchmarks/setup_addons.py` in a throw-away environment.

It runs the very commands and checks of `surefoot setup --for train+deepspeed+flash-attn` for a Radeon RX 7900 XTX:
each check before its step (it must fail), the commands, the check (it must pass), the torch that is installed (it must
be the same), the undo, the check (it must fail again). torch is the CPU build here, so Triton, which a ROCm torch
brings, is installed by hand, and flash-attn's kernels are run in Triton's interpreter against torch's attention.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from surefoot.machine.case import base_snapshot
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Snapshot
from surefoot.setup.addons import addon_steps
from surefoot.setup.choose import choose
from surefoot.setup.plan import CONSTRAINTS, STATE_FOLDER, Step, Wish

TORCH, TRITON = "2.13.0", "3.7.1"  # the pair that torch 2.13's requirements name
_VERSION = ".venv/bin/python -c 'import importlib.metadata as m; print(m.version(\"torch\"))'"
#: The kernels behind flash_attn_func, which itself is registered for GPU tensors only.
_KERNELS = """
import torch
from flash_attn.flash_attn_triton_amd import interface_fa as kernels
q, k, v = (torch.randn(1, 64, 2, 32, requires_grad=True) for _ in range(3))
inputs, options = [t.detach() for t in (q, k, v)], (32**-0.5, True, -1, -1, 0.0, False)
out, lse, *_ = kernels.fwd(*inputs, None, None, 0.0, *options)
want = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
want = want.transpose(1, 2)
upstream = torch.randn_like(out)
grads = [torch.empty_like(t) for t in inputs]
kernels.bwd(upstream, *inputs, out, lse, *grads, None, 0.0, *options)
want.backward(upstream)
backward = max((ours - t.grad).abs().max().item() for ours, t in zip(grads, (q, k, v)))
print(f"forward {(out - want).abs().max().item():.1e}, gradients {backward:.1e}")
"""
_ZERO = """
import torch, deepspeed
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29777", rank=0, world_size=1)
model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
losses = []
for _ in range(3):
    loss = engine(x).pow(2).mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert losses == sorted(losses, reverse=True)
print(*(f"{loss:.3f}" for loss in losses))
"""
NOT_RUN = (
    "flash-attn (Triton): its kernels compiled for a GPU, and flash_attn_func itself, registered for GPU tensors only",
    "flash-attn (CK): any part of its build, which needs ROCm's compiler",
    "bitsandbytes: loading libbitsandbytes_rocm*.so, which needs ROCm's libraries",
    "DeepSpeed: a step on a GPU, its operators compiled with hipcc",
)


def run(folder: Path, *lines: str) -> tuple[int, str, float]:
    """Run bash lines as a plan's steps are run; exit code, output and seconds."""
    began = time.monotonic()
    command = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def must(folder: Path, *lines: str) -> str:
    code, output, _ = run(folder, *lines)
    if code:
        raise SystemExit(f"{lines} ended with {code}:\n{output[-3000:]}")
    return output.strip()


def try_step(folder: Path, step: Step) -> str:
    """Run a step's check, commands, check; one row of the table."""
    before = run(folder, *step.verify)[0]
    code, output, seconds = run(folder, *step.commands)
    if code:
        return f"{step.id:<14} commands ended with {code}: {output.strip().splitlines()[-1][:90]}"
    after, said, _ = run(folder, *step.verify)
    torch = must(folder, _VERSION)
    last = said.strip().splitlines()[-1][:80] if after and said.strip() else ""
    told = ["fails" if before else "PASSES", f"{seconds:.0f} s", "FAILS " + last if after else "passes", torch]
    return f"{step.id:<14} {told[0]:<14} {told[1]:<9} {told[2]:<13} {told[3]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="rx7900xtx-ubuntu", help="base machine to plan for")
    base = parser.parse_args().base
    m, wish = Machine(Snapshot(base_snapshot(base))), Wish(purposes=("train", "deepspeed", "flash-attn"), torch="2.13")
    choice = replace(choose(m, wish), pip=".venv/bin/python -m pip", interpreter=".venv/bin/python")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / STATE_FOLDER).mkdir()
        must(
            folder, "python3 -m venv .venv", f".venv/bin/python -m pip install --quiet torch=={TORCH} triton=={TRITON}"
        )
        torch = must(folder, _VERSION)
        (folder / CONSTRAINTS).write_text(f"torch=={torch}\n", encoding="utf-8")
        print(f"planned for {base}: {choice.torch}; here torch {torch}, triton {TRITON}")
        print(f"{'step':<14} {'check before':<14} {'commands':<9} {'check after':<13} torch after")
        steps = addon_steps(m, wish, choice)
        for step in steps:
            print(try_step(folder, step), flush=True)
        said = must(folder, f"TRITON_INTERPRET=1 .venv/bin/python - <<'E'\n{_KERNELS}\nE").splitlines()[-1]
        print(f"flash-attn's kernels in Triton's interpreter, largest difference to torch's attention: {said}")
        rank = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 DS_ACCELERATOR=cpu"
        said = must(folder, f"{rank} .venv/bin/python - <<'E'\n{_ZERO}\nE").splitlines()[-1]
        print(f"DeepSpeed ZeRO-2 on the CPU, losses of three steps: {said}")
        code, said, _ = run(folder, ".venv/bin/python -m pip check")
        print(f"pip check: {said.strip().splitlines()[-1]} ({code})")
        for step in steps:
            must(folder, *step.undo)
            again = run(folder, *step.verify)[0]
            print(f"undo {step.id}: its check {'fails again' if again else 'STILL PASSES'}")
    print("Cannot run without a GPU:", *NOT_RUN, sep="\n  - ")


if __name__ == "__main__":
    main()
