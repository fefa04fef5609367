"""The Keras callback that keeps a run's record while it trains."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import keras

from fitstep.records._console import Console
from fitstep.records._run_folder import RunFiles

# While a run lasts its model and curves are saved too, so that a kill costs minutes at most: not
# more often than this, and never for more than a twentieth of the time.
SECONDS_BETWEEN_SAVES = 60.0
SHARE_OF_TIME = 20


class Recorder(keras.callbacks.Callback):
    """Writes a line per epoch and, now and then, the model; tells the console.

    It listens to epochs only, so it never makes the engine stop between batches.

    Args:
        name: the run's name.
        files: where the record goes.
        console: who hears about each epoch.
        keep: called before the first line is written: the run folder is worth keeping from here.
        clock: seconds.
    """

    def __init__(
        self,
        name: str,
        files: RunFiles,
        console: Console,
        keep: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.name = name
        self.history: dict[str, list[Any]] = {}
        self.epochs = 0
        self._files = files
        self._console = console
        self._keep = keep
        self._clock = clock
        self._begun = self._epoch_begun = self._next_save = clock()

    @property
    def seconds(self) -> float:
        """How long the run has lasted."""
        return round(self._clock() - self._begun, 3)

    @property
    def last(self) -> dict[str, Any]:
        """The figures of the latest epoch."""
        return {name: values[-1] for name, values in self.history.items()}

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._next_save = self._clock() + SECONDS_BETWEEN_SAVES

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch_begun = self._clock()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._keep()
        self.epochs += 1
        figures = {name: _number(value) for name, value in (logs or {}).items()}
        for name, value in figures.items():
            self.history.setdefault(name, []).append(value)
        seconds = round(self._clock() - self._epoch_begun, 3)
        self._files.append_epoch({"epoch": epoch + 1, "seconds": seconds, "logs": figures})
        self._console.epoch(epoch + 1, figures)
        if self.epochs == 1:
            self.write_summary("running")
        if self._clock() >= self._next_save:
            begun = self._clock()
            self.save()
            spent = self._clock() - begun
            self._next_save = self._clock() + max(SECONDS_BETWEEN_SAVES, SHARE_OF_TIME * spent)

    def save(self) -> None:
        """Save the model as it is now, the curves and where the run stands."""
        self._files.save_model(self.model)
        self._files.draw_curves(self.history, self.name)

    def write_summary(self, status: str, **more: Any) -> dict[str, Any]:
        """Write what came of the run, and return it."""
        summary = {
            "status": status,
            "epochs": self.epochs,
            "seconds": self.seconds,
            "last": self.last,
            **more,
        }
        self._files.write_summary(summary)
        return summary


def _number(value: Any) -> Any:
    """A Python number where the log is a scalar, so that it prints and draws as one."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value
