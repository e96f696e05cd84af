"""Keys of our own, on top of LLaMA-Factory's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from surefoot.config.key import ALWAYS, TRAIN, Keys, works
from surefoot.config.values import ComputeDtype, GuardMode


class SurefootKeys(Keys):
    """What LLaMA-Factory has no key for."""

    compute_dtype: ComputeDtype = works(
        "auto", "Precision of the computation; wins over `bf16` and `fp16`. Trained weights are fp32.", purposes=ALWAYS
    )
    guard: GuardMode = works(
        "heal",
        "What to do about a step that is not finite or breaks away: `heal` names the cause by experiment and applies "
        "the smallest cure that agrees with float32; `watch` names it and stops; `off` stops before the update.",
        purposes=TRAIN,
    )
    guard_preflight: bool = works(
        True, "Look for known faults of data, weights and precision before step 1; takes seconds.", purposes=TRAIN
    )
    precision_plan: str | None = works(
        None,
        "Start with the changes of an earlier run's `surefoot/precision_plan.json`, as the guard wrote it.",
        purposes=TRAIN,
    )
    emulate: Literal["none", "gfx90a"] = works(
        "none",
        "Compute as another card does: `gfx90a` flushes subnormal numbers in float16 and bfloat16 matrix products.",
        purposes=TRAIN,
    )
    compile: bool | None = works(
        None,
        "Compile each decoder layer: faster steps after a slower first one. Unset: on a GPU yes, on a CPU no.",
        purposes=TRAIN,
    )
    memory: Annotated[int, Field(ge=1)] | Literal["auto"] = works(
        "auto", "Tokens that one forward and backward pass may hold; `auto` plans it from the device.", purposes=TRAIN
    )
    packing_mode: Literal["isolated", "joined"] = works(
        "isolated", "Whether samples in one pack see each other.", purposes=TRAIN
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = works(
        "auto", "Where to compute: auto, cpu, cuda (AMD or NVIDIA) or cuda:N.", purposes=ALWAYS
    )
    workarounds: bool = works(
        True,
        "Work around known defects of this machine before torch starts; each is said and recorded.",
        purposes=TRAIN,
    )
    strict_data: bool = works(
        False, "Make it an error when more than a tenth of the rows is dropped or cut.", purposes=TRAIN
    )
    resume_anyway: bool = works(
        False, "Resume although the data or settings are not those of the checkpoint.", purposes=TRAIN
    )
