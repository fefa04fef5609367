"""Pain 8: `sample_weight` and `class_weight` on a model with its own stock step are never lost in silence.

The example: a step of the guide that unpacks `(x, y)`, fitted with `sample_weight`.
"""

import warnings

import jax
import keras
import numpy as np
import pytest
from jax import numpy as jnp
from keras import layers

import fitstep as fs

REMEDY = "unpack_x_y_sample_weight"


class Stepped(keras.Model):
    """The guide's step; a subclass says how it takes the data apart and what it does with weights."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x, training=False):
        return self.dense(x)

    def parts(self, data):
        raise NotImplementedError

    def loss_of(self, x, y, y_pred, weight):
        return jnp.mean((y_pred - y) ** 2)

    def objective_of(self, tv, ntv, data, training=False):
        x, y, weight = self.parts(data)
        y_pred, ntv = self.stateless_call(tv, ntv, x, training=training)
        return self.loss_of(x, y, y_pred, weight), ntv

    def train_step(self, state, data):
        tv, ntv, ov, mv = state
        gradient = jax.value_and_grad(self.objective_of, has_aux=True)
        (loss, ntv), grads = gradient(tv, ntv, data, training=True)
        tv, ov = self.optimizer.stateless_apply(ov, grads, tv)
        return {"loss": loss}, (tv, ntv, ov, mv)

    def test_step(self, state, data):
        tv, ntv, mv = state
        loss, ntv = self.objective_of(tv, ntv, data)
        return {"loss": loss}, (tv, ntv, mv)


class TwoParts(Stepped):
    def parts(self, data):
        x, y = data
        return x, y, None


class Ignoring(Stepped):
    def parts(self, data):
        return keras.utils.unpack_x_y_sample_weight(data)


class ByIndex(Stepped):
    """Ignores the weights without ever naming them."""

    def parts(self, data):
        return data[0], data[1], None


class Weighing(Ignoring):
    def loss_of(self, x, y, y_pred, weight):
        return self.compute_loss(x, y, y_pred, weight)


class WeighingByHand(Ignoring):
    """Weights through a nested jit, a branch and a `vmap`: none of it is a loss function of Keras."""

    def loss_of(self, x, y, y_pred, weight):
        weight = jnp.ones(len(x)) if weight is None else weight
        scaled = jax.jit(lambda w: w * 1.0)(weight)
        scaled = jax.lax.cond(jnp.sum(scaled) > -1, lambda w: w, jnp.zeros_like, scaled)
        errors = jax.vmap(lambda a, b, w: jnp.sum((a - b) ** 2) * w)(y_pred, y, scaled)
        return jnp.mean(errors)


class DefaultPlus(keras.Sequential):
    """Calls the default step and adds a log."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {**logs, "one": jnp.ones(())}, state


def built(model, x, **kwargs):
    model(x[:1])
    model.compile(keras.optimizers.SGD(0.05), "mse", **kwargs)
    return model


def same_weights(model, before):
    return all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))


