"""A look at every operation of a step, forward and backward: which one made the first bad value?

Each result's range is read. A bad result of clean inputs begins a fault; a bad result of bad inputs inherits theirs,
so what a loss or a gradient suffers from is known by descent, not by its place in time: an infinity that a mask put
there, or one that died without harm, is not blamed for another's NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from surefoot.data.batch import PackedBatch
from surefoot.guard.diagnosis import Phase, Place
from surefoot.guard.places import PRODUCTS, SOFTMAXES, Places
from surefoot.guard.trace_facts import OpFacts, largest_scalar, op_facts, scalars_in, tensors_in, tensors_written
from surefoot.guard.trace_leaves import HeadWeights, Leaves
from surefoot.guard.trace_modules import ModuleTrail, custom_name, meeting_module, nodes_behind, stamp_of
from surefoot.guard.trace_values import (
    Allocated,
    Fault,
    Ledger,
    Mark,
    Masked,
    bad_rows,
    extremes,
    is_bad,
    measurable,
    only_empty_rows,
    say,
)

# Faults whose tensors are described at length; more than this many beginnings in one step tell nothing new.
_DESCRIBED = 100
Range = tuple[torch.Tensor, float, float]


class OpWatch(TorchDispatchMode):
    """The dispatch mode of a trace; also the `Watcher` of its scene.

    Attributes:
        faults: all that began, in order of time.
        over: largest value seen by (module, op, place, phase), in order of time, where it is over `watch_range`.
        narrow: (module, op) of every result in 16 bits.
        wide: the same in more bits.
    """

    faults: list[Fault]
    over: dict[tuple[str | None, str, Place | None, Phase], float]
    narrow: set[tuple[str | None, str]]
    wide: set[tuple[str | None, str]]

    def __init__(self, model: Any, places: Places, trail: ModuleTrail, watch_range: float | None) -> None:
        """Prepare for one step.

        Args:
            model: the model.
            places: of the model.
            trail: of the model.
            watch_range: values beyond it are kept as peaks; None for none.
        """
        super().__init__()
        self.faults, self.over, self.narrow, self.wide = [], {}, set(), set()
        self._places, self._trail, self._watch = places, trail, watch_range
        self._leaves = Leaves(model)
        self._heads = HeadWeights(model)
        self._ledger = Ledger()
        self._batch: PackedBatch | None = None
        self._pass = 0
        self._chunk: int | None = None
        self._begun: dict[tuple[Any, ...], Fault] = {}
        self._described = 0
        self._busy = self._backward = False
        self._last_node: Any = None

    # The scene tells of each pass.

    def pass_started(self, index: int, batch: PackedBatch) -> None:
        """The forward of a pass is about to run."""
        self._pass, self._batch, self._chunk, self._backward = index, batch, None, False

    def backward_started(self, index: int, loss: torch.Tensor) -> None:
        """The backward of a pass is about to run: see whether its loss is bad, and hook the graph."""
        self._backward = True
        fault = self._fault_in(loss)
        if fault is not None:
            fault.in_loss = True
        for node in nodes_behind(loss):
            node.register_hook(lambda made, given, node=node: self._node_done(node, made, given))

    def gradient_arrived(self, parameter: torch.Tensor) -> None:
        """A trained tensor has its gradient of this pass."""
        fault = self._fault_in(parameter.grad)
        if fault is not None:
            fault.in_gradients = True

    def look_at(self, tree: Any) -> None:
        """Catch kernels that no dispatch mode sees, where their results enter or leave a module."""
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and (name := custom_name(tensor.grad_fn)) and measurable(tensor):
                module, phase, _ = self._trail.where()
                self._opaque(tensor, name, module, phase, None, [])

    # Every operation passes here.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and judge what it made."""
        kwargs = kwargs or {}
        facts = op_facts(func)
        after = self._backward and torch._C._current_graph_task_id() == -1  # of the caller, when all is over
        if self._busy or self._batch is None or after or facts.view:
            return func(*args, **kwargs)
        written = [t for t in tensors_written(facts, args, kwargs) if measurable(t)]
        before: list[Range] = [(t, *extremes(t)) for t in written] if facts.reads_written else []
        texts = [say(*item) for item in before if not is_bad(*item[1:])]
        result = func(*args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        if facts.plain in ("_to_copy", "clone"):
            self._heads.follow(args[0], result)
        made = [t for t in tensors_in(results) if measurable(t)]
        made += [t for t in written if not any(t is other for other in made)]
        call = _Call(self, facts, args, kwargs, written, before, texts)
        for tensor in made:
            if facts.allocates:
                self._ledger.set_mark(tensor, call.allocation())
            else:
                call.judge(tensor)
        return result

    # Shared with the calls.

    def begin(self, key: tuple[Any, ...], tensor: torch.Tensor | None, fields: dict[str, Any]) -> Fault:
        """Begin a fault, or return the one that a recompute repeats."""
        known = self._begun.get((self._pass, *key))
        rows: tuple[str, ...] = self._batch.row_ids if self._batch else ()
        if tensor is not None and self._batch is not None and self._described < _DESCRIBED:
            self._described += 1
            in_logits = fields.get("place") in ("logits", "loss")
            rows = bad_rows(tensor, self._batch, self._chunk if in_logits else None)
        if known is not None:  # the same again in a recompute, or for another bucket of rows
            both = {*known.fields["rows"], *rows}
            known.fields["rows"] = tuple(row for row in (self._batch.row_ids if self._batch else ()) if row in both)
            return known
        fault = Fault(len(self.faults), {"pass_index": self._pass, "rows": rows} | fields)
        self.faults.append(fault)
        self._begun[(self._pass, *key)] = fault
        return fault

    def describe(self, tensor: torch.Tensor, low: float, high: float) -> str:
        """Describe a tensor, while there are few faults."""
        return say(tensor, low, high) if len(self.faults) < _DESCRIBED else f"{tensor.dtype} {list(tensor.shape)}"

    def _fault_in(self, tensor: torch.Tensor | None) -> Fault | None:
        if tensor is None or not measurable(tensor):
            return None
        was, self._busy = self._busy, True
        try:
            mark = self._ledger.mark(tensor)
            return mark if isinstance(mark, Fault) and is_bad(*extremes(tensor)) else None
        finally:
            self._busy = was

    def _node_done(self, node: Any, made: Sequence[Any], given: Sequence[Any]) -> None:
        """An autograd node has run: its results are its module's, and a kernel that nobody saw is judged."""
        name, module = custom_name(node), stamp_of(node)
        tensors = [tensor for tensor in made if measurable(tensor)]
        taken = {tensor.untyped_storage()._cdata for tensor in given if measurable(tensor)}
        for tensor in tensors:
            if name is not None or not self._ledger.knows(tensor):
                self._opaque(tensor, name or node.name(), module, "backward", node.name(), list(given))
            # A node that only hands a gradient on has not made it, unless paths of the forward meet in it.
            if len(tensors) > 1 or tensor.untyped_storage()._cdata not in taken:
                self._ledger.set_maker(tensor, module)
        self._last_node = node

    def _opaque(
        self, tensor: torch.Tensor, op: str, module: str | None, phase: Phase, node: str | None, given: list[Any]
    ) -> None:
        was, self._busy = self._busy, True
        try:
            low, high = extremes(tensor)
            if not is_bad(low, high) or isinstance(self._ledger.mark(tensor), (Fault, Masked)):
                return
            inputs = [(t, *extremes(t)) for t in given if measurable(t)]
            marks = [self._ledger.mark(t) for t, *ends in inputs if is_bad(*ends)]
            faults = [mark for mark in marks if isinstance(mark, Fault)]
            if faults:
                self._ledger.set_mark(tensor, min(faults, key=lambda fault: fault.order))
                return
            place = self._places.place(module, op, phase, tensor.shape)
            fields = {
                "module": module, "op": op, "node": node, "phase": phase, "place": place,
                "kind": "nan" if math.isnan(low) else "inf", "inputs": tuple(self.describe(*item) for item in inputs),
                "output": self.describe(tensor, low, high),
            }  # fmt: skip
            self._ledger.set_mark(tensor, self.begin((module, op, phase), tensor, fields))
        finally:
            self._busy = was


class _Call:
    """One call of an operation: who made it, with what, and what came out."""

    def __init__(
        self,
        watch: OpWatch,
        facts: OpFacts,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        written: list[torch.Tensor],
        before: list[Range],
        texts: list[str],
    ) -> None:
        self.watch, self.facts, self.args, self.kwargs = watch, facts, args, kwargs
        self.written, self.before, self.texts = written, before, texts
        self.module, self.phase, self.node = watch._trail.where()
        plain = facts.plain
        self.scored = watch._trail.note_op(plain, plain in PRODUCTS, plain in SOFTMAXES)
        self.op = facts.name
        if self.phase == "forward" and self.module is None and plain in PRODUCTS:
            self._look_for_head()
        elif self.phase == "backward" and plain == "add" and (self.node is None or self.node is watch._last_node):
            # The node has run already: the engine adds gradients up where paths of the forward had parted.
            self.node = None
            makers = [watch._ledger.maker(tensor) for tensor in tensors_in(args)]
            self.op, self.module = "add", meeting_module(watch._places, [*makers, stamp_of(watch._last_node)])

    def judge(self, tensor: torch.Tensor) -> None:
        """Mark one result: clean, masked on purpose, or bad with the fault that it descends from."""
        ledger = self.watch._ledger
        low, high = extremes(tensor)
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        (self.watch.narrow if half else self.watch.wide).add((self.module, custom_name(self.node) or self.op))
        if self.phase == "backward":
            ledger.set_maker(tensor, self.module)
        if not is_bad(low, high):
            ledger.set_mark(tensor, None)
            if self.watch._watch is not None and max(-low, high) > self.watch._watch:
                self._note_over(tensor, low, high)
            return
        mark = self._descent(tensor, low, high)
        ledger.set_mark(tensor, mark)
        if isinstance(mark, Fault):
            if self.phase == "backward" and mark.victim is None:
                mark.victim = self.node.name() if self.node is not None else None
            if self.watch._watch is not None and not math.isnan(low):
                self._keep_peak(tensor, math.inf)

    def allocation(self) -> Allocated:
        """Remember who reserved memory."""
        node = self.node.name() if self.node is not None else None
        return Allocated(self.module, node, custom_name(self.node), self.phase, self._place(()))

    def _descent(self, tensor: torch.Tensor, low: float, high: float) -> Mark:
        """Find what a bad result descends from, or begin a fault."""
        inputs = self._inputs()
        bad = [item for item in inputs if is_bad(*item[1:]) and not self._is_literal(item[0])]
        marks = [self._mark_of(item, tensor) for item in bad]
        faults = [mark for mark in marks if isinstance(mark, Fault)]
        if faults:
            return min(faults, key=lambda fault: fault.order)
        reserved = [mark for mark in marks if isinstance(mark, Allocated)]
        if reserved:
            partly = any(item[0] is written for item in bad for written in self.written)
            if partly:
                return reserved[0]
            reader = next(
                custom_name(t.grad_fn) for (t, *_), mark in zip(bad, marks, strict=True) if mark is reserved[0]
            )
            return self._uninitialised(reserved[0], reader, inputs, tensor, low, high)
        has_nan = math.isnan(low)
        masks = [item for item, mark in zip(bad, marks, strict=True) if isinstance(mark, Masked)]
        if masks and not has_nan:
            grown = high == math.inf and not any(item[2] == math.inf for item in masks)
            if not (grown and self.facts.plain in PRODUCTS | {"add"}):
                return Masked(low)
        if not bad and not has_nan and (self.facts.fills or largest_scalar(self.args, self.kwargs) == math.inf):
            return Masked(low)
        return self._begin(tensor, low, high, inputs, masks)

    def _begin(self, tensor: torch.Tensor, low: float, high: float, inputs: list[Range], masks: list[Range]) -> Fault:
        custom = custom_name(self.node)
        op = custom or self.op
        mask_row = bool(masks) and self.facts.plain in SOFTMAXES and only_empty_rows(self.args, tensor)
        fields = {
            "module": self.module, "op": op, "phase": self.phase, "kind": "nan" if math.isnan(low) else "inf",
            "node": self.node.name() if self.node is not None else None,
            "place": "attention mask" if mask_row else self._place(tensor.shape), "mask_row": mask_row,
            "inputs": self._texts(inputs), "output": self.watch.describe(tensor, low, high),
            "given": math.isnan(low) and custom is None and self._given(inputs, masks, tensor.shape),
        }  # fmt: skip
        return self.watch.begin((self.module, op, self.phase), tensor, fields)

    def _given(self, inputs: list[Range], masks: list[Range], shape: Sequence[int]) -> bool:
        """Tell whether a NaN was handed in, or comes of infinities that were, where no mask has any business."""
        numbers = scalars_in(self.args, self.kwargs)
        literals = [low for tensor, low, _ in inputs if self._is_literal(tensor)]
        if self.facts.moves or any(math.isnan(number) for number in (*numbers, *literals)):
            return True
        if masks:
            return self.module is not None and self._place(shape) not in ("attention scores", "router")
        finite = all(map(math.isfinite, numbers)) and not any(is_bad(*item[1:]) for item in inputs)
        return finite and self.facts.without_nan

    def _is_literal(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a number written in the code: who writes it is to blame, not a weight."""
        return tensor.ndim == 0 and self.watch._ledger.mark(tensor) is None and self.watch._leaves.find(tensor) is None

    def _mark_of(self, item: Range, result: torch.Tensor) -> Mark:
        """Return the mark on a bad input; what nothing seen has made is a leaf, or a mask."""
        tensor, low, high = item
        mark = self.watch._ledger.mark(tensor)
        if mark is not None:
            return mark
        leaf = self.watch._leaves.find(tensor)
        custom = custom_name(tensor.grad_fn)
        if (leaf is None or leaf.buffer) and custom is None and low == -math.inf and high != math.inf:
            return Masked(low)
        if leaf is None and custom is not None and self.phase == "forward":
            fields = {"op": custom, "kind": "nan" if math.isnan(low) else "inf", "module": self.module}
        else:
            fields = {"op": None, "kind": "leaf", "leaf": leaf.name if leaf else None}
            fields["module"] = (leaf.owner or None) if leaf else self.module
        fields |= {
            "phase": self.phase, "output": self.watch.describe(tensor, low, high),
            "place": self.watch._places.place(fields["module"], "", self.phase, ()),
        }  # fmt: skip
        key = (fields["module"], fields["op"], fields.get("leaf"))
        fault = self.watch.begin(key, result, fields)
        self.watch._ledger.set_mark(tensor, fault)
        return fault

    def _uninitialised(
        self, mark: Allocated, maker: str | None, inputs: list[Range], tensor: torch.Tensor, low: float, high: float
    ) -> Fault:
        """Blame the one who reserved memory and did not fill it, or whose kernel filled it badly."""
        op = mark.custom or maker or "empty"
        fields = {
            "module": mark.module, "op": op, "phase": mark.phase, "node": mark.node, "place": mark.place,
            "kind": "nan" if math.isnan(low) else "inf", "inputs": self._texts(inputs),
            "output": self.watch.describe(tensor, low, high),
        }  # fmt: skip
        return self.watch.begin((mark.module, op, mark.phase), tensor, fields)

    def _inputs(self) -> list[Range]:
        """Ranges of all floating inputs, as they were before the call."""
        kept = list(self.before)
        for tensor in tensors_in((*self.args, *self.kwargs.values())):
            if measurable(tensor) and not any(tensor is written for written in self.written):
                kept.append((tensor, *extremes(tensor)))
        return kept

    def _texts(self, inputs: list[Range]) -> tuple[str, ...]:
        others = [item for item in inputs if not any(item[0] is written for written in self.written)]
        return (*self.texts, *(self.watch.describe(*item) for item in others))

    def _place(self, shape: Sequence[int]) -> Place | None:
        return self.watch._places.place(self.module, self.op, self.phase, shape, self.scored)

    def _look_for_head(self) -> None:
        """The chunked loss multiplies by the head's weight outside of the head."""
        watch, tensors = self.watch, tensors_in((*self.args, *self.kwargs.values()))
        if watch._places.head is None or not any(watch._heads.holds(tensor) for tensor in tensors):
            return
        self.module = watch._places.head
        rows = next((t for t in tensors if t.ndim == 2 and not watch._heads.holds(t)), None)
        if rows is not None and rows.stride(0):
            watch._chunk = rows.storage_offset() // rows.stride(0)

    def _note_over(self, tensor: torch.Tensor, low: float, high: float) -> None:
        """Keep a value beyond the range that is watched, unless a mask put it there."""
        ledger, watch = self.watch._ledger, self.watch._watch or 0.0
        marks = [ledger.mark(t) for t in tensors_in((*self.args, *self.kwargs.values())) if measurable(t)]
        fills = [mark.fill for mark in marks if isinstance(mark, Masked) and mark.fill < -watch]
        scalar = largest_scalar(self.args, self.kwargs)
        if scalar > watch and -scalar <= low < -watch:
            fills.append(-scalar)
        elif self.facts.fills and low < -watch and low == torch.finfo(tensor.dtype).min:
            fills.append(low)
        if fills and low < -watch:
            # Half, since scores are added to a fill and rounding moves it.
            fill = max(max(fills), torch.finfo(tensor.dtype).min)
            values = tensor.detach()
            rest = extremes(values.masked_fill(values <= fill / 2, 0.0))
            ledger.set_mark(tensor, Masked(low))
            if max(-rest[0], rest[1]) <= watch:
                return
            low, high = rest
        self._keep_peak(tensor, max(-low, high))

    def _keep_peak(self, tensor: torch.Tensor, value: float) -> None:
        key = (self.module, custom_name(self.node) or self.op, self._place(tensor.shape), self.phase)
        self.watch.over[key] = max(self.watch.over.get(key, 0.0), value)
