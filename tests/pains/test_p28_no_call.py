"""Pain 28: a model with steps of its own and built sub-models needs no `call`.

The example: keras#19945, a model of two sub-models whose `train_step` uses them directly.
"""

import jax
import keras
import numpy as np
import pytest
from jax import numpy as jnp
from keras import layers

import fitstep as fs

RATE = 0.05


def sub_model(units, inputs):
    return keras.Sequential([keras.Input((inputs,)), layers.Dense(units)])


class Steps:
    """Reconstruction of x through two parts; no `call` anywhere."""

    def pieces(self):
        return [self.encoder, self.decoder]

    def reconstruct(self, tv, ntv, x):
        first, second = self.pieces()
        n = len(first.trainable_variables)
        m = len(first.non_trainable_variables)
        code, _ = first.stateless_call(tv[:n], ntv[:m], x)
        return second.stateless_call(tv[n:], ntv[m:], code)[0]

    def train_step(self, state, data):
        tv, ntv, ov, mv = state
        x = keras.utils.unpack_x_y_sample_weight(data)[0]

        def loss_of(tv):
            return jnp.mean((self.reconstruct(tv, ntv, x) - x) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(tv)
        tv, ov = self.optimizer.stateless_apply(ov, grads, tv)
        return {"reconstruction": loss}, (tv, ntv, ov, mv)

    def test_step(self, state, data):
        tv, ntv, mv = state
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        loss = jnp.mean((self.reconstruct(tv, ntv, x) - x) ** 2)
        return {"reconstruction": loss}, (tv, ntv, mv)

    def predict_step(self, state, data):
        tv, ntv = state
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        return self.reconstruct(tv, ntv, x), ntv


@keras.saving.register_keras_serializable(package="fitstep_tests_p28")
class Plain(Steps, keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = sub_model(2, 5), sub_model(5, 2)


@keras.saving.register_keras_serializable(package="fitstep_tests_p28")
class OurModel(Steps, fs.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = sub_model(2, 5), sub_model(5, 2)


class OfOurs(Steps, keras.Model):
    """Sub-models that are fitstep's own, one subclassed."""

    def __init__(self):
        super().__init__()

        class Decoder(fs.Model):
            def __init__(self):
                super().__init__()
                self.dense = layers.Dense(5)

            def call(self, x):
                return self.dense(x)

        self.encoder = fs.Sequential([keras.Input((5,)), layers.Dense(2)])
        self.decoder = Decoder()
        self.decoder(np.zeros((1, 2), "float32"))


class InAList(Steps, keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = [sub_model(2, 5), sub_model(5, 2)]

    def pieces(self):
        return self.parts


KINDS = [Plain, OurModel, OfOurs, InAList]


def by_hand(weights, x, epochs, batch_size=32):
    """The weights after plain gradient descent on mean((x W a + ...) - x)^2, and the epoch means."""
    w, a, v, b = (part.astype("float64") for part in weights)
    means = []
    for _ in range(epochs):
        losses = []
        for start in range(0, len(x), batch_size):
            rows = x[start : start + batch_size].astype("float64")
            code = rows @ w + a
            error = code @ v + b - rows
            losses.append((len(rows), np.mean(error**2)))
            out = 2 * error / error.size
            inner = out @ v.T
            w, a, v, b = (
                w - RATE * rows.T @ inner,
                a - RATE * inner.sum(0),
                v - RATE * code.T @ out,
                b - RATE * out.sum(0),
            )
        means.append(np.average([loss for _, loss in losses], weights=[n for n, _ in losses]))
    return [w, a, v, b], means


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_call_is_fitted_evaluated_and_predicted(rows, kind):
    """Weights, history, evaluation and predictions are those of gradient descent by hand."""
    x, _ = rows
    model = kind()
    model.compile(keras.optimizers.SGD(RATE))
    expected, means = by_hand(model.get_weights(), x, epochs=2)
    history = fs.fit(model, x, epochs=2, shuffle=False, verbose=0)
    # six float32 steps against float64
    for got, want in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(history.history["reconstruction"], means, rtol=1e-5)
    assert int(model.optimizer.iterations) == 6
    w, a, v, b = model.get_weights()
    made = (x @ w + a) @ v + b
    np.testing.assert_allclose(fs.predict(model, x, verbose=0), made, rtol=1e-4, atol=1e-5)
    got = fs.evaluate(model, x, verbose=0, return_dict=True)
    np.testing.assert_allclose(got["reconstruction"], np.mean((made - x) ** 2), rtol=1e-5)


def test_our_model_without_call_has_the_methods_too(rows):
    """`fit`, `evaluate` and `predict` of an `fs.Model` without `call`, with validation."""
    x, _ = rows
    model = OurModel()
    model.compile(keras.optimizers.SGD(RATE))
    history = model.fit(x, validation_data=(x, None), epochs=2, verbose=0).history
    assert history["val_reconstruction"][1] < history["val_reconstruction"][0]
    w, a, v, b = model.get_weights()
    made = (x @ w + a) @ v + b
    np.testing.assert_allclose(model.predict(x, verbose=0), made, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.evaluate(x, verbose=0), np.mean((made - x) ** 2), rtol=1e-5)


def test_its_weights_are_saved_and_loaded(rows, tmp_path):
    """A plain model's trained weights come back from a weights file and from a `.keras` file."""
    x, _ = rows
    model = Plain()
    model.compile(keras.optimizers.Adam(0.01))
    fs.fit(model, x, verbose=0)
    model.save_weights(tmp_path / "m.weights.h5")
    model.save(tmp_path / "m.keras")
    built = Plain()
    built.build((None, 5))  # Keras loads into built models only
    built.load_weights(tmp_path / "m.weights.h5")
    # Keras can't build a model without `call` on loading, and so not its optimizer.
    loaded = keras.models.load_model(tmp_path / "m.keras", compile=False)
    for other in (built, loaded):
        for got, want in zip(other.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(got, want)


def test_ours_is_saved_as_a_whole_and_goes_on_where_it_stopped(rows, tmp_path):
    """An `fs.Model` reloads with its optimizer: the next epoch equals the uninterrupted one."""
    x, _ = rows
    model = OurModel()
    model.compile(keras.optimizers.Adam(0.01))
    model.fit(x, shuffle=False, verbose=0)
    model.save(tmp_path / "m.keras")
    other = keras.models.load_model(tmp_path / "m.keras")
    for each in (model, other):
        each.fit(x, shuffle=False, verbose=0)
    for got, want in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)
    assert int(other.optimizer.iterations) == int(model.optimizer.iterations) == 6


class Bare(keras.Model):
    """No layer at all: two weights of the model itself."""

    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(shape=(5, 1), initializer="zeros", name="kernel")
        self.bias = self.add_weight(shape=(1,), initializer="zeros", name="bias")

    def train_step(self, state, data):
        tv, ntv, ov, mv = state
        x, y = data
        value, grads = jax.value_and_grad(lambda v: jnp.mean((x @ v[0] + v[1] - y) ** 2))(tv)
        tv, ov = self.optimizer.stateless_apply(ov, grads, tv)
        return {"loss": value}, (tv, ntv, ov, mv)


def test_weights_of_the_model_itself_suffice(rows):
    """A model whose variables are its own trains without a layer: one step is `-rate * gradient`."""
    x, y = rows
    model = Bare()
    model.compile(keras.optimizers.SGD(0.1))
    fs.fit(model, x, y, batch_size=70, verbose=0)
    np.testing.assert_allclose(model.kernel.value, 0.1 * 2 * x.T @ y / 70, rtol=1e-4, atol=1e-6)


class Unbuilt(Steps, keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(2)])
        self.decoder = keras.Sequential([layers.Dense(5)])


@pytest.mark.filterwarnings("ignore:.*looks like it has unbuilt state:UserWarning")  # the nightly
def test_a_sub_model_that_is_not_built_is_a_clear_error(rows):
    """The error says that something is not built, and building it on the same object mends it."""
    x, _ = rows
    model = Unbuilt()
    model.compile(keras.optimizers.SGD(RATE))
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)buil[dt]"):
        fs.fit(model, x, verbose=0)
    model.encoder.build((None, 5))
    model.decoder.build((None, 2))
    expected, _ = by_hand(model.get_weights(), x, epochs=1)
    fs.fit(model, x, shuffle=False, verbose=0)
    for got, want in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


class NoPredictStep(Plain):
    predict_step = keras.Model.predict_step


def test_predict_without_call_and_without_predict_step_is_keras_s_error(rows):
    """What can't be computed is told: `call` is missing; the model stays whole."""
    x, _ = rows
    model = NoPredictStep()
    model.compile(keras.optimizers.SGD(RATE))
    fs.fit(model, x, verbose=0)
    before = model.get_weights()
    with pytest.raises(NotImplementedError, match="call"):
        fs.predict(model, x, verbose=0)
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)
