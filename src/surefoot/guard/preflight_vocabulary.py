"""Before step 1: rows of the vocabulary that nobody trained, and embeddings that should be tied and are not."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.data.messages import Sample
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.names import clean
from surefoot.guard.preflight_base import Finding, evaluating, few_tokens, mean_loss, ranges
from surefoot.guard.scene import Scene
from surefoot.model.forward import base_of, trained_head

# Tokens that the loss before step 1 is taken over.
LOSS_TOKENS = 2048
# A model that knows nothing has a loss of ln V. So many nats beyond is far above; rows are to blame when the loss
# without them is no more than this above (random weights whose logits spread by s lie s²/2 above).
FAR_ABOVE = 2.0
ABOUT = 0.75
# A row is unusual when its log norm lies this many robust deviations above the median, and it is so much longer.
DEVIATIONS = 8.0
TIMES_LONGER = 3.0
# Unusual rows fall into groups where one is this many times longer than the next; the longest groups are tried first.
GROUP_GAP = 1.5
MOST_GROUPS = 6
MOST_ROWS = 0.4
# Spread of log norms below which rows count as equal (random rows of 256 values spread by 0.04).
LEAST_SPREAD = 0.04
_CHUNK_VALUES = 2**23


@dataclass(frozen=True)
class _Matrix:
    name: str
    parameter: torch.nn.Parameter
    excess_V: torch.Tensor  # log norm of each row over the median's, on the CPU
    limit: float  # rows with more excess are unusual
    median: float  # norm


def input_matrix(model: Any) -> torch.Tensor:
    """Return the input embeddings' weight, [vocabulary, width], looking through PEFT's wrappers."""
    return _inner(base_of(model).get_input_embeddings()).weight.data


def head_matrix(model: Any) -> torch.Tensor:
    """Return the weight that makes the logits, [vocabulary, width]; the embeddings' when the model has no head."""
    if base_of(model).get_output_embeddings() is None:
        return input_matrix(model)
    return _inner(trained_head(base_of(model))).weight.data


def check_first_loss(scene: Scene, tell: Callable[[str], None]) -> Finding | None:
    """Compare the loss before any training with that of a model that knows nothing.

    Args:
        scene: the first step.
        tell: called with a sentence when the loss is far above and no row explains it.

    Returns:
        WEIGHTS when the loss is far above ln V and comes down to it once unusually long rows of the embeddings and the
        head are the mean of the others; else None.
    """
    samples = few_tokens(scene.samples, LOSS_TOKENS)
    chance = math.log(head_matrix(scene.model).shape[0])
    with evaluating(scene.model):
        loss = mean_loss(scene, samples)
        if loss <= chance + FAR_ABOVE:
            return None
        matrices = _matrices(scene.model)
        tried = {cut: _loss_without(scene, samples, matrices, cut) for cut in _cuts(matrices)}
    best = min((value for value in tried.values() if math.isfinite(value)), default=math.inf)
    if best > chance + ABOUT:
        if math.isfinite(loss):
            tell(
                f"The loss before step 1 is {loss:.3g}, far above the {chance:.3g} of a model that knows nothing. Are "
                "these the right weights, tokenizer and template?"
            )
        return None
    # The fewest rows that explain it: long rows that do no harm stay as they are.
    cut = max(cut for cut, value in tried.items() if value <= best + 0.02)
    return _finding(scene, matrices, cut, loss, tried[cut], chance)


def check_tied(scene: Scene) -> Finding | None:
    """Compare what the configuration says of tied embeddings with the memory that they lie in.

    Args:
        scene: the first step.

    Returns:
        WEIGHTS when they differ; None when they agree, or when it cannot be told.
    """
    base = base_of(scene.model)
    source, head = base.get_input_embeddings(), base.get_output_embeddings()
    if head is None or _is_copied(source) or _is_copied(head):  # PEFT trains copies of its own, apart on purpose
        return None
    source, head = _inner(source), _inner(head)
    said = {getattr(config, "tie_word_embeddings", None) for config in (base.config, base.config.get_text_config())}
    if len(said) != 1 or not hasattr(source, "weight") or not hasattr(head, "weight"):
        return None
    (tied,) = said
    shared = source.weight.data_ptr() == head.weight.data_ptr()
    if tied is None or bool(tied) == shared:
        return None
    return _untied(base, source, head) if tied else _shared(base, source, head)


