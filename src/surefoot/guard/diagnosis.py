"""What the guard says of a fault: its class, its place, and the evidence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FaultClass = Literal[
    "DATA", "WEIGHTS", "TRANSIENT", "KERNEL", "SCALE", "RANGE", "MATH", "OPTIMIZER", "STAGNATION", "SPIKE", "TREND"
]
Phase = Literal["forward", "backward", "optimizer"]
Place = Literal[
    "attention scores", "attention mask", "attention", "MLP product", "router", "norm", "residual stream",
    "embedding", "logits", "loss", "optimizer", "normaliser",
]  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """Where the first bad value of a step was born.

    Attributes:
        module: the module, by its dotted Hugging Face name without PEFT's wrappers, as "model.layers.2.self_attn";
            None outside of every module (the loss).
        op: the aten operation without its overload, as "bmm"; the autograd node's name where it is a custom kernel,
            as "BugBackward"; None for a leaf.
        phase: "forward" or "backward".
        kind: "inf", "nan", or "leaf": a tensor that no operation made.
        node: the autograd node that ran, in the backward pass; None in the forward.
        place: what the operation does in the model; None when it cannot be told.
        inputs: one sentence piece a floating input: dtype, shape, smallest and largest value.
        output: the same of the output.
        pass_index: of the pass it happened in, from 0.
        leaf: name of the weight or buffer, for a leaf.
        rows: row ids whose tokens hold the bad values; all rows of the pass when it cannot be told.
        mask_row: True when it is a softmax over a row that a mask had emptied.
        given: True for a NaN that no arithmetic on computed numbers has made: the operation only moves values, cannot
            make one of such inputs, was handed one as a number in the code, or met an infinity that was written.
    """

    module: str | None
    op: str | None
    phase: Phase
    kind: Literal["inf", "nan", "leaf"]
    node: str | None = None
    place: Place | None = None
    inputs: tuple[str, ...] = ()
    output: str = ""
    pass_index: int = 0
    leaf: str | None = None
    rows: tuple[str, ...] = ()
    mask_row: bool = False
    given: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """A named fault.

    Attributes:
        step: the step, counted from 1; 0 before the first.
        fault: its class.
        place: what the faulty operation does in the model; None when it cannot be told.
        module: dotted Hugging Face name; None outside of every module.
        op: aten name, or a custom autograd node's.
        phase: "forward", "backward" or "optimizer"; None when none ran.
        samples: row ids of the data concerned.
        evidence: sentences that a person can check, in the order of the experiments.
        details: numbers for programs, JSON only.
    """

    step: int
    fault: FaultClass
    place: Place | None = None
    module: str | None = None
    op: str | None = None
    phase: Phase | None = None
    samples: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
