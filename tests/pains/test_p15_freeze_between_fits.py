"""A layer frozen or thawed between two fits, without `compile`: it stands still, the others go on."""

import jax
import keras
import numpy as np
import pytest

import fitstep as fs
from tests.pains.twins import assert_alive

FIT = {"batch_size": 35, "epochs": 2, "verbose": 0, "shuffle": False}
RATE = 0.01


class ByHand:
    """Two or three linear layers without biases, trained by Adam or momentum in float64."""

    def __init__(self, weights, kind, decay=0.0):
        self.weights = [np.array(w, "float64") for w in weights]
        self.first = [np.zeros_like(w) for w in self.weights]
        self.second = [np.zeros_like(w) for w in self.weights]
        self.kind, self.decay, self.steps = kind, decay, 0

    def fit(self, x, y, frozen=(), epochs=2):
        for _ in range(epochs):
            for start in (0, 35):
                self.step(x[start : start + 35].astype("float64"), y[start : start + 35], frozen)

    def step(self, x, y, frozen):
        self.steps += 1
        inputs = [x]
        for weight in self.weights:
            inputs.append(inputs[-1] @ weight)
        back = 2.0 * (inputs[-1] - y) / len(x)
        gradients = []
        for weight, before in zip(reversed(self.weights), reversed(inputs[:-1]), strict=True):
            gradients.append(before.T @ back)
            back = back @ weight.T
        for i, gradient in enumerate(reversed(gradients)):
            if i in frozen:
                continue
            if self.kind == "sgd":
                self.first[i] = 0.9 * self.first[i] - RATE * gradient
                self.weights[i] = self.weights[i] + self.first[i]
                continue
            self.weights[i] = self.weights[i] * (1 - self.decay * RATE)
            self.first[i] += 0.1 * (gradient - self.first[i])
            self.second[i] += 0.001 * (gradient**2 - self.second[i])
            rate = RATE * np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
            self.weights[i] = self.weights[i] - rate * self.first[i] / (
                np.sqrt(self.second[i]) + 1e-7
            )


def guide_step(self, state, data):
    """The step of the public guide, with the optimizer's stock `stateless_apply`."""
    tv, ntv, ov, mv = state
    x, y = data

    def objective(tv):
        y_pred, new_ntv = self.stateless_call(tv, ntv, x, training=True)
        return self.compute_loss(x, y, y_pred), new_ntv

    (loss, ntv), grads = jax.value_and_grad(objective, has_aux=True)(tv)
    tv, ov = self.optimizer.stateless_apply(ov, grads, tv)
    return {"objective": loss}, (tv, ntv, ov, mv)


