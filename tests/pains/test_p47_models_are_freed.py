"""Pain 47: models fitted in one process are freed with everything that was compiled for them.

The example: keras#20552, a loop that builds, fits and forgets models.
"""

import gc
import logging
import weakref

import jax
import keras
import numpy as np
import pytest
from jax import numpy as jnp
from keras import layers

import fitstep as fs

X = np.ones((10, 3), "float32")
Y = np.ones((10, 1), "float32")


class WithSteps(keras.Model):
    """A subclass with its own steps and an extra log."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x, training=False):
        return self.dense(x)

    def train_step(self, state, data):
        tv, ntv, ov, mv = state
        x, y = data

        def loss_of(tv):
            y_pred, _ = self.stateless_call(tv, ntv, x, training=True)
            return self.compute_loss(x, y, y_pred)

        loss, grads = jax.value_and_grad(loss_of)(tv)
        tv, ov = self.optimizer.stateless_apply(ov, grads, tv)
        return {"loss": loss, "mean_x": jnp.mean(x)}, (tv, ntv, ov, mv)

    def test_step(self, state, data):
        logs, state = super().test_step(state, data)
        return {**logs, "one": jnp.ones(())}, state


class Failing(WithSteps):
    def train_step(self, state, data):
        raise ArithmeticError("my own")


def sequential():
    return keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.Dense(1)])


def functional():
    inputs = keras.Input((3,))
    return keras.Model(inputs, layers.Dense(1)(layers.BatchNormalization()(inputs)))


def ours():
    return fs.Sequential([keras.Input((3,)), layers.Dropout(0.5), layers.Dense(1)])


def compiled(model, **kwargs):
    model.compile("adam", "mse", metrics=["mae"], **kwargs)
    return model


def worked(kind, **kwargs):
    """Fit, evaluate and predict a model, and return weak references to it and what hangs on it."""
    model = compiled(kind(), **kwargs)
    history = fs.fit(model, X, Y, batch_size=5, epochs=2, verbose=0)
    fs.evaluate(model, X, Y, batch_size=5, verbose=0)
    fs.predict(model, X, batch_size=5, verbose=0)
    state = fs.capture(model)
    parts = [model, model.optimizer, model.layers[0], history, *model.trainable_variables]
    assert len(state.trainable) == len(model.trainable_variables)
    return [weakref.ref(part) for part in parts]


def alive(references):
    gc.collect()
    return [type(reference()).__name__ for reference in references if reference() is not None]


@pytest.fixture(autouse=True, scope="module")
def _nothing_compiled_before():
    """JAX's caches, full after many other tests, drop an old program for each new one."""
    jax.clear_caches()


KINDS = [sequential, functional, ours, WithSteps]


@pytest.mark.parametrize("kind", KINDS)
def test_a_forgotten_model_is_freed(kind):
    """After fit, evaluate, predict and capture nothing holds the model, its optimizer or its layers."""
    assert alive(worked(kind)) == []


@pytest.mark.parametrize("how", [{"run_eagerly": True}, {"steps_per_execution": 3}])
def test_a_forgotten_model_is_freed_however_its_steps_were_run(how):
    """Also without a compiler, and with several steps an execution."""
    assert alive(worked(WithSteps, **how)) == []


def executables():
    gc.collect()
    return len(jax.local_devices()[0].client.live_executables())


def buffers():
    gc.collect()
    return len(jax.live_arrays())


@pytest.mark.parametrize("kind", [sequential, WithSteps])
@pytest.mark.parametrize(
    ("how", "states"),
    [({}, 2), ({"snapshot": False}, 1), ({"donate": False}, 1)],
    ids=["default", "without snapshot", "without donation"],
)
def test_a_running_fit_holds_one_state_and_one_snapshot(kind, how, states):
    """After each step as many kernels are alive as Adam has of a shape, times the states kept."""
    gc.collect()
    others = jax.live_arrays()  # whoever else keeps them
    known = set(map(id, others))
    model = compiled(kind())
    model(X)
    layer = model.layers[-1]
    counts = []

    def count(batch, logs):
        kernels = [array for array in jax.live_arrays() if array.shape == layer.kernel.shape]
        counts.append(sum(id(array) not in known for array in kernels))

    gc.disable()  # what only the collector would free is not free when the next epoch needs it
    try:
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=count)
        fs.fit(model, X, Y, batch_size=5, epochs=3, verbose=0, callbacks=[callback], **how)
    finally:
        gc.enable()
    assert counts[2:] == [3 * states] * 4


