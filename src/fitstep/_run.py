"""`Run`: one training run as a value, what an experiment's `build(config)` returns."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Run:
    """One training run: a compiled model, its data, and how long to train.

    An experiment is a Python file with a frozen dataclass `Config` and a function
    `build(config)` that returns one `Run`, or a dict of them by name (folds, arms). A value of
    the dict may also be a function without arguments that returns a `Run`: it is called when its
    turn comes, so that models and seeds are made one after the other, not all at the start.

    Args:
        model: a compiled `keras.Model`, with or without a training step of its own.
        x: the training data: arrays, or whatever else `keras.Model.fit` takes.
        y: the targets, where `x` does not hold them already.
        sample_weight: a weight for each row of `x`.
        validation_data: `(x, y)` or `(x, y, sample_weight)` or a data set, evaluated after each
            epoch.
        test_data: the same, evaluated once at the end with the trained model. The figures go to
            `Result.test` and the run folder; training never sees them.
        batch_size: rows per step. `None` is Keras's default; a data set makes its own batches.
        epochs: passes over the data, at most (a callback may stop earlier). At least 1.
        callbacks: Keras callbacks.
        class_weight: class -> weight of its rows in the loss.
        shuffle: whether the rows of arrays are shuffled before each epoch.
        steps_per_epoch: steps that make an epoch. `None`: until the data is exhausted.
        validation_steps: steps of a validation. `None`: until the data is exhausted.

    Raises:
        TypeError: if `model` is no `keras.Model` or a callback no Keras callback.
        ValueError: if `model` is not compiled or a number is out of range.

    Example:

        def build(config):
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("adam", "mse")
            return fs.Run(model, x, y, epochs=config.epochs)
    """

    model: Any
    x: Any = field(repr=False)
    y: Any = field(default=None, repr=False)
    _: KW_ONLY
    sample_weight: Any = field(default=None, repr=False)
    validation_data: Any = field(default=None, repr=False)
    test_data: Any = field(default=None, repr=False)
    batch_size: int | None = 32
    epochs: int = 1
    callbacks: Sequence[Any] = ()
    class_weight: Mapping[int, float] | None = None
    shuffle: bool = True
    steps_per_epoch: int | None = None
    validation_steps: int | None = None

    def __post_init__(self) -> None:
        _check_model(self.model)
        _check_count("epochs", self.epochs)
        for name in ("batch_size", "steps_per_epoch", "validation_steps"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        object.__setattr__(self, "callbacks", _checked_callbacks(self.callbacks))


@dataclass(frozen=True, eq=False)
class Result:
    """What a run of an experiment gave; `report(config, results)` gets one for each name.

    Args:
        name: the run's name in the dict of `build`, or `"run"` where it returned a single one.
        run: the run itself; `run.model` is trained by now.
        history: name of a loss or metric -> its value after each epoch.
        test: name -> value on `run.test_data`, or `None` where the run has none.
    """

    name: str
    run: Run
    history: Mapping[str, list[float]]
    test: Mapping[str, float] | None


def _check_model(model: Any) -> None:
    import keras  # not at the top: `fitstep --help` must not wait for it

    if not isinstance(model, keras.Model):
        raise TypeError(f"`Run(model=...)` must be a keras.Model. Received: {_short(model)}.")
    if not model.compiled:
        raise ValueError(
            "`Run(model=...)` must be compiled: call `model.compile(...)` before `Run(...)`. "
            f"Received: model={model.name!r}, which is not."
        )


def _check_count(name: str, value: Any) -> None:
    # A NumPy integer is as good as Python's; a bool or 2.0 is a slip of the pen.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"`Run({name}=...)` must be an integer. Received: {name}={_short(value)}.")
    if value < 1:
        raise ValueError(f"`Run({name}=...)` must be >= 1. Received: {name}={value}.")


def _checked_callbacks(callbacks: Any) -> tuple[Any, ...]:
    import keras

    if not isinstance(callbacks, Sequence):
        raise TypeError(
            "`Run(callbacks=...)` must be a list or tuple of Keras callbacks. "
            f"Received: callbacks={_short(callbacks)}."
        )
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise TypeError(
                "`Run(callbacks=...)` must hold instances of keras.callbacks.Callback. "
                f"Received: {_short(callback)}."
            )
    return tuple(callbacks)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