def _untied(base: Any, source: Any, head: Any) -> Finding:
    names = [_name_of(base, source), _name_of(base, head)]
    equal = source.weight.shape == head.weight.shape and torch.equal(source.weight, head.weight)
    trained = source.weight.requires_grad or head.weight.requires_grad
    evidence = [
        "The configuration says tie_word_embeddings: true.",
        f"{names[0]}.weight and {names[1]}.weight lie in different memory"
        + (" and hold the same values." if equal else " and hold different values."),
    ]

    def tie() -> None:
        base.tie_weights()
        if source.weight.data_ptr() != head.weight.data_ptr():
            head.weight = source.weight

    if equal:
        action = "tie them again, so that both are trained as one and none is lost when the model is saved"
    else:
        action = "set tie_word_embeddings: false in config.json if these weights belong together, else load others"
    diagnosis = Diagnosis(
        0, "WEIGHTS", place="embedding", module=names[1], evidence=tuple(evidence),
        details={"tied": True, "shared": False, "equal": equal},
    )  # fmt: skip
    return Finding(diagnosis, action, trained and equal, cure=tie if equal else None)


def _shared(base: Any, source: Any, head: Any) -> Finding:
    names = [_name_of(base, source), _name_of(base, head)]
    same, trained = source.weight is head.weight, head.weight.requires_grad

    def part() -> None:
        copied = head.weight.data.clone()
        if same:
            head.weight = torch.nn.Parameter(copied, requires_grad=False)
        else:
            head.weight.data = copied

    curable = not (same and trained)  # the optimizer would not know a new trained parameter
    evidence = (
        "The configuration says tie_word_embeddings: false.",
        f"{names[0]}.weight and {names[1]}.weight lie in the same memory: an update of one changes the other.",
    )
    action = "give the head weights of its own" if curable else "set tie_word_embeddings: true, or load the head apart"
    diagnosis = Diagnosis(
        0, "WEIGHTS", place="embedding", module=names[1], evidence=evidence, details={"tied": False, "shared": True}
    )
    return Finding(diagnosis, action, trained, cure=part if curable else None)


def _finding(scene: Scene, matrices: list[_Matrix], cut: float, loss: float, cured: float, chance: float) -> Finding:
    per_matrix = {m.name: (m.excess_V >= max(cut, m.limit)).nonzero()[:, 0].tolist() for m in matrices}
    per_matrix = {name: rows for name, rows in per_matrix.items() if rows}
    rows = sorted({row for found in per_matrix.values() for row in found})
    evidence = [
        f"The loss before step 1 is {loss:.4g}; that of a model that knows nothing is ln {round(math.exp(chance))} = "
        f"{chance:.3g}."
    ]
    for matrix in matrices:
        if matrix.name in per_matrix:
            longest = matrix.median * math.exp(float(matrix.excess_V.max()))
            evidence.append(
                f"Rows {ranges(per_matrix[matrix.name])} of {matrix.name} have norms up to {longest:.3g}; the median "
                f"is {matrix.median:.3g}."
            )
    evidence.append(f"With these rows set to the mean of the others, the loss is {cured:.4g}.")
    weights = {matrix.name: matrix for matrix in matrices}
    frozen = not any(weights[name].parameter.requires_grad for name in per_matrix)
    action = f"set rows {ranges(rows)} to the mean of the others"
    if frozen:
        action += (
            "; the embeddings are frozen, so these rows must be saved with the adapter, or mended in the base model"
        )
    diagnosis = Diagnosis(
        0, "WEIGHTS", place="embedding", module=next(iter(per_matrix)).rpartition(".")[0], evidence=tuple(evidence),
        details={"rows": rows, "tensors": per_matrix, "loss": loss if math.isfinite(loss) else None, "without": cured,
                 "chance": chance, "frozen": frozen},
    )  # fmt: skip

    def cure() -> None:
        for name, found in per_matrix.items():
            weight = weights[name].parameter.data
            _overwrite(weight, torch.tensor(found, device=weight.device))

    return Finding(diagnosis, action, True, cure=cure)


