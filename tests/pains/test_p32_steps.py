"""Pain 32: drive training batch by batch, in a loop of one's own, as reinforcement learning does.

The example: five steps of `fs.steps` are five of `train_on_batch`, and the bits are those of `fs.fit`.
"""

import contextlib
import itertools

import jax
import keras
import numpy as np
import pytest
from keras import layers

import fitstep as fs
from tests.pains import twins
from tests.pains.loops import BATCH, PAIRS, X, Y, numbers, plain, running_means, steps

pytestmark = pytest.mark.usefixtures("equal_programs_compiled_once")


CLOSE = {"rtol": 2e-5, "atol": 1e-6}  # two compilations of one step, in float32


def build(base=keras.Sequential, loss="mse"):
    keras.utils.set_random_seed(5)
    model = base([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dropout(0.2), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["mae"])
    return model


def test_the_logs_are_those_of_a_loop_by_hand_as_device_arrays():
    """Running means that start anew with each epoch; each a scalar `jax.Array`."""
    model = plain()
    logs = list(steps(model, epochs=2))
    assert all(isinstance(v, jax.Array) and v.shape == () for log in logs for v in log.values())
    expected, twin = running_means(PAIRS, 2)
    assert len(logs) == len(expected) == 8
    for got, want in zip(map(numbers, logs), expected, strict=True):
        assert got == pytest.approx(want, rel=2e-5)
    twins.assert_close(model.get_weights(), twin.get_weights())


@pytest.mark.parametrize("base", [keras.Sequential, fs.Sequential])
def test_the_weights_are_those_of_fit_to_the_bit(base):
    """The same seed, with dropout: not one bit of weights or optimizer differs from `fs.fit`."""
    model, twin = build(base), build(base)
    for _ in steps(model, epochs=2):
        pass
    fs.fit(twin, X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    twins.assert_same(twins.values_of(model), twins.values_of(twin))


def test_arrays_are_shuffled_alike():
    """With `shuffle=True` the order is that of `fs.fit` from the same seed."""
    model, twin = build(), build()
    for _ in steps(model, epochs=2, shuffle=True):
        pass
    fs.fit(twin, X, Y, batch_size=BATCH, epochs=2, verbose=0)
    twins.assert_same(model.get_weights(), twin.get_weights())


def test_the_model_is_live_between_steps(tmp_path):
    """Reading, assigning, another rate, evaluating, saving: as in a loop of `train_on_batch`."""
    model, twin = plain(), plain()
    kernel, other = model.layers[0].kernel, twin.layers[0].kernel
    for i, (logs, pair) in enumerate(zip(steps(model), PAIRS, strict=True)):
        means = numbers(logs)
        twin.train_on_batch(*pair)
        np.testing.assert_allclose(kernel.numpy(), other.numpy(), **CLOSE)
        kernel.assign(kernel.numpy() * 0.9)
        other.assign(other.numpy() * 0.9)
        model.optimizer.learning_rate = twin.optimizer.learning_rate = 0.05 / (i + 1)
        for evaluate in (fs.evaluate, keras.Model.evaluate):
            got = evaluate(model, X, Y, verbose=0)
            np.testing.assert_allclose(got, twin.evaluate(X, Y, verbose=0), **CLOSE)
        assert numbers(logs) == means
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        twins.assert_same(loaded.get_weights(), model.get_weights())
    twins.assert_close(model.get_weights(), twin.get_weights())


@pytest.mark.parametrize("evaluate", [fs.evaluate, keras.Model.evaluate])
def test_an_evaluation_between_steps_leaves_the_running_means_alone(evaluate):
    """The logs go on as if nothing had been evaluated."""
    got = []
    model = plain()
    for logs in steps(model, epochs=2):
        got.append(numbers(logs))
        evaluate(model, X * 3, Y, verbose=0)
        model.predict(X, verbose=0)
    assert got == list(map(numbers, steps(plain(), epochs=2)))


def test_metrics_that_the_loop_resets_start_anew():
    """The loop is the user's, so `model.reset_metrics()` between steps takes effect."""
    model, twin = plain(), plain()
    for logs, pair in zip(steps(model), PAIRS, strict=True):
        want = twin.train_on_batch(*pair, return_dict=True)
        assert numbers(logs) == pytest.approx(want, rel=2e-5)
        model.reset_metrics()


def test_a_layer_frozen_in_mid_loop_stands_still():
    """From the next step on, and it learns again once it is free."""
    model = plain()
    first, last = model.layers
    kernels = []
    for i, _ in enumerate(steps(model, epochs=2)):
        kernels.append((first.kernel.numpy(), last.kernel.numpy()))
        first.trainable = not 1 <= i < 4
    moved = [
        [bool(np.any(a != b)) for a, b in zip(one, two, strict=True)]
        for one, two in itertools.pairwise(kernels)
    ]
    assert moved == [[True, True], [False, True], [False, True], [False, True]] + [[True, True]] * 3


def test_a_loss_that_is_not_finite_does_not_end_the_loop():
    """What to do about it is for the loop to say."""
    x = X.copy()
    x[BATCH] = np.nan
    losses = [float(logs["loss"]) for logs in steps(plain(), (x, Y))]
    assert np.isfinite(losses).tolist() == [True, False, False, False]


def test_the_loop_prints_nothing(capsys):
    """Not a word, unless the loop says it."""
    with contextlib.closing(steps(plain(), epochs=2)) as run:
        list(run)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_averages_are_put_in_place_at_the_end_as_by_fit():
    """`use_ema`: of the whole loop, and not where the caller leaves it."""

    def built():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), "mse")
        return model

    x, y = np.ones((20, 3), "float32"), np.ones((20, 1), "float32")
    fitted, looped, left = built(), built(), built()
    fs.fit(fitted, x, y, batch_size=4, shuffle=False, verbose=0)
    list(fs.steps(looped, (x, y), batch_size=4, shuffle=False))
    for step, _ in enumerate(fs.steps(left, (x, y), batch_size=4, shuffle=False)):
        if step == 4:
            break
    np.testing.assert_array_equal(looped.get_weights()[0], fitted.get_weights()[0])
    assert (left.get_weights()[0] != fitted.get_weights()[0]).any()
