"""The files of a run directory, written as the run goes on and completed when it ends, well or not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.files import write_json, write_text
from surefoot.run.card import model_card
from surefoot.run.folder import RunFolder
from surefoot.run.plots import write_plots
from surefoot.run.quiet import QuietListener
from surefoot.run.results import Evaluations, training_metrics, write_results, write_trainer_state
from surefoot.run.snapshot import package_versions, snapshot
from surefoot.run.trainer_log import TrainerLog
from surefoot.run.window import LogWindow
from surefoot.train.events import EvalEvent, RunFacts, StepEvent, TrainResult

if TYPE_CHECKING:
    from surefoot.config import Config


class RunRecord(QuietListener):
    """Writes everything in the run directory but weights and checkpoints.

    Attributes:
        plots: the PNGs written so far, the training loss first.
    """

    plots: list[Path]

    def __init__(
        self, cfg: Config, folder: RunFolder, data_report: dict[str, Any], environment: dict[str, Any] | None = None
    ) -> None:
        """Take what the files will say.

        Args:
            cfg: the run's settings.
            folder: where to write.
            data_report: what became of the rows, as `DataReport.to_json` gives it.
            environment: the workarounds and the variables that the process got, as `environment_record` gives them.
        """
        self.plots = []
        self._cfg = cfg
        self._folder = folder
        self._data_report = data_report
        self._environment = environment or {}
        self._log = TrainerLog(folder.trainer_log, log_window(cfg))
        self._evaluations = Evaluations(stage=cfg.stage)
        self._facts: RunFacts | None = None

    def started(self, facts: RunFacts) -> None:
        """Write what is known before the first step. Not earlier: a refused resume must leave the folder as it is."""
        self._facts = facts
        if facts.resumed_from == 0:
            self._folder.clear_results()
        write_text(self._folder.resolved_yaml, self._cfg.to_yaml())
        write_json(self._folder.machine_json, snapshot(with_torch=True) | self._environment)
        write_json(self._folder.data_report, self._data_report)
        self._log.started(facts)

    def stepped(self, event: StepEvent) -> None:
        """Log the step."""
        self._log.stepped(event)

    def rewound(self, step: int) -> None:
        """Take the undone steps out of the log."""
        self._log.rewound(step)
        self._evaluations.rewound(step)

    def evaluated(self, event: EvalEvent) -> None:
        """Log the evaluation."""
        self._log.evaluated(event)
        self._evaluations.add(event)

    def finished(self, result: TrainResult) -> None:
        """Write results, history, plots and the model card."""
        assert self._facts is not None
        self._log.finished(result)
        self._write_history()
        if result.loss is None and self._folder.tells_of_run_with(result.steps):
            return  # the run was over before: its results say more than those of a process that did no step
        train, evaluation = training_metrics(result), self._evaluations.metrics
        write_results(self._folder.path, train, evaluation)
        if result.stopped_by != "signal":
            metrics = train | evaluation
            card = model_card(self._cfg, self._facts, self._data_report, metrics, package_versions(), self.plots)
            write_text(self._folder.path / "README.md", card)

    def failed(self) -> None:
        """Write what is known of a run that ended by an error; nothing if it never started."""
        if self._facts is not None:
            self._log.failed()
            self._write_history()

    def _write_history(self) -> None:
        assert self._facts is not None
        settings = {
            "logging_steps": self._cfg.logging_steps,
            "eval_steps": self._cfg.eval_steps or self._cfg.logging_steps,
            "save_steps": self._cfg.save_steps,
            "train_batch_size": self._cfg.per_device_train_batch_size,
        }
        write_trainer_state(self._folder.trainer_state, self._facts, self._log.entries, settings)
        if self._cfg.plot_loss:
            self.plots = write_plots(self._folder.path, self._log.entries)


def log_window(cfg: Config) -> LogWindow:
    """A window with the run's settings; every listener that logs needs its own."""
    return LogWindow(cfg.logging_strategy, cfg.logging_steps, cfg.logging_first_step)
