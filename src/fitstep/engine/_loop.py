"""The loops of training, evaluation and prediction: flat, in the order that Keras's have."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import tree

from fitstep._errors import DataError
from fitstep._keras import _trainer
from fitstep._keras._callbacks import BatchHooks, announce_steps
from fitstep._warn import warn
from fitstep.engine._live import Live, record_of
from fitstep.engine._outputs import Outputs, joined
from fitstep.engine._passes import one_batch
from fitstep.engine._runner import MOST_STEPS, Executed, Runner
from fitstep.engine._signals import holding
from fitstep.engine._trace import Step


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a loop needs to know.

    Attributes:
        step: the pure step of the model, see `_trace.Step`.
        feed: the batches, cut into epochs or rounds.
        callbacks: a `keras.callbacks.CallbackList`.
        stride: the steps between two calls of the callbacks' batch hooks.
        max_steps: the steps after which training ends; None for no limit.
        max_compiles: for how many kinds of batches may be compiled; None for any number.
    """

    model: Any
    step: Step
    feed: Any
    callbacks: Any
    stride: int = 1
    max_steps: int | None = None
    max_compiles: int | None = None
    donate: bool = True
    snapshot: bool = True


def train(
    run: Run,
    *,
    initial_epoch: int,
    validate: Callable[[int], dict[str, Any] | None],
    validation: Run | None = None,
) -> None:
    """Train; where the feed has rounds, a round takes the place of an epoch.

    Args:
        validate: returns the logs of a validation after an epoch, or None for none.
        validation: the evaluation that it will make, to be compiled while the first epoch trains.
    """
    model, callbacks, feed = run.model, run.callbacks, run.feed
    with _running(run, "train") as runner:
        model.stop_training = False
        logs: dict[str, Any] = {}
        trained = False
        # 1. The callbacks begin; one of them may set the epoch to start from.
        callbacks.on_train_begin()
        first = _trainer.first_epoch(model, initial_epoch)
        for epoch in feed.indices(first):
            # 2. Metrics start anew, and callbacks may still change anything.
            model.reset_metrics()
            mark, begun = _trainer.mark_nested(model), runner.steps
            coming = _coming(run, begun)
            announce_steps(callbacks, coming)
            callbacks.on_epoch_begin(epoch)
            if _trainer.ran_nested(model, mark):
                model.reset_metrics()
            # 3. The steps. What the variables hold now is the snapshot.
            if validation and not trained:
                compile_ahead(validation)
            runner.begin_epoch()
            step_logs = _epoch(run, runner)
            if step_logs is None and epoch > first:
                _warn_of_end(epoch - first, feed.epochs - first)
                break
            # 4. The logs of the epoch, read once its steps are done.
            logs = _epoch_logs(runner, step_logs)
            # 5. Validation, which takes over the metrics.
            logs |= {f"val_{name}": value for name, value in (validate(epoch) or {}).items()}
            # 6. The callbacks see the epoch; one of them may stop the training.
            if coming and not model.stop_training:
                announce_steps(callbacks, min(coming, runner.steps - begun))
            callbacks.on_epoch_end(epoch, logs)
            trained = True
            if model.stop_training or runner.steps == run.max_steps:
                break
        # 7. The optimizer puts final values (averages) in place, the callbacks end.
        if trained:
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
        step_logs = _epoch(run, runner)
        logs = _trainer.as_numbers(_epoch_logs(runner, step_logs))
        callbacks.on_test_end(logs)
    return logs


def compile_ahead(run: Run) -> None:
    """Begin to compile what an evaluation of arrays will need.

    An error in the step is left for the evaluation to meet.
    """
    kind = run.feed.known_kind()
    if kind is None:
        return
    record = record_of(run.model)
    with holding() as hold, record.lock:
        live = Live(run.model, "test")
        try:
            live.relist()
            live.place()
            hooks = BatchHooks(run.callbacks, "test")
            runner = Runner(run.step, live, hold)
            together = run.stride > 1 or hooks.obstacle is None
            wanted = _wanted(run, runner, run.stride) if together else 1
            runner.compile_ahead(kind, wanted)
        except Exception:  # noqa: BLE001 - whatever the user's step raises
            live.settle()
            _trainer.forget_losses(run.model)


