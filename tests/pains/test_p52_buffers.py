"""Pain 52: memory that is used again is never trained on: the numbers are those of fresh arrays.

The example: a generator that refills one NumPy buffer, which JAX on a CPU reads without a copy.
"""

import keras
import numpy as np
import pytest
from jax import numpy as jnp
from keras import layers

import fitstep as fs

ROWS = 16  # of a batch
BATCHES = 7
WIDTH = 32  # 16 * 32 * 4 bytes: large enough that JAX takes an aligned buffer as it is


def aligned(shape, dtype="float32"):
    """An array that starts at a multiple of 64 bytes, which JAX on a CPU uses in place."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, "uint8")
    start = -memory.ctypes.data % 64
    array = memory[start : start + size].view(dtype).reshape(shape)
    assert array.ctypes.data % 64 == 0
    return array


@pytest.fixture
def data():
    generator = np.random.default_rng(1)
    x = generator.normal(size=(BATCHES * ROWS, WIDTH)).astype("float32")
    return x, x[:, :1] * 2 + 1


def model_of(rate=0.01, **kwargs):
    keras.utils.set_random_seed(11)
    model = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(8, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse", **kwargs)
    return model


RUNS = {}


def in_fresh_arrays(data, epochs=2):
    """What stock Keras makes of arrays that nobody touches; the data is the same in all tests."""
    if epochs not in RUNS:
        model = model_of()
        history = model.fit(*data, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0)
        RUNS[epochs] = history.history["loss"], model.get_weights()
    return RUNS[epochs]


def same(history, model, expected):
    losses, weights = expected
    # the same program on the same numbers; stock's may round another way in the last place
    np.testing.assert_allclose(history.history["loss"], losses, rtol=1e-6)
    for got, want in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def refilled(data, make=aligned, spoil=True):
    """Batches for ever, all in one pair of buffers that is overwritten as soon as it may be."""
    x, y = data
    bx, by = make((ROWS, WIDTH)), make((ROWS, 1))
    while True:
        for start in range(0, len(x), ROWS):
            bx[:], by[:] = x[start : start + ROWS], y[start : start + ROWS]
            yield bx, by
            if spoil:
                bx[:], by[:] = 1e3, -1e3


@pytest.mark.parametrize(
    "make", [aligned, lambda shape: np.empty(shape, "float32")], ids=["aligned", "plain"]
)
@pytest.mark.parametrize(
    "how", [{}, {"steps_per_execution": 3}, {"run_eagerly": True}], ids=["", "3", "eager"]
)
def test_a_generator_that_refills_one_buffer_trains_on_what_it_yielded(data, make, how):
    """The history and the weights are those of fresh arrays, however the steps are run."""
    model = model_of(**how)
    history = fs.fit(
        model, refilled(data, make), steps_per_epoch=BATCHES, epochs=2, shuffle=False, verbose=0
    )
    same(history, model, in_fresh_arrays(data))


def test_evaluate_predict_and_validation_copy_too(data):
    """A refilled buffer gives the loss, the predictions and the `val_loss` of fresh arrays."""
    x, y = data
    model = model_of()
    made = model.predict(x, verbose=0)
    loss = float(np.mean((made - y) ** 2))
    got = fs.evaluate(model, refilled(data), steps=BATCHES, verbose=0)
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    got = fs.predict(model, refilled(data), steps=BATCHES, verbose=0)
    np.testing.assert_allclose(got, made, rtol=1e-5, atol=1e-6)
    frozen = model_of(rate=0.0)
    history = fs.fit(
        frozen, x, y, verbose=0,
        validation_data=refilled(data), validation_steps=BATCHES,
    )  # fmt: skip
    np.testing.assert_allclose(history.history["val_loss"], [loss], rtol=1e-5)


class Echo(keras.Sequential):
    """Predicts its very inputs, so that the outputs could be the input's memory."""

    def predict_step(self, state, data):
        x = data[0] if isinstance(data, tuple) else data
        return x, list(state)[1]


