"""A YAML's own optimizer step, assembled and run as `surefoot train` does it, in a folder that is thrown away."""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import torch

from surefoot.bench.arithmetic import Arithmetic, count_step, matrices_of
from surefoot.bench.ceilings import DTYPES, FP8, Ceilings, Rate, shape_rates
from surefoot.bench.profile import Profile, profile_step
from surefoot.data.batch import count_trained, split_into_passes
from surefoot.data.prepare import prepare_data
from surefoot.errors import WorkError
from surefoot.model.compiled import compiled_layers, computes_in_fp8
from surefoot.model.emulate import emulation
from surefoot.model.forward import trained_head
from surefoot.model.load import load_model
from surefoot.model.structure import decoder_layers
from surefoot.run.preprocessing import PreprocessingProgress
from surefoot.run.prompts import load_prompts
from surefoot.run.quiet import QuietListener
from surefoot.train.before import look_before_training
from surefoot.train.events import StepEvent
from surefoot.train.loop import Run, train
from surefoot.train.run import assemble
from surefoot.train.signals import StopRequest

if TYPE_CHECKING:
    from rich.console import Console

    from surefoot.config import Config

WARM_UP = {True: 3, False: 1}  # steps before the clock, by whether layers are compiled: a variant or two come later


@dataclass(frozen=True)
class JobFigures:
    """The step of a job, measured.

    Attributes:
        steps: that were timed.
        tokens: in an average step.
        trained_tokens: that carried loss in an average step.
        passes: forward and backward passes in a step, at most.
        compiled_layers: decoder layers that ran compiled.
        ms: milliseconds of a step, the median.
        step_ms: milliseconds of each timed step.
        step_tokens: tokens of each timed step.
        tokens_per_second: the steps' median; real tokens, padding is none.
        memory_gib: peak: allocated on a GPU in the timed steps; of the whole process on a CPU. None where unknown.
        arithmetic: operations of an average step.
        dtype: of the matrix products.
        tflops: best measured rate of products in it.
        frozen_dtype: of products with frozen matrices.
        frozen_tflops: best measured rate of those.
        ceiling_tokens_per_second: tokens a second if the step were nothing but its products at the measured rate.
        shapes: rates at the shapes of the model's own matrices.
        profile: of one step more.
    """

    steps: int
    tokens: float
    trained_tokens: float
    passes: int
    compiled_layers: int
    ms: float
    step_ms: tuple[float, ...]
    step_tokens: tuple[int, ...]
    tokens_per_second: float
    memory_gib: float | None
    arithmetic: Arithmetic
    dtype: str
    tflops: float
    frozen_dtype: str
    frozen_tflops: float
    ceiling_tokens_per_second: float
    shapes: tuple[Rate, ...]
    profile: Profile

    @property
    def share(self) -> float:
        """The part of the ceiling that was reached."""
        return self.tokens_per_second / self.ceiling_tokens_per_second


class StepTeller(QuietListener):
    """Says every step and sentence of a run, and keeps the steps' times."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Take who is told.

        Args:
            tell: called with a sentence for the person.
        """
        self._tell = tell
        self._last = (0.0, 0)
        self.steps: list[tuple[float, int]] = []

    def begin(self, tokens: int) -> None:
        """Keep times from now on.

        Args:
            tokens: that the run has trained on so far.
        """
        self._last, self.steps = (0.0, tokens), []

    def stepped(self, event: StepEvent) -> None:
        """Keep a step's seconds and tokens, and say how fast it was."""
        seconds, tokens = self._last
        self._last = (event.seconds, event.tokens)
        self.steps.append((event.seconds - seconds, event.tokens - tokens))
        self._tell(f"  step {event.step}: {event.tokens_per_second:,.0f} tokens/s")

    def told(self, message: str) -> None:
        """Pass a sentence on."""
        self._tell(message)


