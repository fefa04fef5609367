"""The validation's program is compiled while the first epoch trains, and is the one it would need."""

import keras
import numpy as np
import pytest
from keras import layers

import fitstep as fs
from fitstep.engine import _runner

X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
Y = X[:, :1]


class Scaled(keras.Sequential):
    """A loss that an attribute scales in an evaluation, which a trace takes in as it is then."""

    scale = 1.0
    traces = 0
    is_built_on_a_batch = False  # which Keras does with `compute_loss`, too

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        if training or not self.is_built_on_a_batch:
            return loss
        self.traces += 1
        return self.evaluated(loss, x)

    def evaluated(self, loss, x):
        return self.scale * keras.ops.ones_like(loss)


def _build(cls=Scaled):
    keras.utils.set_random_seed(1)
    model = cls([keras.Input((6,)), layers.Dense(4, "relu"), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def _fit(model, *hooks, **options):
    options = {"epochs": 4, "validation_data": (X[:40], Y[:40]), "verbose": 0} | options

    def built(logs):
        model.is_built_on_a_batch = True

    hooks = [keras.callbacks.LambdaCallback(on_train_begin=built), *hooks]
    return fs.fit(model, X, Y, callbacks=hooks, **options).history


def test_it_is_traced_once_and_compiled_for_its_stack_and_its_partial_batch():
    """One trace for 32 rows and one for 8, over four validations."""
    model = _build()
    _fit(model)
    assert model.traces == 2
    assert [one.steps for one in fs.explain(model).programs if one.mode == "test"] == [16, 1]


@pytest.mark.parametrize("moment", ["on_epoch_end", "on_test_begin"])
@pytest.mark.parametrize("freq", [1, 2])
def test_what_changes_before_the_first_validation_counts(moment, freq):
    """The program made ahead of the change is not used."""
    model = _build()

    def change(*_, **__):
        model.scale = 5.0

    history = _fit(model, keras.callbacks.LambdaCallback(**{moment: change}), validation_freq=freq)
    # With `validation_freq=1`, `on_epoch_end` comes after the first validation, whose trace stays.
    expected = 1.0 if (moment, freq) == ("on_epoch_end", 1) else 5.0
    assert set(history["val_loss"]) == {expected}


def test_an_error_of_the_step_comes_with_the_validation():
    """Training goes on until then; the error is the step's own, and the weights are those trained."""

    class Raises(Scaled):
        def evaluated(self, loss, x):
            raise ValueError("this step is not written yet")

    model, trained = _build(Raises), _build()
    with pytest.raises(ValueError, match="not written yet"):
        _fit(model)
    _fit(trained, epochs=1)
    for a, b in zip(model.get_weights(), trained.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_a_failing_step_leaves_behind_is_not_blamed_on_training():
    """A traced value that is kept before an error is raised is gone before `train_step` is looked at."""

    class KeepsAndRaises(Scaled):
        kept = None

        def evaluated(self, loss, x):
            self.kept = x * 2
            raise ValueError("too early")

    model = _build(KeepsAndRaises)
    with pytest.raises(ValueError, match="too early"):
        _fit(model)
    assert model.kept is None
    assert int(model.optimizer.iterations) == 2  # the epoch before the validation


@pytest.mark.parametrize("own_step", [False, True])
@pytest.mark.parametrize("validation_freq", [1, 3])
def test_nothing_is_compiled_ahead_that_may_not_be_needed_or_not_be_right(
    own_step, validation_freq, monkeypatch
):
    """A step of the user's own may read what is not there yet; and some validations never come."""
    ahead = []
    compile_ahead = _runner.Runner.compile_ahead

    def noted(self, *args):
        ahead.append(args)
        return compile_ahead(self, *args)

    monkeypatch.setattr(_runner.Runner, "compile_ahead", noted)

    class Own(Scaled):
        def test_step(self, state, data):
            return super().test_step(state, data)

    _fit(_build(Own if own_step else Scaled), epochs=2, validation_freq=validation_freq)
    assert bool(ahead) == (not own_step and validation_freq == 1)