def predict(run: Run) -> Any:
    """Predict; returns NumPy arrays with the rows of all batches."""
    model, callbacks = run.model, run.callbacks
    outputs = Outputs(getattr(run.feed.source, "rows", None))
    with _running(run, "predict") as runner:
        model.stop_predicting = False
        callbacks.on_predict_begin()
        runner.begin_epoch()
        _epoch(run, runner, outputs)
        callbacks.on_predict_end()
    return outputs.result()


def steps(run: Run) -> Iterator[dict[str, Any]]:
    """Train step by step, from one `next` to the other; yields the logs as they are computed."""
    with _running(run, "train") as runner:
        yield from _each_step(run, runner)
        # Not where the caller leaves the loop, perhaps to go on with another.
        _trainer.finalize(run.model)


def _each_step(run: Run, runner: Runner) -> Iterator[dict[str, Any]]:
    model, feed, live = run.model, run.feed, runner.live
    for epoch in feed.indices(0):
        model.reset_metrics()
        runner.begin_epoch()
        feed.begin()
        logs = None
        while (kind := feed.peek()) is not None:
            if logs is None:
                runner.explain(kind, 1, 1, "`fitstep.steps` makes one step at a time")
            logs = runner.execute(feed.draw(1, 1, prompt=True)).last
            # The model is the caller's, who may run anything on it, until the next step.
            mark, live.waits = _trainer.mark_nested(model), True
            yield logs
            live.waits = False
            _take_over_metrics(live, mark)
            if runner.steps == run.max_steps:
                return
        if logs is None:
            if not epoch:
                raise DataError(_NO_BATCH.format(what="training"))
            _warn_of_end(epoch, feed.epochs)
            return
        feed.end()
        live.end_epoch()


def _take_over_metrics(live: Live, mark: Any) -> None:
    """Between two steps of the caller's own loop: a metric that was reset starts anew."""
    if not live.changed_metrics():
        return
    if _trainer.ran_nested(live.model, mark) or len(live.record.running) > 1:
        live.write_back()  # what another run left is no reset
    else:
        live.owns_metrics = False


def on_batch(model: Any, step: Step, mode: str, batch: Any) -> Any:
    """One step on one batch, outside any epoch; its logs, or in prediction its outputs."""
    with _running(Run(model=model, step=step, feed=None, callbacks=None), mode) as runner:
        chunk = one_batch(batch, placed=not runner.live.is_elsewhere)
        result = runner.execute(chunk).last
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
            runner = Runner(
                run.step,
                live,
                hold,
                donate=run.donate,
                snapshot=run.snapshot,
                max_compiles=run.max_compiles,
            )
            runner.long = run.feed is not None
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
            try:
                if run.feed is not None:
                    run.feed.close()  # which runs code of the user's
            finally:
                hold.held = True
                with record.lock:
                    record.running.remove(live)
                    _trainer.unmark_nested(run.model)
                    if record.running:
                        # A run within a callback of another used the same metrics.
                        record.running[-1].write_back()
                hold.release()


_STOPS = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}