def bench_job(
    cfg: Config, steps: int, ceilings: Ceilings, device: str, console: Console, tell: Callable[[str], None]
) -> JobFigures:
    """Measure a job's optimizer step.

    Args:
        cfg: the YAML; nothing is written into its `output_dir`.
        steps: to time.
        ceilings: of the device.
        device: as torch names it.
        console: for the bar of the data.
        tell: called with a sentence for the person.

    Returns:
        The figures.

    Raises:
        UserError: the job cannot be done: its data, model or settings.
        WorkError: a step failed.
    """
    with assembled(cfg, device, console, tell) as (run, teller), emulation(cfg.emulate):
        warm = WARM_UP[bool(compiled_layers(run.model))]
        compute, frozen = dtypes_of(run)
        tell("Measuring matrix products with the model's own shapes.")
        shapes = own_shapes(run, (compute, frozen), ceilings, device)
        tell(f"Warm-up: {warm} step{'s' if warm > 1 else ''}.")
        advance(run, warm)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats(device)
        tell(f"Timing {steps} step{'s' if steps > 1 else ''}.")
        places = range(run.state.step, run.state.step + steps)
        teller.begin(run.state.tokens)
        advance(run, steps)
        timed = list(teller.steps)
        memory = peak_gib(device)
        samples = [run.samples_of(place) for place in places]
        tokens = sum(len(sample.input_ids) for part in samples for sample in part)
        work = reduce(add, (count_step(run.runner.forward, part) for part in samples))
        tell("Profiling one step.")
        profile = profile_step(lambda: advance(run, 1), device)
        best = {rate.dtype: rate.tflops for rate in sorted((*ceilings.squares, *shapes), key=lambda r: r.tflops)}
        rate, frozen_rate = best[compute], best[frozen]
        return JobFigures(
            steps=steps,
            tokens=tokens / steps,
            trained_tokens=sum(count_trained(part) for part in samples) / steps,
            passes=max(len(passes_of(run, place)) for place in places),
            compiled_layers=len(compiled_layers(run.model)),
            ms=statistics.median(seconds for seconds, _ in timed) * 1e3,
            step_ms=tuple(seconds * 1e3 for seconds, _ in timed),
            step_tokens=tuple(tokens for _, tokens in timed),
            tokens_per_second=statistics.median(tokens / seconds for seconds, tokens in timed),
            memory_gib=memory,
            arithmetic=Arithmetic(*(part / steps for part in (work.frozen, work.trained, work.attention, work.head))),
            dtype=compute,
            tflops=rate,
            frozen_dtype=frozen,
            frozen_tflops=frozen_rate,
            ceiling_tokens_per_second=tokens / work.least_seconds(rate, frozen_rate),
            shapes=tuple(shapes),
            profile=profile,
        )


@contextlib.contextmanager
def assembled(
    cfg: Config, device: str, console: Console, tell: Callable[[str], None]
) -> Generator[tuple[Run, StepTeller]]:
    """Put a job together as a run does, but for its folder: nothing is read from `output_dir` or written to it.

    Args:
        cfg: the YAML.
        device: as torch names it.
        console: for the bar of the data.
        tell: called with a sentence for the person.

    Yields:
        The run, ready for its first step, without checkpoints and evaluations; and who listens to it.
    """
    tell("Reading the data.")
    tokenizer, template = load_prompts(cfg)
    with PreprocessingProgress(console) as preprocessing:
        data = prepare_data(cfg, tokenizer, template, progress=preprocessing)
    tell("Loading the model.")
    loaded = load_model(cfg, tokenizer, device)
    for note in loaded.notes:
        tell(note)
    teller = StepTeller(tell)
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as folder:
        changes = {
            "output_dir": folder, "overwrite_output_dir": True, "resume_from_checkpoint": None, "save_strategy": "no",
            "eval_strategy": "no", "guard_preflight": False,
        }  # fmt: skip
        run = assemble(cfg.model_copy(update=changes), loaded, tokenizer, data, [teller], device, StopRequest())
        look_before_training(run)
        yield run, teller


def advance(run: Run, steps: int) -> None:
    """Train for some steps more, by the run's own loop.

    Args:
        run: assembled.
        steps: to do.
    """
    run.schedule = replace(run.schedule, total_steps=run.state.step + steps)
    train(run)


def passes_of(run: Run, place: int) -> list[list]:
    """Split the samples of the step after `place` steps as the run does."""
    return split_into_passes(run.samples_of(place), run.runner.tokens_per_pass)


def dtypes_of(run: Run) -> tuple[str, str]:
    """Name the dtype of the run's products, and that of those with frozen matrices."""
    forward = run.runner.forward
    compute = forward.autocast or forward.model.get_input_embeddings().weight.dtype
    name = next(name for name, dtype in DTYPES.items() if dtype == compute)
    return name, FP8 if computes_in_fp8(run.model) else name


def own_shapes(run: Run, dtypes: tuple[str, str], ceilings: Ceilings, device: str) -> list[Rate]:
    """Measure products with the matrices of the first decoder layer and the head.

    Adapters' matrices are left out, which are thin; experts' rows depend on where tokens are sent.

    Args:
        run: ready for its first step, whose largest pass gives the rows.
        dtypes: of the products, and of those with frozen matrices.
        ceilings: of the device.
        device: as torch names it.

    Returns:
        The rates.

    Raises:
        WorkError: the device does not multiply in one of the dtypes.
    """
    base = run.runner.forward.model
    layer = [
        (matrix.short_name, matrix.inputs, matrix.outputs)
        for matrix in matrices_of(decoder_layers(base)[0], base.config)
        if "lora_" not in matrix.name and "experts" not in matrix.name
    ]
    head = trained_head(base).weight
    rows = max(sum(len(sample.input_ids) for sample in group) for group in passes_of(run, 0))
    expected = {rate.dtype: rate.tflops for rate in ceilings.squares}
    for dtype in dtypes:
        if dtype not in expected:
            raise WorkError(f"{device} does not multiply in {dtype}: {ceilings.missing[dtype]}")
    compute, frozen = dtypes
    found = shape_rates([*layer, ("head", head.shape[1], head.shape[0])], compute, rows, expected[compute], device)
    return found if frozen == compute else [*found, *shape_rates(layer, frozen, rows, expected[frozen], device)]


def peak_gib(device: str) -> float | None:
    """Return the peak of memory: allocated on a GPU, or of this process in the host's; None where it is not known."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows has none
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