def text_of(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.fixture
def weight(rows):
    return np.linspace(0.0, 3.0, len(rows[0]), dtype="float32")


def test_a_step_that_unpacks_two_parts_is_an_error_with_the_remedy(rows, weight):
    """Weights given to `x, y = data` fail before any weight moves, and the error says what to write."""
    x, y = rows
    model = built(TwoParts(), x)
    before = model.get_weights()
    with pytest.raises(ValueError, match="unpack") as caught:
        fs.fit(model, x, y, sample_weight=weight, verbose=0)
    assert REMEDY in text_of(caught.value)
    assert same_weights(model, before)
    assert int(model.optimizer.iterations) == 0
    with pytest.raises(ValueError, match="unpack") as caught:
        fs.evaluate(model, x, y, sample_weight=weight, verbose=0)
    assert REMEDY in text_of(caught.value)
    history = fs.fit(model, x, y, verbose=0)  # the same object trains without weights
    assert np.isfinite(history.history["loss"][0])
    assert not same_weights(model, before)


def test_class_weight_on_a_step_that_unpacks_two_parts_is_an_error_with_the_remedy(rows):
    """`class_weight` makes three parts of the data: the same error, the same remedy."""
    x, y = rows
    model = built(TwoParts(), x)
    with pytest.raises(ValueError, match="unpack") as caught:
        fs.fit(model, x, (y > 0).astype("int32"), class_weight={0: 1.0, 1: 5.0}, verbose=0)
    assert REMEDY in text_of(caught.value)


@pytest.mark.parametrize("kind", [Ignoring, ByIndex])
@pytest.mark.parametrize("given", ["sample_weight", "class_weight", "generator"])
def test_a_step_that_ignores_the_weights_warns_with_the_remedy(rows, weight, kind, given):
    """Weights without effect are announced, however they are given and however they are ignored."""
    x, y = rows
    model = built(kind(), x)
    with pytest.warns(UserWarning, match=REMEDY) as caught:
        if given == "sample_weight":
            fs.fit(model, x, y, sample_weight=weight, verbose=0)
        elif given == "class_weight":
            labels = (y[:, 0] > 0).astype("int32")
            fs.fit(model, x, labels[:, None], class_weight={0: 1.0, 1: 5.0}, verbose=0)
        else:
            source = ((x[i : i + 35], y[i : i + 35], weight[i : i + 35]) for i in (0, 35))
            fs.fit(model, source, steps_per_epoch=2, shuffle=False, verbose=0)
    assert "train_step" in str(caught[0].message)


def test_evaluation_and_validation_with_ignored_weights_warn(rows, weight):
    """`test_step` is watched as `train_step` is."""
    x, y = rows
    with pytest.warns(UserWarning, match=r"test_step[\s\S]*" + REMEDY):
        fs.evaluate(built(Ignoring(), x), x, y, sample_weight=weight, verbose=0)
    with pytest.warns(UserWarning, match=r"test_step[\s\S]*" + REMEDY):
        fs.fit(built(Ignoring(), x), x, y, validation_data=(x, y, weight), verbose=0)


@pytest.mark.parametrize("how", [{"run_eagerly": True}, {"jit_compile": False}])
def test_ignored_weights_are_announced_without_a_compiler_too(rows, weight, how):
    """`run_eagerly` and `jit_compile=False` lose no warning."""
    x, y = rows
    model = built(Ignoring(), x, **how)
    with pytest.warns(UserWarning, match=REMEDY):
        fs.fit(model, x, y, sample_weight=weight, verbose=0)


@pytest.mark.parametrize("kind", [Weighing, WeighingByHand])
@pytest.mark.parametrize("how", [{}, {"steps_per_execution": 3}, {"run_eagerly": True}])
def test_a_step_that_uses_the_weights_is_left_alone_and_right(rows, weight, kind, how):
    """No warning (they are errors here), and the weights that the default step of Keras gives."""
    x, y = rows
    model, stock = built(kind(), x, **how), built(TwoParts(), x)
    stock.set_weights(model.get_weights())
    kernel, bias = model.get_weights()
    for start in range(0, 70, 32):  # the gradient of mean(w * (x k + b - y)^2) by hand
        bx, by, bw = (part[start : start + 32].astype("float64") for part in (x, y, weight))
        error = 2 * bw[:, None] * (bx @ kernel + bias - by) / len(bx)
        kernel, bias = kernel - 0.05 * bx.T @ error, bias - 0.05 * error.sum(axis=0)
    fs.fit(model, x, y, sample_weight=weight, batch_size=32, shuffle=False, verbose=0, epochs=1)
    # three float32 steps against float64
    np.testing.assert_allclose(model.get_weights()[0], kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.get_weights()[1], bias, rtol=1e-5, atol=1e-6)
    got = fs.evaluate(model, x, y, sample_weight=weight, batch_size=32, verbose=0)
    kernel, bias = model.get_weights()
    expected = np.mean(weight[:, None] * (x @ kernel + bias - y) ** 2)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_step_without_weights_in_its_data_never_warns(rows):
    """A step that would ignore weights is nobody's concern while there are none."""
    x, y = rows
    model = built(Ignoring(), x)
    fs.fit(model, x, y, validation_data=(x, y), verbose=0)
    assert np.isfinite(fs.evaluate(model, x, y, verbose=0))


def trained(train, x, y, **kwargs):
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3, "softmax")])
    model.compile(
        keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", weighted_metrics=["mse"]
    )
    history = train(model, x, y, batch_size=35, epochs=2, shuffle=False, verbose=0, **kwargs)
    return history.history, model


