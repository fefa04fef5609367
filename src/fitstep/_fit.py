"""Train, evaluate and predict with any Keras model: the arguments of Keras, the engine of fitstep.

The model is left as Keras's own methods leave it; nothing of fitstep is written to it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import keras
import numpy as np

from fitstep import _step
from fitstep._keras import _data, _trainer
from fitstep.engine import _loop
from fitstep.engine._feed import Epochs, Rounds
from fitstep.engine._live import alone, check_devices, record_of


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: Any = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
    validate_every: int | None = None,
    max_steps: int | None = None,
    max_compiles: int | None = None,
    steps_per_execution: int | None = None,
    donate: bool = True,
    snapshot: bool = True,
) -> keras.callbacks.History:
    """Train a compiled Keras model, with its default step or its own.

    Every argument of `keras.Model.fit` means what it means there. Beyond it, the model is never
    lost: a failure while a step is traced, compiled or first run leaves everything as it was, one
    in a callback or in the data, or Ctrl-C, leaves the last step, and one inside a running step
    the last snapshot. Logs of the model's own step that are no metrics are averaged over the
    epoch, weighted by rows.

    Args:
        model: a compiled `keras.Model`: Sequential, Functional, subclassed, loaded.
        x, y, sample_weight: arrays of B rows each (NumPy, JAX, tensors, in `x` also SciPy sparse),
            tables and columns of numbers (pandas, polars, Arrow, Hugging Face), or lists, tuples,
            dicts of them; or in `x` alone a source of batches `(x, y)` or `(x, y, sample_weight)`:
            a `PyDataset`, a generator, a loader of Grain, torch, tf.data.
        batch_size: the rows of a step, 32 if None. Only for arrays.
        epochs, initial_epoch, steps_per_epoch: as in Keras. None takes all the batches there are.
        validate_every: the steps of a round, which takes the place of an epoch for metrics,
            history, callbacks and validation. Rounds go on over the ends of passes, and `epochs`
            still counts the passes; the last round may be short.
        max_steps: the steps after which training ends, if `epochs` do not end it before. An epoch
            or round that it cuts short still ends with its validation.
        max_compiles: for how many kinds of batches (shapes, dtypes) this call may compile its
            training step, before one more is an error that names it. A partial last batch is a
            kind of its own. None allows any number, with a warning from the third on.
        steps_per_execution: the steps between two calls of the callbacks' batch hooks. None
            takes what the model was compiled with. How many steps share an execution is the
            engine's choice, see `fitstep.explain`.
        donate: update the weights in place. False keeps the state before every step, so nothing
            is taken back when a step fails; about 30 % slower on a CPU, with twice the memory.
        snapshot: keep the state of each epoch's start, to go back to when a step fails while it
            runs. False saves that memory; such a failure then loses the weights.

    Returns:
        The `keras.callbacks.History` of the run.

    Raises:
        StateError: if the model's step returns a state that does not fit, by name.
        DataError: if the data is empty, holds no numbers, or lacks some.
        ValueError: as `keras.Model.fit` raises it.
    """
    _trainer.check_model(model, "fit")
    _trainer.check_compiled(model, "fit")
    stride = _stride(model, steps_per_execution)
    _check_numbers_of_fit(epochs, validation_split)
    _check_count("max_steps", max_steps)
    _check_count("max_compiles", max_compiles)
    _check_count("validate_every", validate_every)
    _check_rounds(validate_every, steps_per_epoch, validation_freq, initial_epoch)
    epochs = _trainer.limited_epochs(epochs)
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = _data.split(
            (x, y, sample_weight), validation_split
        )
    source = _data.source(
        x,
        y,
        sample_weight,
        batch_size=batch_size,
        steps=steps_per_epoch,
        shuffle=shuffle,
        class_weight=class_weight,
        rng=lambda: _shuffler(model),
    )
    if validate_every is None:
        feed = Epochs(source, epochs=epochs, steps=_data.limited_steps(steps_per_epoch))
    else:
        feed = Rounds(source, passes=epochs, steps=validate_every, most=max_steps)
    with _closed_after_failure(feed):
        _build(model, feed.first_batch)
        feed.restart()
        callbacks = _callback_list(model, callbacks, verbose, feed, add_history=True)
        validate, planned = _validation(
            model,
            validation_data,
            callbacks,
            batch_size=validation_batch_size or batch_size,
            steps=validation_steps,
            frequency=validation_freq,
            epochs=(initial_epoch, feed.epochs),
            stride=stride,
        )
    run = _loop.Run(
        model=model,
        step=_step.run,
        feed=feed,
        callbacks=callbacks,
        stride=stride,
        max_steps=max_steps,
        max_compiles=max_compiles,
        donate=donate,
        snapshot=snapshot,
    )
    _loop.train(run, initial_epoch=initial_epoch, validate=validate, validation=planned)
    return model.history


def evaluate(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    steps_per_execution: int | None = None,
) -> Any:
    """Evaluate a compiled Keras model; every argument means what it means in Keras.

    Weights are never given up to a running step.

    Args:
        model, x, y, sample_weight, batch_size: as in `fit`.
        steps: the number of batches, all if None.
        return_dict: return name -> number rather than the numbers in the metrics' order.

    Returns:
        The loss and metrics as `keras.Model.evaluate` returns them.

    Raises:
        StateError, DataError, ValueError: as `fit` does.
    """
    _trainer.check_model(model, "evaluate")
    _trainer.check_compiled(model, "evaluate")
    feed = x if isinstance(x, Epochs) else _one_epoch(x, y, sample_weight, batch_size, steps)
    stride = _stride(model, steps_per_execution)
    logs = _evaluate_feed(model, feed, verbose=verbose, callbacks=callbacks, stride=stride)
    return logs if return_dict else _trainer.as_list(model, logs)


def _one_epoch(
    x: Any, y: Any, sample_weight: Any, batch_size: int | None, steps: int | None
) -> Epochs:
    source = _data.source(x, y, sample_weight, batch_size=batch_size, steps=steps)
    return Epochs(source, steps=_data.limited_steps(steps))


def _evaluate_feed(
    model: Any, feed: Epochs, *, verbose: Any, callbacks: Any, stride: int
) -> dict[str, Any]:
    """Evaluate on batches that are there already; returns the logs."""
    with _closed_after_failure(feed):
        _build(model, feed.first_batch)
        feed.restart()
        callbacks = _callback_list(model, callbacks, verbose, feed)
    return _loop.test(
        _loop.Run(model=model, step=_step.run, feed=feed, callbacks=callbacks, stride=stride)
    )


def predict(
    model: Any,
    x: Any,
    *,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
    steps_per_execution: int | None = None,
) -> Any:
    """Predict with a Keras model, compiled or not; every argument means what it means in Keras.

    Args:
        model: a built or buildable `keras.Model`.
        x, batch_size: as in `fit`.
        steps: the number of batches, all if None.

    Returns:
        NumPy arrays in the structure of the model's outputs, one row for each row of `x`.

    Raises:
        StateError, DataError, ValueError: as `fit` does.
    """
    _trainer.check_model(model, "predict")
    stride = _stride(model, steps_per_execution)
    feed = _one_epoch(x, None, None, batch_size, steps)
    with _closed_after_failure(feed):
        if _build_for_prediction(model, feed.first_batch):
            feed.restart()
        callbacks = _callback_list(model, callbacks, verbose, feed)
    return _loop.predict(
        _loop.Run(model=model, step=_step.run, feed=feed, callbacks=callbacks, stride=stride)
    )


def steps(
    model: Any,
    data: Any,
    *,
    epochs: int = 1,
    batch_size: int | None = None,
    steps_per_epoch: int | None = None,
    shuffle: Any = True,
    class_weight: Any = None,
    max_steps: int | None = None,
    donate: bool = True,
    snapshot: bool = True,
) -> Iterator[dict[str, Any]]:
    """Train step by step in a loop of your own.

    Each `next` draws one batch and makes one step, by the program that `fit` would run one step
    at a time with. Between two steps the model is live: reading it, assigning to it, evaluating
    it or saving it are all fine. Metrics start anew with each epoch, and with each
    `model.reset_metrics()` of yours.

    Args:
        model: a compiled `keras.Model`.
        data: arrays as a tuple `(x,)`, `(x, y)` or `(x, y, sample_weight)`, a source of batches
            as `fit` takes it, or any iterable of such tuples, each a batch. A generator or
            another iterator is asked for a batch only when a step needs one, so a batch may
            depend on the steps before it.
        epochs, batch_size, steps_per_epoch, shuffle, class_weight, max_steps, donate, snapshot:
            as in `fit`.

    Yields:
        The logs of the step, name -> scalar `jax.Array`, which may still be being computed. They
        are those of the model's `train_step`: with the default one, running means of the epoch.

    Raises:
        StateError, DataError, ValueError: as `fit` does.

    Example:
        >>> import fitstep as fs, keras, numpy as np
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> x, y = np.ones((64, 3)), np.ones((64, 1))
        >>> for logs in fs.steps(model, (x, y), batch_size=32, epochs=2):
        ...     if float(logs["loss"]) < 0.01:
        ...         break
    """
    _trainer.check_model(model, "steps")
    _trainer.check_compiled(model, "steps")
    _check_numbers_of_fit(epochs, 0)
    _check_count("max_steps", max_steps)
    if isinstance(data, tuple):
        x, y, sample_weight = _data.as_arrays(keras.utils.unpack_x_y_sample_weight(data))
    else:
        x, y, sample_weight = _data.iterated(data), None, None
    source = _data.source(
        x,
        y,
        sample_weight,
        batch_size=batch_size,
        steps=steps_per_epoch,
        shuffle=shuffle and _data.is_shuffled_by_rows(x, y, sample_weight),
        class_weight=class_weight,
        rng=lambda: _shuffler(model),
    )
    feed = Epochs(source, epochs=epochs, steps=_data.limited_steps(steps_per_epoch), warns=False)
    with _closed_after_failure(feed):
        _build(model, feed.first_batch)
        feed.restart()
    return _loop.steps(
        _loop.Run(
            model=model,
            step=_step.run,
            feed=feed,
            callbacks=None,
            max_steps=max_steps,
            donate=donate,
            snapshot=snapshot,
        )
    )


def train_on_batch(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Any = None,
    return_dict: bool = False,
) -> Any:
    """One update on one batch, as `keras.Model.train_on_batch`."""
    _trainer.check_model(model, "train_on_batch")
    _trainer.check_compiled(model, "train_on_batch")
    if class_weight is not None:
        if sample_weight is not None:
            raise ValueError(
                "`train_on_batch` takes `sample_weight` or `class_weight`, not both. "
                f"Received: sample_weight={sample_weight}, class_weight={class_weight}"
            )
        sample_weight = _data.class_weights_as_sample_weights(y, class_weight)
    batch = _data.own((x, y, sample_weight))
    return _one_batch(model, "train", batch, return_dict)


def evaluate_on_batch(
    model: Any, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
) -> Any:
    """Evaluate on one batch, as `keras.Model.test_on_batch`."""
    _trainer.check_model(model, "test_on_batch")
    _trainer.check_compiled(model, "test_on_batch")
    return _one_batch(model, "test", _data.own((x, y, sample_weight)), return_dict)


def predict_on_batch(model: Any, x: Any) -> Any:
    """Predict on one batch, as `keras.Model.predict_on_batch`."""
    _trainer.check_model(model, "predict_on_batch")
    batch = _data.own((x,))
    _build_for_prediction(model, lambda: batch)
    return _loop.on_batch(model, _step.run, "predict", batch)


def _one_batch(model: Any, mode: str, batch: Any, return_dict: bool) -> Any:
    _data.check_numbers(batch)
    _build(model, lambda: batch)
    model.reset_metrics()
    logs = _loop.on_batch(model, _step.run, mode, batch)
    return logs if return_dict else _trainer.as_list(model, logs)


@contextmanager
def _closed_after_failure(feed: Epochs | Rounds) -> Iterator[None]:
    """Until the loop has taken the feed over, a failure must not leave its workers behind."""
    try:
        yield
    except BaseException:
        feed.close()
        raise


def _build(model: Any, first_batch: Callable[[], Any]) -> None:
    check_devices(model)
    # The batch is drawn before: the user's source may take long, or use the model itself.
    batch = first_batch() if _trainer.needs_batch(model) else None
    if batch is not None or _trainer.needs_slots(model):
        with alone(model):
            _trainer.build(model, batch)


def _build_for_prediction(model: Any, first_batch: Callable[[], Any]) -> bool:
    """Build what prediction needs; returns whether a batch had to be looked at."""
    if not _trainer.needs_batch(model, for_prediction=True):
        return False
    batch = first_batch()
    with alone(model):
        _trainer.build_for_prediction(model, batch)
    return True


def _check_numbers_of_fit(epochs: Any, validation_split: Any) -> None:
    if not isinstance(epochs, int | np.integer):
        raise TypeError(f"`epochs` must be an integer. Received: {epochs!r}.")
    if validation_split and not 0 < validation_split < 1:
        raise ValueError(
            f"`validation_split` must be a share of the rows, >= 0 and < 1. "
            f"Received: {validation_split!r}."
        )


def _check_count(name: str, count: Any) -> None:
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise ValueError(f"`{name}` must be an integer >= 1. Received: {count!r}.")


def _check_rounds(
    validate_every: Any, steps_per_epoch: Any, validation_freq: Any, initial: Any
) -> None:
    if validate_every is None:
        return
    for name, value, default, instead in (
        ("validation_freq", validation_freq, 1, "Each round ends with a validation."),
        ("steps_per_epoch", steps_per_epoch, None, "Limit the run with `max_steps`."),
        ("initial_epoch", initial, 0, "It counts epochs, and with rounds there are none."),
    ):
        if value != default:
            raise ValueError(
                f"`validate_every` and `{name}` can't be combined. {instead} "
                f"Received: validate_every={validate_every}, {name}={value!r}."
            )


def _stride(model: Any, steps_per_execution: int | None) -> int:
    stride = model.steps_per_execution if steps_per_execution is None else steps_per_execution
    if not isinstance(stride, int | np.integer) or stride < 1:
        raise ValueError(f"`steps_per_execution` must be an integer >= 1. Received: {stride!r}.")
    return int(stride)


def _shuffler(model: Any) -> np.random.Generator:
    """Another order in each run of a model, the same again from the same global seed."""
    seed = _data.global_seed()
    if seed is None:
        return np.random.default_rng()
    return np.random.default_rng([seed, int(record_of(model).step.array)])


def _callback_list(
    model: Any,
    callbacks: Any,
    verbose: Any,
    feed: Epochs | Rounds,
    *,
    add_history: bool = False,
) -> Any:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    for callback in keras.tree.flatten(callbacks):
        if callback is not None and not hasattr(callback, "set_model"):
            raise TypeError(
                f"`callbacks` must hold instances of `keras.callbacks.Callback`. "
                f"Received: {callback!r:.80} of type {type(callback).__name__}."
            )
    return keras.callbacks.CallbackList(
        callbacks,
        add_history=add_history,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=feed.epochs,
        steps=feed.steps,
        model=model,
    )


def _validation(
    model: Any,
    data: Any,
    callbacks: Any,
    *,
    batch_size: int | None,
    steps: int | None,
    frequency: Any,
    epochs: tuple[int, float],
    stride: int,
) -> tuple[Callable[[int], dict[str, Any] | None], _loop.Run | None]:
    """The validation after an epoch: through the model's own `evaluate` where it has one.

    Returns:
        What validates, and the evaluation that it is going to be if that is known beforehand.
    """
    if data is None:
        return lambda epoch: None, None
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    cached: list[Any] = []

    def validate(epoch: int) -> dict[str, Any] | None:
        if not _trainer.is_validation_epoch(model, epoch, frequency):
            return None
        if not cached:
            cached.append(_one_epoch(x, y, sample_weight, batch_size, steps))
        if _trainer.is_stock(model, "evaluate"):
            return _evaluate_feed(model, cached[0], verbose=0, callbacks=callbacks, stride=stride)
        arguments: dict[str, Any] = {"batch_size": batch_size, "steps": steps}
        arguments |= {"x": x, "y": y, "sample_weight": sample_weight, "callbacks": callbacks}
        if not _trainer.has_engine(model):
            return model.evaluate(return_dict=True, **arguments)
        with _trainer.cached_validation(model, cached[0]) as cache:
            return model.evaluate(return_dict=True, **arguments, **cache)

    planned = None
    engine = _trainer.is_stock(model, "evaluate") or _trainer.has_engine(model)
    # A step of the user's own may read what is not there yet, such as a global variable.
    if engine and _trainer.is_stock(model, "test_step"):
        with suppress(Exception):  # wrong data is for the validation to refuse
            arrays = inputs, targets, weights = _data.as_arrays((x, y, sample_weight))
            if _data.can_convert_arrays(arrays) and _is_any_validated(model, epochs, frequency):
                cached.append(_one_epoch(inputs, targets, weights, batch_size, steps))
                planned = _loop.Run(
                    model=model, step=_step.run, feed=cached[0], callbacks=callbacks, stride=stride
                )
    return validate, planned


def _is_any_validated(model: Any, epochs: tuple[int, float], frequency: Any) -> bool:
    first, end = epochs
    coming = range(first, int(min(end, first + 10_000)))  # rounds may have no known end
    return any(_trainer.is_validation_epoch(model, epoch, frequency) for epoch in coming)