def _epoch(run: Run, runner: Runner, outputs: Outputs | None = None) -> Any:
    """The steps of one epoch or round; returns the last logs, or None where there was no step."""
    feed, mode = run.feed, runner.live.mode
    hooks = BatchHooks(run.callbacks, mode)
    if getattr(run.model, _STOPS[mode]):
        # Asked for before the first step, after which Keras looks.
        hooks.obstacle = f"`{_STOPS[mode]}` was set before the first step"
    together = run.stride > 1 or hooks.obstacle is None
    logs: Any = None
    step = 0
    feed.begin()
    while runner.steps != run.max_steps and not feed.at_end():
        # 1. The callbacks learn which step begins, unless they are told of several afterwards.
        if hooks.begins and not (together and run.stride == 1):
            _call(runner, hooks.begin, step)
        begun, results = step, []
        while step - begun < run.stride and runner.steps != run.max_steps:
            # 2. The next batches, as many as one execution takes.
            if (kind := feed.peek()) is None:
                break
            wanted = _wanted(run, runner, begun + run.stride - step) if together else 1
            width = runner.room(kind, wanted) if together else 1
            if step == 0:
                runner.explain(kind, width, wanted, _limit(run, hooks, wanted))
            chunk = feed.draw(min(wanted, runner.most(kind, width)), width, prompt=not together)
            # 3. Their steps.
            done = runner.execute(chunk, halt=hooks.halts and run.stride == 1)
            results.append(done)
            step += done.count
            if run.stride == 1:
                break
        if not results:
            break
        # 4. The callbacks see the model after the last step, and its logs; or all logs in turn.
        done = results[-1]
        logs = done.last
        if outputs is not None:
            for result in results:
                outputs.add(result)
            logs = {"outputs": None}
        if hooks.ends:
            _tell(runner, hooks, run.stride, begun, step, results)
        # 5. A callback may have asked to stop, or the data have ended within a stride.
        if getattr(run.model, _STOPS[mode]) or (run.stride > 1 and step - begun < run.stride):
            break
    if hooks.ends:
        hooks.flush()
    feed.end()
    runner.live.end_epoch()
    return logs


def _coming(run: Run, made: int) -> int | None:
    """The steps of the epoch or round to come, if they are known."""
    left = None if run.max_steps is None else run.max_steps - made
    return min(
        (n for n in (run.feed.steps, run.feed.remaining, left) if n is not None), default=None
    )


def _wanted(run: Run, runner: Runner, stride_left: int) -> int:
    """How many steps the next execution is to have at most."""
    most = MOST_STEPS
    if run.stride > 1 or not run.feed.source.ahead:
        most = min(most, stride_left)
    if run.feed.steps is not None:
        most = min(most, run.feed.steps)
    if run.max_steps is not None:
        most = min(most, run.max_steps - runner.steps)
    return most


def _limit(run: Run, hooks: BatchHooks, wanted: int) -> str:
    """Why the loop wants no more steps in an execution, in words; empty if it would take any."""
    if wanted == MOST_STEPS:
        return ""
    if run.stride > 1:
        return f"`steps_per_execution` is {run.stride}"
    if hooks.obstacle is not None:
        return f"callbacks act between steps: {hooks.obstacle}"
    if not run.feed.source.ahead:
        return "the source is asked for a batch only when a step needs it"
    if run.feed.steps == wanted:
        return f"steps of an epoch or round: {wanted}"
    return f"`max_steps` leaves {wanted}"


def _tell(
    runner: Runner, hooks: BatchHooks, stride: int, begun: int, end: int, results: list[Executed]
) -> None:
    """Call the hook that ends a batch, once for a stride or else for each step."""
    done, predicting = results[-1], runner.live.mode == "predict"
    if stride == 1 and done.stacked is not None:
        stacked = {"outputs": done.stacked} if predicting else done.stacked
        _call(runner, hooks.replay, begun, stacked, done.count)
    else:
        logs = {"outputs": joined(results)} if predicting else done.last
        told = stride > 1 or hooks.obstacle is not None
        _call(runner, functools.partial(hooks.end, with_begin=not told), end - 1, logs)


_NO_BATCH = (
    "The data for {what} has no batch, or none any more. Give at least one row; a generator is "
    "iterated once, so give one that goes on, with a number of steps, or a source that starts "
    "anew, such as a `PyDataset`."
)


def _warn_of_end(epochs: int, of: int) -> None:
    warn(
        f"The source ran out of data after {epochs} of {of} epochs; training ends. A generator "
        f"is iterated once: give one that goes on, with `steps_per_epoch`, or a source that "
        f"starts anew, such as a `PyDataset`.",
    )


def _epoch_logs(runner: Runner, step_logs: Any) -> dict[str, Any]:
    if step_logs is None:
        what = "training" if runner.live.mode == "train" else "evaluation or validation"
        raise DataError(_NO_BATCH.format(what=what))
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
    warn(
        "A callback wrote to a metric of the model in the middle of an epoch. These metrics "
        "belong to the running epoch, so the write was not taken over. Use a metric of the "
        "callback's own, or write in `on_epoch_begin`.",
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
