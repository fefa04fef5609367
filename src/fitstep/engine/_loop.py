"""The loops of training, evaluation and prediction: flat, in the order that Keras's have."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import tree

from fitstep._errors import DataError
from fitstep._keras import _callbacks, _trainer
from fitstep.engine._live import Live, record_of
from fitstep.engine._program import Step
from fitstep.engine._runner import Runner
from fitstep.engine._signals import holding


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a loop needs to know.

    Attributes:
        step: the pure step of the model, see `_program.Step`.
        batches: yields `(step, step, iterator)`, as Keras's epoch iterators do.
        callbacks: a `keras.callbacks.CallbackList`.
        stride: the steps between two calls of the callbacks' batch hooks.
    """

    model: Any
    step: Step
    batches: Any
    callbacks: Any
    stride: int = 1
    donate: bool = True
    snapshot: bool = True


def train(
    run: Run, *, epochs: int, initial_epoch: int, validate: Callable[[int], dict[str, Any] | None]
) -> None:
    """Train; `validate` returns the logs of a validation after an epoch, or None for none."""
    model, callbacks = run.model, run.callbacks
    with _running(run, "train") as runner:
        model.stop_training = False
        logs: dict[str, Any] = {}
        # 1. The callbacks begin; one of them may set the epoch to start from.
        callbacks.on_train_begin()
        first = _trainer.first_epoch(model, initial_epoch)
        for epoch in range(first, epochs):
            # 2. Metrics start anew, and callbacks may still change anything.
            model.reset_metrics()
            mark = _trainer.mark_nested(model)
            callbacks.on_epoch_begin(epoch)
            if _trainer.ran_nested(model, mark):
                model.reset_metrics()
            # 3. The steps. What the variables hold now is the snapshot.
            runner.begin_epoch()
            step_logs = _epoch(run, runner, _TRAIN)
            if step_logs is None and epoch > first:
                warnings.warn(
                    f"The source ran out of data after {epoch - first} of {epochs - first} epochs; "
                    f"training ends. A generator is iterated once: give one that goes on, with "
                    f"`steps_per_epoch`, or a source that starts anew, such as a `PyDataset`.",
                    stacklevel=2,
                )
                break
            # 4. The logs of the epoch, read once its steps are done.
            logs = _epoch_logs(runner, step_logs)
            # 5. Validation, which takes over the metrics.
            validation = validate(epoch) or {}
            logs |= {f"val_{name}": value for name, value in validation.items()}
            # 6. The callbacks see the epoch; one of them may stop the training.
            callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        # 7. The optimizer puts final values (averages) in place, the callbacks end.
        if epochs > 0:
            _trainer.finalize(model)
        callbacks.on_train_end(logs)


def test(run: Run) -> dict[str, Any]:
    """Evaluate; returns the logs as Python numbers."""
    model, callbacks = run.model, run.callbacks
    with _running(run, "test") as runner:
        model.stop_evaluating = False
        callbacks.on_test_begin()
        model.reset_metrics()
        runner.begin_epoch()
        step_logs = _epoch(run, runner, _TEST)
        logs = _trainer.as_numbers(_epoch_logs(runner, step_logs))
        callbacks.on_test_end(logs)
    return logs


def predict(run: Run) -> Any:
    """Predict; returns NumPy arrays with the rows of all batches."""
    model, callbacks = run.model, run.callbacks
    collected: list[Any] = []
    with _running(run, "predict") as runner:
        model.stop_predicting = False
        callbacks.on_predict_begin()
        runner.begin_epoch()
        _epoch(run, runner, _PREDICT, collected)
        callbacks.on_predict_end()
        if not collected:
            raise DataError("There is nothing to predict: the data has no batch.")
        return _concatenated(collected)


def on_batch(model: Any, step: Step, mode: str, batch: Any) -> Any:
    """One step on one batch, outside any epoch; its logs, or in prediction its outputs."""
    with _running(Run(model=model, step=step, batches=None, callbacks=None), mode) as runner:
        result = runner.step(batch)
        if mode == "predict":
            return tree.map_structure(np.array, result)
        return _trainer.as_numbers(result)


@contextmanager
def _running(run: Run, mode: str) -> Iterator[Runner]:
    """A run from its beginning to its end, which leaves the model whole however it comes."""
    with holding() as hold:
        record = record_of(run.model)
        with record.lock:
            live = Live(run.model, mode)
            runner = Runner(run.step, live, hold, donate=run.donate, snapshot=run.snapshot)
        hold.held = True
        try:
            with record.lock:
                record.running.append(live)
                # From here on a failure, also of a callback at the very beginning, can be mended.
                runner.begin_epoch()
                live.owns_metrics = False
                hold.release()
            yield runner
        except BaseException as error:
            _settle(runner, error)
            raise
        finally:
            hold.held = True
            with record.lock:
                record.running.remove(live)
                _trainer.unmark_nested(run.model)
                if record.running:
                    # A run within a callback of another used the same metrics.
                    record.running[-1].write_back()
            hold.release()


