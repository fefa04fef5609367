"""What one run leaves for the next: nothing of a failure, of a callback's change, of another setting."""

import jax
import keras
import numpy as np
import pytest
from keras import callbacks, layers

import fitstep as fs

X = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
Y = X[:, :1]


class Scaled(keras.Sequential):
    """Logs an attribute, which a trace takes in as it is then."""

    alpha = 1.0

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {**logs, "alpha": self.alpha * keras.ops.ones(())}, state


def _build(cls=Scaled):
    keras.utils.set_random_seed(1)
    model = cls([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def _alpha(model, *hooks):
    return fs.fit(model, X, Y, callbacks=list(hooks), verbose=0).history["alpha"]


class Items(keras.utils.PyDataset):
    """Two batches, and a failure when an epoch ends."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X[:4], Y[:4]

    def on_epoch_end(self):
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyboardInterrupt()], ids=repr)
def test_data_that_fails_while_a_failed_run_ends_leaves_no_run_behind(error):
    """The next run sees what has changed on the model since."""
    model, data = _build(), Items(None)

    def fail(epoch, logs):
        data.error = error
        raise RuntimeError("a callback fails")

    with pytest.raises((RuntimeError, OSError, KeyboardInterrupt)):
        fs.fit(model, data, callbacks=[callbacks.LambdaCallback(on_epoch_end=fail)], verbose=0)
    assert _alpha(model) == [1.0]
    model.alpha = 5.0
    assert _alpha(model) == [5.0]


def test_what_a_callback_changes_for_one_run_is_not_compiled_into_the_next():
    """A step is traced after `on_train_begin`; what it found there is forgotten with the run."""
    model = _build()

    def to(value):
        def change(logs):
            model.alpha = value

        return change

    hook = callbacks.LambdaCallback(on_train_begin=to(2.0), on_train_end=to(1.0))
    assert _alpha(model, hook) == [2.0]
    assert _alpha(model) == [1.0]
    traced = len(fs.explain(model).programs)
    assert _alpha(model) == [1.0]
    assert len(fs.explain(model).programs) == traced


def test_another_generator_of_random_numbers_is_another_program():
    """As JAX's own `jit` compiles anew for it."""

    class Draws(keras.Sequential):
        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {**logs, "draw": jax.random.uniform(jax.random.key(0))}, state

    model = _build(Draws)

    def draw():
        return fs.fit(model, X, Y, verbose=0).history["draw"]

    usual = draw()
    with jax.default_prng_impl("rbg"):
        other = float(jax.random.uniform(jax.random.key(0)))
        np.testing.assert_allclose(draw(), [other], rtol=1e-6)  # a float32 mean of equal numbers
    assert draw() == usual != [other]
    causes = [one.cause for one in fs.explain(model).programs]
    assert "changed: `jax_default_prng_impl`" in causes


@pytest.mark.parametrize("snapshot", [True, False])
def test_an_array_that_a_callback_assigns_again_and_again_stays_its_own(snapshot):
    """The step is given a copy, also where no snapshot is taken."""
    model = _build(keras.Sequential)
    kernel = model.layers[0].kernel
    saved = jax.numpy.asarray(kernel.numpy() * 0.5)
    weights = []

    def assign(epoch, logs):
        kernel.assign(saved)

    def note(epoch, logs):
        weights.append(kernel.numpy())

    hook = callbacks.LambdaCallback(on_epoch_begin=assign, on_epoch_end=note)
    fs.fit(model, X, Y, epochs=4, shuffle=False, callbacks=[hook], verbose=0, snapshot=snapshot)
    assert not saved.is_deleted()
    reference = _build(keras.Sequential)
    for epoch, weight in enumerate(weights):
        reference.layers[0].kernel.assign(saved)
        fs.fit(reference, X, Y, shuffle=False, verbose=0)
        np.testing.assert_array_equal(weight, reference.layers[0].kernel.numpy(), str(epoch))


def test_a_remainder_of_one_step_needs_no_program_of_its_own():
    """17 steps are 16 and one, in one program for 16 steps or fewer."""
    model = _build(keras.Sequential)
    x = np.ones((17 * 4, 3), "float32")
    for options in ({"max_steps": 17}, {"steps_per_execution": 17, "epochs": 2}):
        fs.fit(model, x, x[:, :1], batch_size=4, verbose=0, **options)
    assert [one.steps for one in fs.explain(model).programs] == [16]


def test_a_source_whose_steps_take_long_is_compiled_for_once(monkeypatch):
    """Its second pass does not begin with a batch that is not stacked."""
    from fitstep.engine import _runner

    monkeypatch.setattr(_runner, "LONGEST", 0.0)
    model, data = _build(keras.Sequential), Items(None)
    fs.fit(model, data, epochs=3, verbose=0)
    assert len(fs.explain(model).programs) == 1