@torch.no_grad()
def _matrices(model: Any) -> list[_Matrix]:
    base = base_of(model)
    modules = [_inner(base.get_input_embeddings())]
    if base.get_output_embeddings() is not None:
        modules.append(_inner(trained_head(base)))
    matrices: dict[int, _Matrix] = {}
    for module in modules:
        parameter = module.weight
        if not parameter.is_floating_point() or parameter.ndim != 2 or parameter.data_ptr() in matrices:
            continue
        logs_V = torch.cat([_norms(chunk) for chunk in _chunks(parameter.data)]).log().cpu()
        real = logs_V[logs_V.isfinite()]  # a row of zeros is padding
        if not real.numel():
            continue
        median = float(real.median())
        spread = max(1.4826 * float((real - median).abs().median()), LEAST_SPREAD)
        limit = max(DEVIATIONS * spread, math.log(TIMES_LONGER))
        name = f"{_name_of(base, module)}.weight"
        matrices[parameter.data_ptr()] = _Matrix(name, parameter, logs_V - median, limit, math.exp(median))
    return list(matrices.values())


def _cuts(matrices: list[_Matrix]) -> list[float]:
    """Return excesses at which the unusual rows of all matrices may be parted from the others, fewest rows first."""
    unusual = [m.excess_V[m.excess_V >= m.limit] for m in matrices]
    if not unusual:
        return []
    excess = torch.cat(unusual).sort(descending=True).values.tolist()
    if not excess or len(excess) > MOST_ROWS * sum(len(m.excess_V) for m in matrices):
        return []
    starts = [i for i in range(1, len(excess)) if excess[i - 1] - excess[i] > math.log(GROUP_GAP)]
    widest = sorted(starts, key=lambda i: excess[i] - excess[i - 1])[: MOST_GROUPS - 1]
    return [(excess[i - 1] + excess[i]) / 2 for i in sorted(widest)] + [excess[-1]]


def _loss_without(scene: Scene, samples: Sequence[Sample], matrices: list[_Matrix], cut: float) -> float:
    with contextlib.ExitStack() as stack:
        for matrix in matrices:
            rows = (matrix.excess_V >= max(cut, matrix.limit)).nonzero()[:, 0]
            if len(rows):
                stack.enter_context(_replaced(matrix.parameter.data, rows.to(matrix.parameter.device)))
        return mean_loss(scene, samples)


@contextlib.contextmanager
def _replaced(weight_VM: torch.Tensor, rows: torch.Tensor) -> Generator[None, None, None]:
    before = weight_VM.index_select(0, rows)
    _overwrite(weight_VM, rows)
    try:
        yield
    finally:
        weight_VM.index_copy_(0, rows, before)


@torch.no_grad()
def _overwrite(weight_VM: torch.Tensor, rows: torch.Tensor) -> None:
    """Set rows to the mean of the others."""
    keep_V = torch.ones(len(weight_VM), dtype=torch.bool, device=weight_VM.device).index_fill_(0, rows, False)
    total_M = torch.zeros(weight_VM.shape[1], dtype=torch.float32, device=weight_VM.device)
    for chunk_CM, keep_C in zip(_chunks(weight_VM), keep_V.split(_chunk_rows(weight_VM)), strict=True):
        total_M += torch.where(keep_C[:, None], chunk_CM, 0.0).sum(0, dtype=torch.float32)
    weight_VM[rows] = (total_M / keep_V.sum()).to(weight_VM.dtype)


def _norms(chunk_CM: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(chunk_CM, dim=1, dtype=torch.float32)


def _chunks(weight_VM: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return weight_VM.split(_chunk_rows(weight_VM))


def _chunk_rows(weight_VM: torch.Tensor) -> int:
    return max(1, _CHUNK_VALUES // weight_VM.shape[1])


def _is_copied(module: Any) -> bool:
    return bool(getattr(module, "modules_to_save", None))


def _inner(module: Any) -> Any:
    """Return the module whose weight is used, inside PEFT's wrappers: the trained copy, or the adapted layer."""
    copies = getattr(module, "modules_to_save", None)
    if copies:
        active = module.active_adapter
        module = copies[active if isinstance(active, str) else active[0]]
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _name_of(base: Any, module: Any) -> str:
    return clean(next(name for name, known in base.named_modules() if known is module))
