"""What a person sees while a run goes on: one live line on a terminal, plain lines in a file. All on stderr."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.run.quiet import QuietListener
from surefoot.train.events import EvalEvent, RunFacts, StepEvent, TrainResult

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

PLAIN_SECONDS = 10.0
"""Without a terminal: at least this long between two lines that no evaluation or message forces."""


class Progress(QuietListener):
    """Shows step, loss, learning rate, gradient norm, tokens a second and the time that is left."""

    def __init__(self, console: Console) -> None:
        """Take a console.

        Args:
            console: rich's, on stderr.
        """
        self._console = console
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._facts: RunFacts | None = None
        self._last_line = -PLAIN_SECONDS

    def started(self, facts: RunFacts) -> None:
        """Show the facts and, on a terminal, the bar."""
        self._facts = facts
        self._print(describe(facts))
        if self._console.is_terminal:
            self._bar = _make_bar(self._console)
            self._task = self._bar.add_task("train", total=facts.total_steps, completed=facts.resumed_from, numbers="")
            self._bar.start()

    def stepped(self, event: StepEvent) -> None:
        """Show the step."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=event.step, numbers=numbers(event))
        is_due = event.seconds - self._last_line >= PLAIN_SECONDS or event.step == event.total_steps
        if event.nonfinite or (self._bar is None and is_due):
            self._last_line = event.seconds
            self._print(f"step {event.step}/{event.total_steps}  {numbers(event)}  {self._time_left(event)}")

    def rewound(self, step: int) -> None:
        """Set the bar back."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step)

    def evaluated(self, event: EvalEvent) -> None:
        """Show an evaluation."""
        name = f" on {event.name}" if event.name else ""
        accuracy = f", token accuracy {event.accuracy:.1%}" if event.accuracy is not None else ""
        self._print(f"step {event.step}: evaluation{name}: loss {number(event.loss, '.4f')}{accuracy}")

    def saved(self, step: int, folder: Path) -> None:
        """Say where a checkpoint stands."""
        self._print(f"step {step}: checkpoint saved and verified: {folder}")

    def told(self, message: str) -> None:
        """Pass a sentence on."""
        self._print(message)

    def finished(self, result: TrainResult) -> None:
        """Close the bar and sum up."""
        self.close()
        if result.loss is None:
            self._print(f"Nothing left to do: the run was over after {result.steps} steps.")
            return
        how = {"signal": "stopped by a signal", "early stopping": "stopped early"}.get(result.stopped_by, "done")
        time = timedelta(seconds=round(result.seconds))
        rate = f", {result.tokens / result.seconds:,.0f} tokens/s" if result.seconds > 0 else ""
        loss = number(result.loss, ".4f")
        self._print(f"Training {how}: {result.steps} steps, mean loss {loss}, {time}{rate}.")

    def close(self) -> None:
        """Take the bar off the screen, also after a failure."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _time_left(self, event: StepEvent) -> str:
        done = event.step - (self._facts.resumed_from if self._facts else 0)
        left = event.seconds / max(done, 1) * (event.total_steps - event.step)
        return f"{timedelta(seconds=round(event.seconds))}<{timedelta(seconds=round(left))}"


def describe(facts: RunFacts) -> str:
    """Say in two lines what is about to happen."""
    share = 100 * facts.trainable_parameters / max(facts.total_parameters, 1)
    samples = "streamed samples" if facts.samples is None else f"{facts.samples:,} samples"
    resumed = f", {facts.resumed_from} of them done before" if facts.resumed_from else ""
    return (
        f"Trainable: {facts.trainable_parameters:,} of {facts.total_parameters:,} parameters ({share:.3g} %).\n"
        f"Training: {samples}, {facts.samples_per_step} a step, {facts.epochs:g} epochs, "
        f"{facts.total_steps} steps{resumed}."
    )


def numbers(event: StepEvent) -> str:
    """The step's numbers in one line."""
    memory = f"  {event.memory_gib:.1f} GiB" if event.memory_gib is not None else ""
    return (
        f"loss {number(event.loss, '.4f')}  lr {event.learning_rate:.2e}  grad {number(event.grad_norm, '.3g')}  "
        f"{event.tokens_per_second:,.0f} tok/s{memory}"
    )


def number(value: float | None, form: str) -> str:
    """Format a number that may not be finite."""
    return "not finite" if value is None else format(value, form)


def _make_bar(console: Console) -> Bar:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    return Bar(
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[numbers]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("<"),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=4,
    )
