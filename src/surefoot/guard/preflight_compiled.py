"""Before step 1: do compiled layers give what the same layers give eagerly?"""

from __future__ import annotations

from dataclasses import replace

from surefoot.guard.check import shown
from surefoot.guard.diagnose import only_compiled
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.plan import Change
from surefoot.guard.preflight_base import Finding
from surefoot.guard.scene import Rerun, Scene
from surefoot.guard.verify import LOSS_TOLERANCE, NEAR_COSINE, compare
from surefoot.model.compiled import compiled_layers
from surefoot.model.forward import base_of
from surefoot.model.variants import without_compile, without_dropout


def check_compiled(scene: Scene) -> Finding | None:
    """Compare loss and gradients of compiled layers with the eager ones, on the first step's shortest two rows.

    Written after compiled layers on an H200 (torch 2.11) gave the right loss and gradients of zero.

    Args:
        scene: the first step.

    Returns:
        KERNEL, with the compiler switched off for the layers to blame, when they differ by more than rounding explains.
    """
    layers = compiled_layers(scene.model)
    if not layers:
        return None
    shortest = sorted(scene.samples, key=lambda sample: len(sample.input_ids))[:2]
    small = replace(scene, samples=tuple(shortest))
    if small.trained_tokens == 0:
        small = scene
    base = base_of(scene.model)
    modules = {name: base.get_submodule(name) for name in layers}
    with without_dropout(scene.model):
        with without_compile(scene.model):
            eager = small.rerun(keep_grads=True)
        if not eager.finite:
            return None  # the step's own check names that
        differs = _difference(small.rerun(keep_grads=True), eager)
        if not differs:
            return None
        guilty = []
        for name, module in modules.items():
            with only_compiled(modules, module):
                if _difference(small.rerun(keep_grads=True), eager):
                    guilty.append(name)
    guilty = guilty or layers
    evidence = f"Compiled, the first rows give {differs}. Compiled alone, {shown(guilty)} differ from eager."
    diagnosis = Diagnosis(0, "KERNEL", module=guilty[0], op="torch.compile", phase="backward", evidence=(evidence,))
    changes = tuple(Change("compile_off", name) for name in guilty)
    return Finding(diagnosis, "these layers are not compiled", True, changes=changes)


def _difference(compiled: Rerun, eager: Rerun) -> str:
    """Return how compiled differs from eager, or nothing."""
    cosine, _, _ = compare(compiled, eager)
    gap = abs(compiled.loss - eager.loss) / max(abs(eager.loss), 1e-6)
    if compiled.finite and gap <= LOSS_TOLERANCE and cosine > NEAR_COSINE:
        return ""
    return f"loss {compiled.loss:.5g} where eager gives {eager.loss:.5g}, and gradients of cosine {cosine:.4f} with its"
