"""One call of `fitstep train`: the runs of an experiment, one after the other, and their record."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import fitstep
from fitstep._run import Result, Run
from fitstep.cli._experiment import SINGLE, Experiment, ExperimentError, planned_runs, realise
from fitstep.records._console import Console, figures
from fitstep.records._environment import environment
from fitstep.records._recorder import Recorder
from fitstep.records._run_folder import RunFiles, RunFolder, shown

# Adam's two moments beside each weight; what a saved model takes at most, all but for a little.
COPIES_SAVED = 3


class Session:
    """The state of one training session: what is done, and what the folder says about it.

    Args:
        experiment: the loaded experiment.
        config: its `Config`.
        folder: the claimed run folder.
        console: who is told.
        begun: when the session began, in UTC.
    """

    def __init__(
        self,
        experiment: Experiment,
        config: Any,
        folder: RunFolder,
        console: Console,
        begun: datetime,
    ) -> None:
        self._experiment = experiment
        self._config = config
        self._folder = folder
        self._console = console
        self._begun = begun
        self._count = 0
        self._summaries: dict[str, dict[str, Any]] = {}
        self._files: dict[str, RunFiles] = {}

    def train(self) -> bool:
        """Train every run, then report. Whatever ends this, the folder tells how far it came.

        Returns:
            Whether everything that was to be kept is in the run folder.
        """
        status, more = "failed", {}
        try:
            results = self._train_runs()
            more = self._report(results)
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except BaseException as error:
            more = {"error": _one_line(error)}
            raise
        finally:
            self._close(status, more)
        missing = self._missing()
        without = f", without {', '.join(missing)}" if missing else ""
        self._console.say(f"Kept in {shown(self._folder.path)}{without}")
        return not missing

    def standing(self) -> str:
        """What stands in the run folder, for whoever stopped the training or saw it fail."""
        if not self._folder.kept:
            return "No epoch was over yet: no run folder is left."
        made = self._summaries.items()
        finished = sum(summary["status"] == "finished" for _, summary in made)
        told = [f"{finished} of {self._count} runs finished"] if self._count > 1 else []
        for name, summary in made:
            if summary["status"] != "finished":
                told.append(f"{name} stopped after {_epochs(summary['epochs'])}")
        kept = f"Kept in {shown(self._folder.path)}: what there was by then"
        return f"{kept} ({', '.join(told)})." if told else f"{kept}."

    def _train_runs(self) -> dict[str, Result]:
        experiment = self._experiment
        plan = planned_runs(experiment.build(self._config), experiment.path)
        self._count = len(plan)
        runs = "one run" if self._count == 1 else f"{self._count} runs"
        self._console.say(f"{experiment.name}: {runs}, into {shown(self._folder.path)}")
        results = {}
        for number, (name, planned) in enumerate(plan.items(), start=1):
            run = realise(name, planned, experiment.path)
            left = self._count - number + 1
            self._folder.require_room(left * COPIES_SAVED * _bytes(run.model))
            self._console.begin(name, number, self._count, run.epochs)
            results[name] = self._train_run(name, run)
        return results

    def _train_run(self, name: str, run: Run) -> Result:
        alone = self._count == 1 and name == SINGLE
        path = self._folder.path if alone else self._folder.path / name
        files = self._files[name] = RunFiles(path, self._console.say)
        recorder = Recorder(name, files, self._console, self._keep)
        status, test, more = "failed", None, {}
        try:
            history = _fit(run, recorder)
            test = _evaluate(run)
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except BaseException as error:
            more = {"error": _one_line(error)}
            raise
        finally:
            if status == "finished" or recorder.epochs:
                self._keep()
                # The summary first: it is the smallest, and a second Ctrl-C may cut this short.
                made = recorder.write_summary(status, test=test, **more)
                self._summaries[name] = made
                if not alone:
                    self._write_summary("running", {})
                recorder.save()
        self._console.end(
            f"{name}: {_epochs(recorder.epochs)} in {recorder.seconds:.1f} s; "
            f"last epoch: {figures(recorder.last)}" + (f"; test: {figures(test)}" if test else "")
        )
        return Result(name, run, dict(history.history), test)

    def _report(self, results: Mapping[str, Result]) -> dict[str, Any]:
        report = self._experiment.report
        if report is None:
            return {}
        rows = report(self._config, results)
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            raise ExperimentError(
                f"`report` in {self._experiment.path.name} must return a list of dicts, one for "
                f"each row of the table. Received: {type(rows).__name__}"
            )
        if rows:
            self._console.table(rows)
        return {"report": rows}

    def _keep(self) -> None:
        if self._folder.kept:
            return
        experiment = self._experiment
        about = {
            "experiment": experiment.name,
            "file": experiment.path,
            "sha256": experiment.digest,
            "config": self._config,
        }
        self._folder.keep(about, environment())

    def _missing(self) -> list[str]:
        """The files that could not be written."""
        return [
            name if self._count == 1 else f"{run}/{name}"
            for run, files in self._files.items()
            for name in sorted(files.missing)
        ]

    def _close(self, status: str, more: Mapping[str, Any]) -> None:
        if self._folder.kept:
            self._write_summary(status, more)
        else:
            self._folder.discard()

    def _write_summary(self, status: str, more: Mapping[str, Any]) -> None:
        now = datetime.now(UTC)
        summary = {
            "status": status,
            "experiment": self._experiment.name,
            "begun": self._begun.isoformat(timespec="seconds"),
            "seconds": round((now - self._begun).total_seconds(), 3),
        }
        if missing := self._missing():
            summary["missing"] = missing
        if list(self._summaries) == [SINGLE] and self._count == 1:
            summary |= self._summaries[SINGLE] | {"status": status}
        else:
            summary["runs"] = self._summaries
        RunFiles(self._folder.path, self._console.say).write_summary(summary | dict(more))


def _fit(run: Run, recorder: Recorder) -> Any:
    return fitstep.fit(
        run.model,
        run.x,
        run.y,
        batch_size=run.batch_size,
        epochs=run.epochs,
        verbose=0,
        callbacks=[*run.callbacks, recorder],
        validation_data=run.validation_data,
        shuffle=run.shuffle,
        class_weight=run.class_weight,
        sample_weight=run.sample_weight,
        steps_per_epoch=run.steps_per_epoch,
        validation_steps=run.validation_steps,
    )


def _evaluate(run: Run) -> dict[str, float] | None:
    if run.test_data is None:
        return None
    x, y, sample_weight = run.test_data, None, None
    if isinstance(run.test_data, list | tuple):
        x, y, sample_weight = (*run.test_data, None, None)[:3]
    return fitstep.evaluate(
        run.model,
        x,
        y,
        batch_size=run.batch_size,
        verbose=0,
        sample_weight=sample_weight,
        return_dict=True,
    )


def _epochs(count: int) -> str:
    return "1 epoch" if count == 1 else f"{count} epochs"


def _bytes(model: Any) -> int:
    """The size of a model's weights as float32; 0 for one that is built by its first batch."""
    return sum(4 * math.prod(variable.shape) for variable in model.variables)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
