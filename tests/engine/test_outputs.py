"""What a prediction returns: all rows, in the structure of the outputs, held on the host."""

import gc

import jax
import keras
import numpy as np
import pytest
from keras import layers

import fitstep as fs

pytestmark = pytest.mark.usefixtures("equal_programs_compiled_once")

X = np.random.default_rng(0).normal(size=(70, 3)).astype("float32")  # 17 batches of 4, one of 2
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # a dense layer in float32, compiled twice


class Shaped(keras.Model):
    """Doubles its input and gives it in the structure that it is told."""

    def __init__(self, shape, **kwargs):
        super().__init__(**kwargs)
        self.shape = shape

    def call(self, x):
        return self.shape(x * 2, x[:, :1])


def nested(a, b):
    return {"a": a, "more": [b, (a[:, 0], {"z": b * 3})]}


@pytest.mark.parametrize("stride", [1, 2, 16])
@pytest.mark.parametrize(
    "shape",
    [lambda a, b: {"z": a, "a": b}, lambda a, b: [a, b], lambda a, b: (b, a), nested],
    ids=["dict", "list", "tuple", "nested"],
)
def test_outputs_of_any_structure_have_all_rows_in_order(shape, stride):
    """The structure, keys and rows of NumPy's own result, a partial batch included."""
    got = fs.predict(Shaped(shape), X, batch_size=4, verbose=0, steps_per_execution=stride)
    want = shape(X * 2, X[:, :1])
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert type(one) is np.ndarray
        np.testing.assert_array_equal(one, other)


def test_outputs_keep_their_dtypes():
    """bfloat16, int8 and bool come back as they are, not as float32."""
    model = Shaped(
        lambda a, b: [
            keras.ops.cast(a, "bfloat16"),
            keras.ops.cast(keras.ops.round(a), "int8"),
            a > 0,
        ]
    )
    low, whole, positive = fs.predict(model, X, batch_size=4, verbose=0)
    assert [part.dtype.name for part in (low, whole, positive)] == ["bfloat16", "int8", "bool"]
    np.testing.assert_array_equal(low, (X * 2).astype(low.dtype))
    np.testing.assert_array_equal(whole, np.round(X * 2).astype("int8"))
    np.testing.assert_array_equal(positive, X > 0)


@pytest.mark.parametrize("stride", [1, 16])
def test_an_output_without_elements_keeps_its_shape(stride):
    """A slice that is empty in some dimension, such as the boxes of a picture that has none."""
    model = Shaped(lambda a, b: [a, a[:, :0], a[:, :0, None]])
    full, empty, deep = fs.predict(model, X, batch_size=4, verbose=0, steps_per_execution=stride)
    np.testing.assert_array_equal(full, X * 2)
    assert (empty.shape, deep.shape) == ((70, 0), (70, 0, 1))


@pytest.mark.parametrize("stride", [1, 16])
def test_an_output_that_is_none_is_an_error_that_says_so(stride):
    """It has no rows; stock Keras speaks of structures that differ."""
    model = Shaped(lambda a, b: {"a": a, "b": None})
    with pytest.raises(fs.DataError, match="output of the model is None"):
        fs.predict(model, X, batch_size=4, verbose=0, steps_per_execution=stride)


class Own(keras.Model):
    """A prediction step of the user's own."""

    def __init__(self, outputs):
        super().__init__()
        self.dense = layers.Dense(1)
        self.outputs_of = outputs

    def call(self, x):
        return self.dense(x)

    def predict_step(self, state, data):
        x = data[0] if isinstance(data, tuple) else data
        _, state = super().predict_step(state, data)
        return self.outputs_of(x), state