@pytest.mark.parametrize(
    "given",
    [
        lambda w, x, y: {"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}},
        lambda w, x, y: {"sample_weight": w, "validation_data": (x, y, w)},
        lambda w, x, y: {"sample_weight": w, "validation_split": 0.3},
    ],
    ids=["class_weight", "validation weights", "validation split"],
)
def test_the_default_step_honours_weights_as_keras_does(rows, weight, given):
    """History and weights equal those of `keras.Model.fit`, weighted metrics too."""
    x, _ = rows
    y = (np.arange(70) % 3).astype("int32")[:, None]
    kwargs = given(weight, x, y)
    stock, stock_model = trained(keras.Model.fit, x, y, **kwargs)
    ours, our_model = trained(fs.fit, x, y, **kwargs)
    assert list(ours) == list(stock)
    for key, values in stock.items():
        np.testing.assert_allclose(ours[key], values, rtol=1e-6, err_msg=key)
    for a, b in zip(our_model.get_weights(), stock_model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(
        fs.evaluate(our_model, x, y, sample_weight=weight, verbose=0),
        stock_model.evaluate(x, y, sample_weight=weight, verbose=0),
        rtol=1e-6,
    )


def test_a_step_that_calls_the_default_step_honours_weights(rows, weight):
    """`super().train_step` with weights: no warning, and the weights of `keras.Model.fit`."""
    x, y = rows
    weights = []
    for train, kind in ((keras.Model.fit, keras.Sequential), (fs.fit, DefaultPlus)):
        keras.utils.set_random_seed(5)
        model = kind([keras.Input((5,)), layers.Dense(1)])
        model.compile("adam", "mse")
        train(model, x, y, sample_weight=weight, batch_size=32, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)


def test_weights_given_in_both_ways_are_refused_as_keras_refuses_them(rows, weight):
    """`sample_weight` together with `class_weight` is Keras's own error."""
    x, y = rows
    labels = (y > 0).astype("int32")
    errors = []
    for train in (keras.Model.fit, fs.fit):
        model = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="class_weight") as caught:
            train(model, x, labels, sample_weight=weight, class_weight={0: 1, 1: 2}, verbose=0)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_the_warning_points_at_the_users_step_for_each_model(rows):
    """It names the file of the step that ignores the weights, and comes for a second model, too."""
    x, y = rows

    class Ignoring(keras.Sequential):
        def train_step(self, state, data):
            return super().train_step(state, data[:2])

    for _ in range(2):
        model = Ignoring([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with pytest.warns(UserWarning, match="has sample weights") as caught:
            fs.fit(model, x, y, sample_weight=np.ones(len(x)), verbose=0)
        assert {warning.filename for warning in caught} == {__file__}


def test_weights_that_only_reach_a_log_are_no_cause_for_a_warning(rows):
    """They do have an effect; and with a partial batch there is one warning, not two."""
    x, y = rows

    class Logging(keras.Sequential):
        def train_step(self, state, data):
            logs, state = super().train_step(state, data[:2])
            return {**logs, "weight": jnp.mean(data[2])} if self.log else logs, state

    weights = np.linspace(0, 1, len(x), dtype="float32")
    for log, warned in ((True, 0), (False, 1)):
        model = Logging([keras.layers.Dense(1)])
        model.log = log
        model.compile("sgd", "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fs.fit(model, x, y, sample_weight=weights, batch_size=32, verbose=0)
        assert sum("sample weights" in str(each.message) for each in caught) == warned
