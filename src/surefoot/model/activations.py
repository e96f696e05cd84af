"""What autograd keeps of a decoder layer for the backward pass, in bytes.

Each term stands for a tensor that is saved. They were counted with `torch.autograd.graph.saved_tensors_hooks` on small
models of several families, eager and compiled; the tests count again and allow 10 %. Where not said otherwise, H is the
width of the residual stream, A of the queries, K of the keys (and of the values), F of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.model.shapes import Linear, Shapes

FLOAT32 = 4


@dataclass(frozen=True)
class Numerics:
    """How a model is computed and what of it is trained, as far as activations depend on it.

    Attributes:
        compute: bytes of a number in matrix products.
        stream: bytes of a number in the residual stream.
        weight: bytes of a number in experts, which autocast leaves as they are.
        whole: True when the layers' own weights are trained, False when only adapters are.
        adapted: names of the linears with an adapter.
        rank: of the adapters.
        dropout: whether the adapters' inputs are dropped in part.
        compiled: whether layers are compiled: the compiler keeps less.
        written_out: whether eager attention keeps its scores.
        cpu: True on a CPU, whose kernels keep other things.
    """

    compute: int
    stream: int
    weight: int
    whole: bool
    adapted: frozenset[str] = frozenset()
    rank: int = 0
    dropout: bool = False
    compiled: bool = False
    written_out: bool = False
    cpu: bool = False

    @property
    def casts(self) -> bool:
        """Whether autocast makes 16 bit copies of wider inputs and trained weights."""
        return self.compute != self.stream

    def trains(self, linear: Linear) -> bool:
        """Say whether a linear has weights that are trained, so that its input is kept."""
        return self.whole or linear.name in self.adapted


@dataclass(frozen=True)
class LayerBytes:
    """What a layer keeps.

    Attributes:
        attention: bytes a token without what the MLP alone needs.
        mlp: bytes a token that the MLP alone needs; gone when it is computed again.
        mlp_entry: bytes a token of the MLP's input: what stays instead when it alone is computed again.
        scores: bytes a token for each token of its row, where attention keeps its scores.
        entry: bytes a token of the layer's input: all that stays when the layer is computed again.
        working: bytes a token that come and go in the backward pass of one layer.
        attention_casts: bytes of 16 bit copies of trained weights of the attention.
        mlp_casts: the same of the MLP.
    """

    attention: float
    mlp: float
    mlp_entry: float
    scores: float
    entry: float
    working: float
    attention_casts: float
    mlp_casts: float


def layer_bytes(shapes: Shapes, how: Numerics) -> LayerBytes:
    """Count what a decoder layer keeps.

    Args:
        shapes: sizes of the model.
        how: its numerics.

    Returns:
        The bytes, by part.
    """
    stays, inner = (_compiled if how.compiled else _eager)(shapes, how)
    number = how.weight if shapes.experts else how.compute
    # The gradients of the MLP's product, gate and up are alive together, and float32 copies in the norms' backward.
    working = 3 * number * shapes.feed_forward + (1 if how.compiled else 2) * FLOAT32 * shapes.hidden
    cast = how.compute if how.whole and how.casts else 0
    # An MLP that is computed again starts with the norm's output; the compiler makes one that is wider than products
    # anew from the residual stream.
    parts = {True: 0, False: 0}
    for linear in shapes.linears:
        parts[linear.in_mlp] += linear.inputs * linear.outputs
    return LayerBytes(
        attention=stays,
        mlp=inner,
        mlp_entry=0 if how.compiled and how.casts else how.stream * shapes.hidden,
        scores=_score_bytes(shapes, how),
        entry=how.stream * shapes.hidden,
        working=working,
        attention_casts=cast * parts[False],
        mlp_casts=cast * parts[True],
    )


def end_bytes(shapes: Shapes, how: Numerics) -> float:
    """Count what is kept outside of the layers: the last norm, the hidden states for the loss, their gradient."""
    return (FLOAT32 + (how.stream if how.whole else 0) + how.compute) * shapes.hidden


def _eager(shapes: Shapes, how: Numerics) -> tuple[float, float]:
    # A norm computes in float32: of a 16 bit stream it keeps a wider copy. A trained weight needs its input as well.
    norm = FLOAT32 * (shapes.hidden + 1) + (how.stream * shapes.hidden if how.whole else 0)
    stays = shapes.norms * norm + _inputs(shapes, how, in_mlp=False)
    if shapes.head_norms:
        wide = shapes.queries + shapes.keys
        stays += FLOAT32 * wide * (1 + 1 / (shapes.queries / shapes.heads)) + (how.compute * wide if how.whole else 0)
    repeated = how.written_out or shapes.softcap or how.cpu or how.compute == FLOAT32
    stays += how.compute * (shapes.queries + 2 * (shapes.queries if repeated else shapes.keys))
    if not (how.written_out or shapes.softcap):
        stays += how.compute * shapes.queries + FLOAT32 * shapes.heads  # output and log-sum-exp
    # The output is put back into packed order: a second copy, which the output projection keeps.
    stays += _last_input(shapes, how, in_mlp=False)
    inner = _inputs(shapes, how, in_mlp=True) + _last_input(shapes, how, in_mlp=True)
    if shapes.experts:
        wide = (4 if how.whole else 3) * shapes.feed_forward
        inner += how.weight * (wide + (2 if how.whole else 1) * shapes.experts_per_token * shapes.hidden)
    else:  # gate, its activation and up; or what goes into the activation
        inner += how.compute * (3 if shapes.gated else 1) * shapes.feed_forward
    return stays, inner


def _compiled(shapes: Shapes, how: Numerics) -> tuple[float, float]:
    # Norms, activations and the residual sums are computed again from their inputs.
    stays = how.stream * shapes.hidden + how.compute * shapes.hidden * max(1, shapes.norms // 2)
    stays += how.compute * 2 * (shapes.queries + shapes.keys) + FLOAT32 * (shapes.heads + 2)
    fused = how.adapted and not how.dropout and not how.whole
    if shapes.head_norms or fused:
        # As they were before their norm; or the one output of the fused products, of which the values are a part.
        stays += how.compute * (shapes.queries + shapes.keys)
    stays += _inputs(shapes, how, in_mlp=False) + (_last_input(shapes, how, in_mlp=False) if how.dropout else 0)
    inner = _inputs(shapes, how, in_mlp=True) + _last_input(shapes, how, in_mlp=True)
    if shapes.experts:
        wide = (3 if how.whole or how.weight == FLOAT32 else 2) * shapes.feed_forward
        times = 2 if how.whole or how.weight == FLOAT32 else 1
        inner += how.weight * (wide + times * shapes.experts_per_token * shapes.hidden)
    else:
        inner += how.compute * (2 if shapes.gated else 1) * shapes.feed_forward
    return stays, inner


def _inputs(shapes: Shapes, how: Numerics, *, in_mlp: bool) -> float:
    """Count the inputs of the linears that read the residual stream, and all rank products of the part."""
    part = [x for x in shapes.linears if x.in_mlp is in_mlp and how.trains(x)]
    ranks = 0 if how.whole else how.compute * how.rank * len(part)
    readers = [x for x in part if x.inputs == shapes.hidden and x is not _last(shapes, in_mlp)]
    if how.dropout and not how.whole:
        return ranks + sum(x.inputs for x in readers) * _dropped(how)
    # One tensor for all, unless each casts it for itself; the compiler casts once.
    copies = len(readers) if how.casts and not how.compiled else min(1, len(readers))
    return ranks + copies * how.compute * shapes.hidden


def _last_input(shapes: Shapes, how: Numerics, *, in_mlp: bool) -> float:
    """Count the input of the linear at the end of a part."""
    last = _last(shapes, in_mlp)
    if last is None or not how.trains(last):
        return 0
    return last.inputs * (_dropped(how) if how.dropout and not how.whole else how.compute)


def _last(shapes: Shapes, in_mlp: bool) -> Linear | None:
    return next((x for x in reversed(shapes.linears) if x.in_mlp is in_mlp), None)


def _dropped(how: Numerics) -> int:
    """Bytes of a number that dropout takes: the result, and a mask (of a CPU's eager dropout in float32)."""
    return how.compute + (FLOAT32 if how.cpu and not how.compiled else 1)


def _score_bytes(shapes: Shapes, how: Numerics) -> float:
    if how.compiled or not (how.written_out or shapes.softcap):
        return 0
    wide = FLOAT32 + (how.compute if shapes.softcap else 0) + (how.compute if how.compute < FLOAT32 else 0)
    return shapes.heads * wide