def made(kind="adam", wrap="plain", decay=0.0):
    keras.utils.set_random_seed(9)
    optimizer = {
        "adam": lambda: keras.optimizers.Adam(RATE),
        "adamw": lambda: keras.optimizers.AdamW(RATE, weight_decay=decay),
        "sgd": lambda: keras.optimizers.SGD(RATE, momentum=0.9),
    }[kind]()
    base = {"plain": keras.Sequential, "fs": fs.Sequential}.get(wrap, keras.Sequential)
    if wrap == "guide":
        base = type("Guided", (keras.Sequential,), {"train_step": guide_step})
    model = base(
        [
            keras.Input((5,)),
            keras.layers.Dense(4, use_bias=False, name="one"),
            keras.layers.Dense(3, use_bias=False, name="two"),
            keras.layers.Dense(1, use_bias=False, name="three"),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def kernels(model):
    return [np.array(layer.kernel.value) for layer in model.layers]


def fit(model, x, y, **kwargs):
    if isinstance(model, fs.Trainer):
        return model.fit(x, y, **(FIT | kwargs))
    return fs.fit(model, x, y, **(FIT | kwargs))


def assert_kernels(model, hand):
    for got, expected in zip(kernels(model), hand.weights, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("wrap", ["plain", "fs", "guide"])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_frozen_layer_stands_still_and_the_others_keep_their_moments(rows, kind, wrap, frozen):
    """After freezing one layer the others go on as NumPy goes on with their moments; thawed, it goes on, too."""
    x, y = rows
    model = made(kind, wrap)
    hand = ByHand(kernels(model), kind)
    fit(model, x, y)
    hand.fit(x, y)
    model.layers[frozen].trainable = False
    before = kernels(model)
    fit(model, x, y)
    hand.fit(x, y, {frozen})
    np.testing.assert_array_equal(kernels(model)[frozen], before[frozen])
    assert_kernels(model, hand)
    model.layers[frozen].trainable = True
    fit(model, x, y)
    hand.fit(x, y)
    assert_kernels(model, hand)
    assert int(model.optimizer.iterations.value) == 12
    assert_alive(model)


def test_a_layer_thawed_after_compile_is_named_with_the_remedy(rows):
    """An optimizer that was built without a layer has no slots for it; a new optimizer mends it."""
    x, y = rows
    model = made()
    model.layers[1].trainable = False
    fit(model, x, y)
    before = kernels(model)
    model.layers[1].trainable = True
    with pytest.raises(fs.OptimizerError, match=r"no slots for 'two/kernel'.*new optimizer"):
        fit(model, x, y)
    for kernel, was in zip(kernels(model), before, strict=True):
        np.testing.assert_array_equal(kernel, was)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    fit(model, x, y)
    assert not np.array_equal(kernels(model)[1], before[1])


def test_the_frozen_set_may_change_from_fit_to_fit(rows):
    """Each fit trains today's layers only, with the moments that they have."""
    x, y = rows
    model = made()
    hand = ByHand(kernels(model), "adam")
    fit(model, x, y)
    hand.fit(x, y)
    for trained in (0, 1, 2, 0):
        for i, layer in enumerate(model.layers):
            layer.trainable = i == trained
        before = kernels(model)
        fit(model, x, y)
        hand.fit(x, y, {0, 1, 2} - {trained})
        for i in {0, 1, 2} - {trained}:
            np.testing.assert_array_equal(kernels(model)[i], before[i])
        assert_kernels(model, hand)


def test_weight_decay_leaves_a_frozen_layer_alone(rows):
    """AdamW decays what it trains; a frozen kernel keeps its bits."""
    x, y = rows
    model = made("adamw", decay=0.1)
    hand = ByHand(kernels(model), "adam", decay=0.1)
    fit(model, x, y)
    hand.fit(x, y)
    model.layers[1].trainable = False
    before = kernels(model)
    fit(model, x, y)
    hand.fit(x, y, {1})
    np.testing.assert_array_equal(kernels(model)[1], before[1])
    assert_kernels(model, hand)


@pytest.mark.parametrize("options", [{"jit_compile": False}, {"run_eagerly": True}])
def test_freezing_works_without_xla(rows, options):
    """`run_eagerly` and `jit_compile=False` freeze just as the compiled step does."""
    x, y = rows
    model = made()
    model.compile(keras.optimizers.Adam(RATE), "mse", **options)
    hand = ByHand(kernels(model), "adam")
    fit(model, x, y)
    hand.fit(x, y)
    model.layers[0].trainable = False
    fit(model, x, y)
    hand.fit(x, y, {0})
    assert_kernels(model, hand)


def test_freezing_one_variable_works_as_freezing_a_layer(rows):
    """`variable.trainable = False` freezes that variable alone."""
    x, y = rows
    model = made()
    hand = ByHand(kernels(model), "adam")
    fit(model, x, y)
    hand.fit(x, y)
    model.layers[1].kernel.trainable = False
    before = kernels(model)
    fit(model, x, y)
    hand.fit(x, y, {1})
    np.testing.assert_array_equal(kernels(model)[1], before[1])
    assert_kernels(model, hand)


@pytest.mark.filterwarnings("ignore:.*is compiled once more")  # once a freeze
def test_train_on_batch_honours_a_freeze_between_two_calls(rows):
    """`fs.Sequential.train_on_batch` trains today's layers, call by call."""
    x, y = rows
    model = made(wrap="fs")
    hand = ByHand(kernels(model), "adam")
    for frozen in ((), (0,), (0, 2), ()):
        for i, layer in enumerate(model.layers):
            layer.trainable = i not in frozen
        for start in (0, 35):
            model.train_on_batch(x[start : start + 35], y[start : start + 35])
        hand.fit(x, y, frozen, epochs=1)
        assert_kernels(model, hand)


def test_frozen_batch_normalization_keeps_its_statistics(rows):
    """A BatchNormalization frozen between fits runs on its moving statistics and leaves them."""
    x, y = rows
    norm = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((5,)), norm, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    fit(model, x, y)
    norm.trainable = False
    before = [np.array(v.value) for v in norm.variables]
    loss = fs.evaluate(model, x[:35], y[:35], verbose=0)
    history = fit(model, x[:35], y[:35], epochs=1).history
    for variable, value in zip(norm.variables, before, strict=True):
        np.testing.assert_array_equal(np.asarray(variable.value), value)
    # in training mode, too, it normalises with the moving statistics, as in evaluation
    assert history["loss"][0] == pytest.approx(loss, rel=1e-5)


def test_a_failed_fit_after_freezing_keeps_the_frozen_and_the_moments(rows):
    """A fit that fails after a freeze leaves weights and moments as they were, and the next one is right."""
    x, y = rows
    model = made()
    hand = ByHand(kernels(model), "adam")
    fit(model, x, y)
    hand.fit(x, y)
    model.layers[0].trainable = False

    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        fit(model, x, y, callbacks=[Fail()])
    assert_kernels(model, hand)
    fit(model, x, y)
    hand.fit(x, y, {0})
    assert_kernels(model, hand)