@pytest.mark.parametrize("batch_size", [4, 70])
@pytest.mark.parametrize("stride", [1, 16])
def test_a_step_may_return_other_numbers_of_rows(batch_size, stride):
    """Two rows for each, every second one, one for a batch, or a bare number: as NumPy puts them."""

    def outputs(x):
        return {
            "double": keras.ops.concatenate([x, x]),
            "half": x[::2],
            "mean": keras.ops.mean(x, axis=0, keepdims=True),
            "number": keras.ops.sum(x),
        }

    options = {"batch_size": batch_size, "verbose": 0, "steps_per_execution": stride}
    got = fs.predict(Own(outputs), X, **options)
    batches = np.split(X, range(batch_size, 70, batch_size))
    want = {
        "double": np.concatenate([part for x in batches for part in (x, x)]),
        "half": np.concatenate([x[::2] for x in batches]),
        "mean": np.stack([x.mean(axis=0) for x in batches]),
        "number": np.array([x.sum() for x in batches]),
    }
    assert {name: part.shape for name, part in got.items()} == {
        name: part.shape for name, part in want.items()
    }
    for name, part in want.items():
        np.testing.assert_allclose(got[name], part, **CLOSE, err_msg=name)


def model_of_one_layer():
    return keras.Sequential([keras.Input((3,)), layers.Dense(2)])


@pytest.mark.parametrize("steps", [1, 3, 17])
def test_steps_ends_a_prediction(steps):
    """Only the rows of that many batches, in an array of their own size."""
    model = model_of_one_layer()
    got = fs.predict(model, X, batch_size=4, steps=steps, verbose=0)
    np.testing.assert_allclose(got, model.predict(X[: 4 * steps], verbose=0), **CLOSE)
    assert got.base is None or got.base.size == got.size


def test_a_generator_and_an_empty_one():
    """Batches of any size; none at all is an error that says so."""
    model = model_of_one_layer()
    sizes = (5, 5, 2)
    got = fs.predict(model, ((X[:size],) for size in sizes), steps=3, verbose=0)
    want = np.concatenate([model.predict(X[:size], verbose=0) for size in sizes])
    np.testing.assert_allclose(got, want, **CLOSE)
    with pytest.raises(fs.DataError, match="empty"):
        fs.predict(model, (x for x in ()), verbose=0)
    with pytest.raises(fs.DataError, match="at least one row"):
        fs.predict(model, X[:0], verbose=0)


def test_the_result_is_the_callers():
    """A second prediction changes nothing in the first, and the arrays can be written to."""
    model = model_of_one_layer()
    for rows in (4, 70):
        first = fs.predict(model, X[:rows], batch_size=4, verbose=0)
        kept = first.copy()
        fs.predict(model, X[:rows] + 1, batch_size=4, verbose=0)
        np.testing.assert_array_equal(first, kept)
        first[:] = 0


class Items(keras.utils.PyDataset):
    """Batches of rows that note how many outputs are on the device when they are drawn."""

    def __init__(self, count, alive):
        super().__init__()
        self.count, self.alive = count, alive

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.alive()
        return (X[:4],)


@pytest.mark.parametrize("watch", ["source", "callback"])
def test_outputs_do_not_pile_up_on_the_device(watch):
    """Of 96 batches no more than those of a few executions are alive at any time."""
    most = []

    def alive(*_, **__):
        rows = [a.size // 7 for a in jax.live_arrays() if a.ndim > 1 and a.shape[-1] == 7]
        most.append(sum(rows))

    model = keras.Sequential([keras.Input((3,)), layers.Dense(7)])
    gc.collect()
    alive()
    before = most.pop()
    if watch == "source":
        fs.predict(model, Items(96, alive), verbose=0)
        bound = 4 * 16  # executions of 16 batches: two kept, one running, one being read
    else:
        callback = keras.callbacks.LambdaCallback(on_predict_batch_end=alive)
        fs.predict(model, np.tile(X[:4], (96, 1)), batch_size=4, callbacks=[callback], verbose=0)
        bound = 4
    assert len(most) >= 96
    assert max(most) - before <= bound * 4