def test_predictions_that_are_the_inputs_do_not_change_afterwards(data):
    """An output that is the input array isn't overwritten when the buffer is filled again."""
    x, _ = data
    model = Echo([keras.Input((WIDTH,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    got = fs.predict(model, refilled(data), steps=BATCHES, verbose=0)
    np.testing.assert_array_equal(got, x)


class OneBuffer(keras.utils.PyDataset):
    """Every item is the same pair of arrays, filled anew."""

    def __init__(self, data, **kwargs):
        super().__init__(**kwargs)
        self.data = data
        self.buffers = aligned((ROWS, WIDTH)), aligned((ROWS, 1))

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        part = slice(index * ROWS, (index + 1) * ROWS)
        for buffer, values in zip(self.buffers, self.data, strict=True):
            buffer[:] = values[part]
        return self.buffers


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_returns_the_same_buffer_trains_on_what_it_returned(data, workers):
    """A `PyDataset` whose items share their memory gives the numbers of fresh arrays."""
    model = model_of()
    history = fs.fit(model, OneBuffer(data, workers=workers), epochs=2, shuffle=False, verbose=0)
    same(history, model, in_fresh_arrays(data))


class Spoiling(keras.callbacks.Callback):
    """Overwrites the rows of a batch as soon as its step has been reported."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def on_train_batch_end(self, batch, logs=None):
        part = slice(batch * ROWS, (batch + 1) * ROWS)
        self.x[part], self.y[part] = 1e3, -1e3


def test_a_callback_may_overwrite_rows_that_were_trained_on(data):
    """Rows that are used up are free: overwriting them in mid-epoch changes no number."""
    x, y = aligned(data[0].shape), aligned(data[1].shape)
    x[:], y[:] = data
    model = model_of()
    history = fs.fit(
        model, x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[Spoiling(x, y)]
    )
    same(history, model, in_fresh_arrays(data, epochs=1))
    assert np.all(x == 1e3)


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end", "on_train_batch_end"])
def test_data_changed_in_place_by_a_callback_is_used_as_stock_uses_it(data, hook):
    """Scaling x in a callback takes effect from the batch on from which it does in Keras."""

    def trained(train):
        x, y = data[0].copy(), data[1].copy()

        def scale(index, logs=None):
            x[:] *= 0.5 if hook != "on_train_batch_end" else 0.9

        model = model_of()
        history = train(
            model, x, y, batch_size=ROWS, epochs=3, shuffle=False, verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(**{hook: scale})],
        )  # fmt: skip
        return history, model

    history, model = trained(fs.fit)
    stock_history, stock = trained(keras.Model.fit)
    same(history, model, (stock_history.history["loss"], stock.get_weights()))


def read_only(x):
    x = x.copy()
    x.setflags(write=False)
    return x


def padded(x):
    wide = np.full((len(x), 2 * x.shape[1] + 1), 1e3, x.dtype)
    wide[:, 1::2] = x
    return wide[:, 1::2]


VIEWS = {
    "read-only": read_only,
    "every other column": padded,
    "reversed twice": lambda x: x[::-1].copy()[::-1],
    "Fortran order": np.asfortranarray,
}


@pytest.mark.parametrize("view", VIEWS)
def test_arrays_of_any_layout_give_the_same_numbers_and_are_left_alone(data, view):
    """Read-only, strided, reversed, mapped: the numbers of fresh arrays, and the array unchanged."""
    x, y = (VIEWS[view](part) for part in data)
    model = model_of()
    history = fs.fit(model, x, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    same(history, model, in_fresh_arrays(data))
    np.testing.assert_array_equal(x, data[0])
    np.testing.assert_array_equal(y, data[1])


def test_a_mapped_file_gives_the_same_numbers(data, tmp_path):
    """Memory that is a file, page-aligned and read-only, is trained on like an array."""
    for name, part in zip("xy", data, strict=True):
        np.save(tmp_path / f"{name}.npy", part)
    x, y = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy")
    assert isinstance(x, np.memmap)
    model = model_of()
    history = fs.fit(model, x, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    same(history, model, in_fresh_arrays(data))


def test_a_batch_given_to_train_on_batch_may_be_overwritten_at_once(data):
    """`train_on_batch` of an `fs.Model` has read its arrays when it returns, or has copied them."""
    x, y = data
    stock = model_of()
    keras.utils.set_random_seed(11)
    ours = fs.Sequential([keras.Input((WIDTH,)), layers.Dense(8, "tanh"), layers.Dense(1)])
    ours.compile(keras.optimizers.SGD(0.01), "mse")
    bx, by = aligned((ROWS, WIDTH)), aligned((ROWS, 1))
    for start in range(0, len(x), ROWS):
        part = slice(start, start + ROWS)
        stock.train_on_batch(x[part].copy(), y[part].copy())
        bx[:], by[:] = x[part], y[part]
        ours.train_on_batch(bx, by)
        bx[:], by[:] = 1e3, -1e3
    for got, want in zip(ours.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def test_an_array_assigned_to_a_weight_is_never_written_to(data):
    """Donation updates weights in place: not in the memory of an array that the user put there."""
    model = model_of()
    mine = aligned((WIDTH, 8))
    mine[:] = 0.125
    theirs = jnp.full((8, 1), 0.25)
    model.layers[0].kernel.assign(mine)
    model.layers[1].kernel.assign(theirs)
    fs.fit(model, *data, batch_size=ROWS, epochs=2, verbose=0)
    np.testing.assert_array_equal(mine, np.full((WIDTH, 8), 0.125, "float32"))
    np.testing.assert_array_equal(theirs, np.full((8, 1), 0.25, "float32"))  # nor deleted
    assert np.all(np.asarray(model.layers[0].kernel.value) != 0.125)


def test_an_array_assigned_in_a_callback_is_never_written_to_or_deleted(data):
    """Likewise in mid-epoch, after programs have run, and for one array given to two variables."""
    inputs = keras.Input((WIDTH,))
    twins = [layers.Dense(8, name="first"), layers.Dense(8, name="second")]
    hidden = layers.add([twin(inputs) for twin in twins])
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    mine = jnp.full((WIDTH, 8), 0.125)

    def put(batch, logs):
        if batch == 3:
            for twin in twins:
                twin.kernel.assign(mine)

    fs.fit(
        model, *data, batch_size=ROWS, epochs=2, verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=put)],
    )  # fmt: skip
    np.testing.assert_array_equal(mine, np.full((WIDTH, 8), 0.125, "float32"))
    assert np.all(np.asarray(twins[0].kernel.value) != 0.125)


def test_weights_read_before_a_step_keep_their_values(data):
    """`get_weights()` and a NumPy view of a weight, taken in a callback, hold what they held."""
    taken = []

    def take(batch, logs):
        value = model.layers[0].kernel.value
        taken.append((np.asarray(value), np.array(value, copy=True), model.get_weights()[0]))

    model = model_of()
    fs.fit(
        model, *data, batch_size=ROWS, verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=take)],
    )  # fmt: skip
    for view, copy, weights in taken:
        np.testing.assert_array_equal(view, copy)
        np.testing.assert_array_equal(weights, copy)
    assert not np.array_equal(taken[0][1], taken[1][1])
