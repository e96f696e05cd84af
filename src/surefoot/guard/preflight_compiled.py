"""Before step 1: do compiled layers give what the same layers give eagerly?"""

from __future__ import annotations

from dataclasses import replace

import torch

from surefoot.data.messages import Sample
from surefoot.guard.check import shown
from surefoot.guard.diagnose import only_compiled
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.plan import Change
from surefoot.guard.preflight_base import Finding
from surefoot.guard.scene import Rerun, Scene
from surefoot.guard.verify import LOSS_TOLERANCE, NEAR_COSINE, compare
from surefoot.model.compiled import compiled_layers, computes_in_fp8
from surefoot.model.forward import base_of
from surefoot.model.variants import in_float32, without_compile, without_dropout

MOST_TOKENS = 512  # of a row: float32 takes twice the memory of a run's own passes, and recomputes nothing
NOISE = 3.0  # how much farther from float32 than eager's a compiled gradient may be: 1 - cosine is a squared distance
FP8_NOISE = 256.0  # times that: three bits of mantissa against seven
LEAST_COSINE = 0.3  # whatever the noise: a gradient that points elsewhere is a fault


def check_compiled(scene: Scene) -> Finding | None:
    """Compare loss and gradients of compiled layers with the eager ones, on the first step's shortest rows.

    Two rows, of each its end. Written after compiled layers on an H200 (torch 2.11) gave the right loss and gradients
    of zero. Two 16-bit runs of a deep model differ by rounding alone; where they do by more than is usual, float32 is
    the judge of both.

    Args:
        scene: the first step.

    Returns:
        KERNEL, with the compiler switched off for the layers to blame, when they differ by more than rounding explains.
    """
    layers = compiled_layers(scene.model)
    if not layers:
        return None
    shortest = sorted(scene.samples, key=lambda sample: len(sample.input_ids))[:2]
    small = replace(scene, samples=tuple(_end_of(sample) for sample in shortest))
    if small.trained_tokens == 0:
        small = scene
    base = base_of(scene.model)
    modules = {name: base.get_submodule(name) for name in layers}
    with without_dropout(scene.model):
        with without_compile(scene.model):
            eager = small.rerun(keep_grads=True)
        if not eager.finite:
            return None  # the step's own check names that
        compiled = small.rerun(keep_grads=True)
        if _close(compiled, eager):
            return None
        exact = _exactly(small)
        if exact is None:
            evidence = "Compiled layers differ from eager ones, and float32 did not fit to tell which are right."
            return _not_compiled(layers, evidence)
        noise = NOISE * (FP8_NOISE if computes_in_fp8(scene.model) else 1.0)
        if _as_exact(compiled, eager, exact, noise):
            return None
        guilty = []
        for name, module in modules.items():
            with only_compiled(modules, module):
                alone = small.rerun(keep_grads=True)
            if not _close(alone, eager) and not _as_exact(alone, eager, exact, noise):
                guilty.append(name)
    guilty = guilty or layers
    cosine, _, _ = compare(compiled, eager)
    evidence = (
        f"Compiled, the first rows give loss {compiled.loss:.5g} where eager gives {eager.loss:.5g}, and gradients of "
        f"cosine {cosine:.4f} with its. Compiled alone, {shown(guilty)} differ from eager."
    )
    return _not_compiled(guilty, evidence)


def _end_of(sample: Sample) -> Sample:
    """Return a row's last tokens, where its labels are; of packed rows the last one's."""
    length = min(MOST_TOKENS, sample.segments[-1])
    return Sample(sample.row_ids[-1:], sample.input_ids[-length:], sample.labels[-length:], (length,))


def _exactly(scene: Scene) -> Rerun | None:
    try:
        with without_compile(scene.model), in_float32(scene.model, scene.forward):
            return scene.rerun(keep_grads=True)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def _not_compiled(layers: list[str], evidence: str) -> Finding:
    diagnosis = Diagnosis(0, "KERNEL", module=layers[0], op="torch.compile", phase="backward", evidence=(evidence,))
    changes = tuple(Change("compile_off", name) for name in layers)
    return Finding(diagnosis, "these layers are not compiled", True, changes=changes)


def _close(compiled: Rerun, eager: Rerun) -> bool:
    cosine, _, _ = compare(compiled, eager)
    return compiled.finite and _gap(compiled, eager) <= LOSS_TOLERANCE and cosine > NEAR_COSINE


def _as_exact(compiled: Rerun, eager: Rerun, exact: Rerun, noise: float) -> bool:
    """Say whether compiled is about as near to float32 as eager is."""
    (ours, _, _), (theirs, _, _) = compare(compiled, exact), compare(eager, exact)
    loss_fits = _gap(compiled, exact) <= max(LOSS_TOLERANCE, noise * _gap(eager, exact))
    return compiled.finite and loss_fits and ours > LEAST_COSINE and 1 - ours <= noise * (1 - theirs)


def _gap(one: Rerun, other: Rerun) -> float:
    return abs(one.loss - other.loss) / max(abs(other.loss), 1e-6)
