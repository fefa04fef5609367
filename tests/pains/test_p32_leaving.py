"""Pain 32: however a loop of one's own is left, the model has the steps that were made.

The example: a `break`, a Ctrl-C or a forgotten iterator after five steps.
"""

import gc
import os
import signal
import sys
import threading

import jax
import keras
import numpy as np
import pytest
from keras import layers

import fitstep as fs
from tests.pains import twins
from tests.pains.loops import BATCH, PAIRS, X, Y, numbers, plain, steps

pytestmark = pytest.mark.usefixtures("equal_programs_compiled_once")


def assert_whole(model):
    """The model is alive, no run holds on to it, and it can be trained."""
    twins.assert_alive(model)
    before = model.get_weights()
    history = fs.fit(model, X, Y, batch_size=BATCH, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert any(map(np.any, map(np.not_equal, before, model.get_weights())))


def leave_by_break(model):
    for i, _ in enumerate(steps(model, epochs=3)):
        if i == 4:
            break


def leave_by_an_error(model):
    with pytest.raises(ZeroDivisionError):
        for i, _ in enumerate(steps(model, epochs=3)):
            assert 1 / (4 - i)


def leave_by_closing(model):
    run = steps(model, epochs=3)
    for _ in range(5):
        next(run)
    run.close()
    assert list(run) == []


def leave_by_dropping(model):
    run = steps(model, epochs=3)
    for _ in range(5):
        next(run)
    del run
    gc.collect()


def leave_by_ctrl_c(model):
    with pytest.raises(KeyboardInterrupt):
        for i, _ in enumerate(steps(model, epochs=3)):
            if i == 4:
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(5)


def leave_by_an_error_of_the_source(model):
    def source():
        yield from PAIRS
        yield PAIRS[0]
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(steps(model, source()))


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_an_error,
        leave_by_closing,
        leave_by_dropping,
        leave_by_ctrl_c,
        leave_by_an_error_of_the_source,
    ],
)
def test_leaving_the_loop_keeps_all_steps_that_were_made(leave):
    """Five steps by hand are what the model has, whichever way the loop was left; it trains on."""
    model = plain()
    handler = signal.getsignal(signal.SIGINT)
    leave(model)
    assert signal.getsignal(signal.SIGINT) is handler
    twin = plain()
    for pair in [*PAIRS, PAIRS[0]]:
        twin.train_on_batch(*pair)
    twins.assert_close(twins.values_of(model), twins.values_of(twin))
    assert_whole(model)


def test_ctrl_c_inside_a_step_comes_once_the_step_is_written_back():
    """A signal from within the running program: the step is whole, and the loop can be caught."""
    keras.utils.set_random_seed(5)

    class Pressed(layers.Layer):
        presses = 0

        def call(self, inputs):
            def press(_):
                self.presses += 1
                if self.presses == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                return np.zeros((), "float32")

            zero = jax.pure_callback(press, jax.ShapeDtypeStruct((), "float32"), inputs[0, 0])
            return inputs + zero

    model = twins.counting_mlp(Pressed())
    x = np.ones((32, 5), "float32")
    made = 0
    with pytest.raises(KeyboardInterrupt):
        for logs in fs.steps(model, (x, x[:, :1]), batch_size=4, shuffle=False):
            float(logs["loss"])
            made += 1
    assert made < 8
    assert twins.count_of(model) == int(model.optimizer.iterations.numpy()) >= 3
    twins.assert_alive(model)


def test_a_suspended_loop_keeps_no_other_run_from_the_model():
    """An iterator that is left open: compiling anew, fitting and evaluating work as ever."""
    model = plain()
    run = steps(model, epochs=3)
    next(run)
    fs.fit(model, X, Y, batch_size=BATCH, verbose=0)
    model.compile(keras.optimizers.SGD(0.0, momentum=0.9), "mae", metrics=["mae"])
    error = np.abs(model.predict(X, verbose=0) - Y).mean()
    history = fs.fit(model, X, Y, batch_size=BATCH, verbose=0).history
    np.testing.assert_allclose(history["loss"], [error], rtol=1e-5)
    np.testing.assert_allclose(fs.evaluate(model, X, Y, verbose=0)[0], error, rtol=1e-5)
    run.close()
    np.testing.assert_allclose(fs.evaluate(model, X, Y, verbose=0)[0], error, rtol=1e-5)


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_two_loops_at_once_go_their_own_ways(first_ends_first):
    """Interleaved over two models, 60 steps: weights as alone, and Ctrl-C is as it was before."""
    handler, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    models = plain(), plain()
    runs = [steps(model, epochs=15) for model in models]
    for _ in zip(*(runs if first_ends_first else runs[::-1]), strict=True):
        depth, front = 0, signal.getsignal(signal.SIGINT)
        while hasattr(front, "handler"):
            depth, front = depth + 1, front.handler
        assert depth <= 2
    (runs[0] if first_ends_first else runs[1]).close()
    (runs[1] if first_ends_first else runs[0]).close()
    assert signal.getsignal(signal.SIGINT) is handler
    assert sys.unraisablehook is hook
    alone = plain()
    for _ in steps(alone, epochs=15):
        pass
    twins.assert_same(models[0].get_weights(), alone.get_weights())
    twins.assert_same(models[1].get_weights(), alone.get_weights())


def test_two_loops_over_one_model_share_its_weights_but_not_their_means():
    """As two callers of `train_on_batch` would; each has running means of its own."""
    model, twin = plain(), plain()
    got, want = [], []
    for (first, second), pair in zip(
        zip(steps(model), steps(model), strict=True), PAIRS, strict=True
    ):
        got.append([numbers(first)["loss"], numbers(second)["loss"]])
        want.append([twin.train_on_batch(*pair)[0], twin.train_on_batch(*pair)[0]])
    rows = np.array([len(x) for x, _ in PAIRS])[:, None]
    np.testing.assert_allclose(got, np.cumsum(want * rows, 0) / np.cumsum(rows, 0), rtol=2e-5)
    twins.assert_close(model.get_weights(), twin.get_weights())


@pytest.mark.parametrize("change", ["compile", "optimizer"])
def test_a_model_that_is_compiled_anew_in_mid_loop_is_an_error(change):
    """What runs is made for the optimizer and loss before; the weights are those of the steps made."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    loop = fs.steps(model, (np.ones((20, 3)), np.ones((20, 1))), batch_size=4)
    next(loop)
    weights = model.get_weights()
    if change == "compile":
        model.compile("sgd", "mae")
    else:
        model.optimizer = keras.optimizers.SGD()
    with pytest.raises(fs.StateError, match="compiled anew"):
        next(loop)
    for a, b in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    model.compile("sgd", "mae")
    fs.fit(model, np.ones((20, 3)), np.ones((20, 1)), verbose=0)


def test_a_callback_that_compiles_the_model_ends_the_fit_with_an_error():
    """Keras's own fit fails there, too, with another exception."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    hook = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.compile("sgd", "mae")
    )
    with pytest.raises(fs.StateError, match="compiled anew"):
        fs.fit(model, np.ones((20, 3)), np.ones((20, 1)), epochs=2, callbacks=[hook], verbose=0)