@pytest.mark.parametrize("kind", [sequential, WithSteps])
def test_programs_and_arrays_go_with_the_models(kind):
    """Three more models leave as many compiled programs and device arrays as there were before."""
    worked(kind)  # what JAX and Keras compile once for all models
    programs, arrays = executables(), buffers()
    during = []
    for _ in range(3):
        worked(kind)
        during.append((executables() - programs, buffers() - arrays))
    assert during == [(0, 0)] * 3


def test_programs_are_there_while_the_model_is():
    """The count of programs that the test above relies on does see those of a living model."""
    worked(sequential)
    before = executables()
    model = compiled(sequential())
    fs.fit(model, X, Y, verbose=0)
    assert executables() > before
    del model
    assert executables() == before


def test_a_failure_in_the_step_holds_nothing():
    """The exception itself forgotten, a model whose step failed is freed."""

    def failed():
        model = compiled(Failing())
        with pytest.raises(ArithmeticError, match="my own"):
            fs.fit(model, X, Y, verbose=0)
        return [weakref.ref(model), weakref.ref(model.optimizer)]

    assert alive(failed()) == []


def test_a_failure_in_a_callback_in_the_data_or_at_run_time_holds_nothing():
    """Models whose fit ended early, for reasons outside and inside the program, are freed."""

    def in_callback():
        def stop(batch, logs):
            raise KeyboardInterrupt

        model = compiled(WithSteps())
        with pytest.raises(KeyboardInterrupt):
            fs.fit(
                model, X, Y, batch_size=4, verbose=0,
                callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)],
            )  # fmt: skip
        return model

    def in_data():
        def source():
            yield X, Y
            raise OSError("the disk")

        model = compiled(sequential())
        with pytest.raises(OSError, match="the disk"):
            fs.fit(model, source(), steps_per_epoch=3, shuffle=False, verbose=0)
        return model

    def at_run_time():
        def bang(value):
            if bang.calls == 2:
                raise RuntimeError("at run time")
            bang.calls += 1
            return np.asarray(value)

        bang.calls = 0

        class Bomb(WithSteps):
            def call(self, x, training=False):
                x = jax.lax.stop_gradient(
                    jax.pure_callback(bang, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
                )
                return self.dense(x)

        model = compiled(Bomb())
        model.dense.build((None, 3))
        model.built = True
        logging.disable()  # JAX logs the error, and pytest keeps what is logged, traceback and all
        try:
            with pytest.raises(Exception, match="at run time"):
                fs.fit(model, X, Y, batch_size=2, verbose=0)
        finally:
            logging.disable(logging.NOTSET)
        return model

    for fail in (in_callback, in_data, at_run_time):
        model = fail()
        reference = weakref.ref(model)
        del model
        assert alive([reference]) == [], fail.__name__


def test_what_a_callback_keeps_is_all_that_is_kept():
    """A callback that outlives its model keeps the model as in Keras; letting go of it frees it."""
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)
    model = compiled(sequential())
    reference = weakref.ref(model)
    fs.fit(model, X, Y, verbose=0, callbacks=[callback])
    del model
    assert callback.model is reference()
    del callback
    assert alive([reference]) == []


def test_recompiling_the_same_model_drops_the_old_programs():
    """Compiling and fitting one model again and again doesn't pile up programs."""
    model = sequential()
    counts = []
    for _ in range(3):
        compiled(model)
        fs.fit(model, X, Y, verbose=0)
        counts.append(executables())
    assert counts[2] <= counts[1]