@dataclass(frozen=True)
class _Hooks:
    """The names of the hooks and of the flag that ends an epoch early."""

    begin: str
    end: str
    stop: str


_TRAIN = _Hooks("on_train_batch_begin", "on_train_batch_end", "stop_training")
_TEST = _Hooks("on_test_batch_begin", "on_test_batch_end", "stop_evaluating")
_PREDICT = _Hooks("on_predict_batch_begin", "on_predict_batch_end", "stop_predicting")


def _epoch(run: Run, runner: Runner, hooks: _Hooks, outputs: list[Any] | None = None) -> Any:
    """The steps of one epoch; returns the logs of the last one, or None where there was none."""
    model, batches = run.model, run.batches
    begins, ends = (_callbacks.batch_hook(run.callbacks, hook) for hook in (hooks.begin, hooks.end))
    logs: Any = None
    for begin, _, source in batches:
        # 1. The callbacks learn which step begins.
        if begins:
            _call(runner, begins, begin)
        # 2. One batch is drawn, and one step made; more of them with a stride.
        if (batch := _draw(batches, source)) is None:
            break
        results = [runner.step(batch)]
        while len(results) < run.stride and (following := next(batches, None)):
            if (batch := next(following[2], None)) is None:
                break
            results.append(runner.step(batch))
        # 3. The callbacks see the model after the last step, and its logs.
        logs = results[-1]
        if outputs is not None:
            outputs += results
            logs = {"outputs": _joined(results)}
        if ends:
            # With a stride Keras counts whole strides, also where the data ends within one.
            _call(runner, ends, begin + run.stride - 1, logs)
        # 4. A callback may have asked to stop.
        if getattr(model, hooks.stop):
            break
    if ends:
        ends.flush()
    runner.live.end_epoch()
    return logs


def _draw(batches: Any, source: Iterator[Any]) -> Any:
    """The next batch, or None at the end of the data, which Keras notes, and warns if it is early.

    Only the draw is looked at: a `StopIteration` out of a step or a callback is the user's error.
    """
    with batches.catch_stop_iteration():
        return next(source)


def _joined(results: list[Any]) -> Any:
    if len(results) == 1:
        return results[0]
    return tree.map_structure(lambda *parts: np.concatenate(parts), *results)


def _concatenated(outputs: list[Any]) -> Any:
    first = outputs[0]
    flat = [tree.flatten(output) for output in outputs]
    joined = [np.concatenate([np.asarray(p) for p in parts]) for parts in zip(*flat, strict=True)]
    return tree.pack_sequence_as(first, joined)


def _epoch_logs(runner: Runner, step_logs: Any) -> dict[str, Any]:
    if step_logs is None:
        what = "training" if runner.live.mode == "train" else "evaluation or validation"
        raise DataError(
            f"The data for {what} has no batch, or none any more. Give at least one row; a "
            f"generator is iterated once, so give one that goes on, with a number of steps, or a "
            f"source that starts anew, such as a `PyDataset`."
        )
    averages = runner.means.result()
    if averages:
        return {**step_logs, **averages}
    with runner.live.record.lock:  # the next step of another thread may give the metrics up
        return _trainer.results_or_logs(runner.live.model, step_logs)


def _call(runner: Runner, hook: Callable[..., None], *args: Any) -> None:
    """Call the callbacks, and say once if one of them wrote to a metric of the running epoch."""
    live = runner.live
    mark = _trainer.mark_nested(live.model)
    hook(*args)
    if not live.changed_metrics():
        return
    # An `evaluate` of Keras's own within a callback leaves its results; they are no write.
    nested = _trainer.ran_nested(live.model, mark)
    live.write_back()
    if nested or "metrics" in live.record.warned:
        return
    live.record.warned.add("metrics")
    warnings.warn(
        "A callback wrote to a metric of the model in the middle of an epoch. These metrics "
        "belong to the running epoch, so the write was not taken over. Use a metric of the "
        "callback's own, or write in `on_epoch_begin`.",
        stacklevel=2,
    )


def _settle(runner: Runner, error: BaseException) -> None:
    """Leave the model whole after a failure, and say what was taken back."""
    runner.hold.held = True
    try:
        with runner.live.record.lock:
            taken_back = runner.live.settle()
            _trainer.forget_losses(runner.live.model)
        if taken_back:
            error.add_note(f"fitstep: {taken_back}.")
    finally:
        runner.hold.release()
