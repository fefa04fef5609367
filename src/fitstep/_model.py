"""fitstep's engine behind Keras's own methods: the mixin `Trainer`, and `Model`, `Sequential`.

`Model(inputs, outputs)` is functional just as `keras.Model(inputs, outputs)` is. Keras gets there
by rewriting the bases of the class, which would change `Model` itself for good and break every
later subclass, so the two constructors here choose the class themselves.
"""

from typing import Any

import keras

from fitstep import _fit
from fitstep._keras import _saving, _trainer
from fitstep._keras._trainer import StockTrainer


class Trainer(StockTrainer):
    """A mixin that gives a Keras model fitstep's `fit`, `evaluate` and `predict`.

    The methods have Keras's signatures; the keyword-only arguments beyond them are those of
    `fitstep.fit`.

    Example:
        >>> class Classifier(Trainer, keras.Model):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.dense = keras.layers.Dense(1)
        ...
        ...     def call(self, x):
        ...         return self.dense(x)
    """

    def fit(
        self,
        x: Any = None,
        y: Any = None,
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
        *,
        validate_every: int | None = None,
        max_steps: int | None = None,
        max_compiles: int | None = None,
        steps_per_execution: int | None = None,
        donate: bool = True,
        snapshot: bool = True,
    ) -> keras.callbacks.History:
        """Train the model: see `fitstep.fit`."""
        return _fit.fit(
            self,
            x,
            y,
            batch_size=batch_size,
            epochs=epochs,
            verbose=verbose,
            callbacks=callbacks,
            validation_split=validation_split,
            validation_data=validation_data,
            shuffle=shuffle,
            class_weight=class_weight,
            sample_weight=sample_weight,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
            validation_freq=validation_freq,
            validate_every=validate_every,
            max_steps=max_steps,
            max_compiles=max_compiles,
            steps_per_execution=steps_per_execution,
            donate=donate,
            snapshot=snapshot,
        )

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        *,
        steps_per_execution: int | None = None,
        _use_cached_eval_dataset: bool = False,
    ) -> Any:
        """Evaluate the model: see `fitstep.evaluate`."""
        cached = _trainer.validation_batches(self) if _use_cached_eval_dataset else None
        return _fit.evaluate(
            self,
            x if cached is None else cached,
            y,
            batch_size=batch_size,
            verbose=verbose,
            sample_weight=sample_weight,
            steps=steps,
            callbacks=callbacks,
            return_dict=return_dict,
            steps_per_execution=steps_per_execution,
        )

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
        *,
        steps_per_execution: int | None = None,
    ) -> Any:
        """Predict with the model: see `fitstep.predict`."""
        return _fit.predict(
            self,
            x,
            batch_size=batch_size,
            verbose=verbose,
            steps=steps,
            callbacks=callbacks,
            steps_per_execution=steps_per_execution,
        )

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile a loaded model as Keras does, also one that has no `call`."""
        super().compile_from_config(config)
        _trainer.build_optimizer_without_call(self)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Make one update on one batch, as `keras.Model.train_on_batch` does."""
        return _fit.train_on_batch(self, x, y, sample_weight, class_weight, return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Evaluate on one batch, as `keras.Model.test_on_batch` does."""
        return _fit.evaluate_on_batch(self, x, y, sample_weight, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Predict on one batch, as `keras.Model.predict_on_batch` does."""
        return _fit.predict_on_batch(self, x)


@_saving.registered
class Model(Trainer, keras.Model):
    """`keras.Model` with fitstep's engine: functional, or a base class for subclasses."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Model and _saving.is_functional(args, kwargs):
            return FunctionalModel.__new__(FunctionalModel, *args, **kwargs)
        return super().__new__(cls)

    # Keras's `from_config` recognises a functional constructor by these two names.
    def __init__(self, *args: Any, **kwargs: Any):
        if isinstance(self, _saving.Functional):
            if type(self) is FunctionalModel:
                kwargs = _saving.named(args, kwargs)
            _saving.Functional.__init__(self, *args, **kwargs)
        elif _saving.is_functional(args, kwargs):
            _saving.make_functional(type(self), Model, FunctionalModel)
            _saving.Functional.__init__(self, *args, **kwargs)
        else:
            keras.Model.__init__(self, *args, **kwargs)


@_saving.registered
class FunctionalModel(Model, _saving.Functional):
    """What `Model(inputs, outputs)` makes."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _saving.Functional.__new__(cls, *args, **kwargs)


@_saving.registered
class Sequential(Trainer, keras.Sequential):
    """`keras.Sequential` with fitstep's engine."""
