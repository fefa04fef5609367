"""Pain 18: each compilation beyond what a run needs is said, with its shapes, or refused.

The example: batches of 8, 5 and 3 rows are three programs, of which the third is one too many.
"""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import fitstep as fs

pytestmark = pytest.mark.usefixtures("equal_programs_compiled_once")


def plain(inputs=None):
    """Without a fixed shape, so that any width or length can come."""
    if inputs is None:
        inputs = keras.Input((5,))
        outputs = layers.Dense(1)(layers.Dense(3, "tanh")(inputs))
    else:
        parts = inputs.values() if isinstance(inputs, dict) else [inputs]
        outputs = layers.Dense(1)(sum(layers.GlobalAveragePooling1D()(part) for part in parts))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def of_sizes(rows, sizes):
    return ((rows[0][:size], rows[1][:size]) for size in sizes)


class Sized(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def third_kind(data, model=None):
    """Fit on some batches; the message that warns, in one."""
    batches = list(data)
    with pytest.warns(UserWarning, match="`train_step` is compiled once more, for ") as caught:
        fs.fit(model or plain(), Sized(batches), shuffle=False, verbose=0)
    (message,) = [str(one.message) for one in caught]
    return message


def test_the_third_kind_of_batch_warns_with_the_shapes_before_and_now(rows):
    """Rows 8, 5, 3: one warning, for 3, naming 8 and 5; a fourth kind is a second one."""
    message = third_kind(of_sizes(rows, (8, 5, 3, 8, 3)))
    now, before = message.split("Before, for: ")
    assert "x float32(3, 5), y float32(3, 1)." in now
    assert "x float32(8, 5), y float32(8, 1); x float32(5, 5), y float32(5, 1)." in before
    assert "padding" in before
    assert "max_compiles" in before
    for data in (of_sizes(rows, (8, 5, 3, 2)), list(of_sizes(rows, (8, 5, 3, 2)))):
        source = Sized(data) if isinstance(data, list) else data
        with pytest.warns(UserWarning, match="compiled once more") as caught:
            fs.fit(plain(), source, steps_per_epoch=4, shuffle=False, verbose=0)
        assert len(caught) == 2


def test_kinds_differ_in_dtype_length_and_by_input(rows):
    """What differs is in the message: a dtype, the length of a sequence, one input of a dict."""
    x, y = rows
    dtypes = [(x[:8].astype(dtype), y[:8]) for dtype in ("float32", "int32", "float16")]
    assert "x float16(8, 5)" in third_kind(dtypes)
    ids = [(np.ones((8, length, 2), "float32"), y[:8]) for length in (4, 7, 9)]
    message = third_kind(ids, plain(keras.Input((None, 2))))
    assert "x float32(8, 9, 2)" in message
    assert "x float32(8, 4, 2)" in message
    inputs = {name: keras.Input((None, 2), name=name) for name in ("left", "right")}
    pairs = [({"left": ids[0][0], "right": other}, y[:8]) for other, _ in ids]
    message = third_kind(pairs, plain(inputs))
    assert "x['left'] float32(8, 4, 2), x['right'] float32(8, 9, 2), y float32(8, 1)" in message


def test_very_many_kinds_are_counted_rather_than_listed(rows):
    """The tenth message names the last five, not all nine."""
    with pytest.warns(UserWarning, match="compiled once more") as caught:
        fs.fit(plain(), of_sizes(rows, range(2, 12)), shuffle=False, verbose=0, steps_per_epoch=10)
    last = str(caught[-1].message)
    assert "Before, for: 4 others; x float32(6, 5)" in last
    assert last.count("; x ") == 5


def test_usual_runs_do_not_warn(rows):
    """A partial batch, another batch size in a later fit, a layer frozen in mid-run: no word."""
    model = plain()
    data = {"x": rows[0], "y": rows[1], "verbose": 0, "validation_data": rows}
    for size in (32, 16, 15, 9):
        fs.fit(model, batch_size=size, epochs=2, **data)
        fs.evaluate(model, *rows, batch_size=size, verbose=0)
        fs.predict(model, rows[0], batch_size=size, verbose=0)
    freeze = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: setattr(model.layers[1], "trainable", epoch % 2 == 0)
    )
    fs.fit(model, epochs=4, callbacks=[freeze], **data)
    causes = [one.cause for one in fs.explain(model).programs]
    assert "changed: the variables or which of them are trainable" in causes


@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch", "predict_on_batch"])
def test_steps_called_one_by_one_warn_too(rows, method):
    """Calls with 8, 5, 8, 5, 3 rows: the last one warns, with the shapes of the calls before."""
    model = fs.Sequential([keras.Input((5,)), layers.Dense(1)])
    model.compile("sgd", "mse")

    def call(size):
        x, y = rows[0][:size], rows[1][:size]
        return getattr(model, method)(*((x,) if method.startswith("predict") else (x, y)))

    for size in (8, 5, 8, 5):
        call(size)
    step = method.replace("_on_batch", "_step")
    with pytest.warns(
        UserWarning, match=rf"`{step}` .* x float32\(3, 5\).*Before, for: x float32\(8"
    ):
        call(3)
    call(3)


def test_an_attribute_that_changes_between_calls_is_named(rows):
    """A number on the model that each call changes costs a compilation each, and is said."""
    model = fs.Sequential([keras.Input((5,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    for epsilon in (0.5, 0.4, 0.3, 0.2):
        model.epsilon = epsilon
        model.train_on_batch(rows[0][:8], rows[1][:8])
    model.epsilon = 0.1
    with pytest.warns(UserWarning, match=r"changed on the model: `epsilon`.*keras.Variable"):
        model.train_on_batch(rows[0][:8], rows[1][:8])
    assert fs.explain(model).programs[-1].cause == "changed on the model: `epsilon`"


@pytest.mark.parametrize("most", [1, 2, 3])
def test_one_compilation_too_many_is_an_error_that_names_the_shapes(rows, most):
    """The batches before it were trained on, it was not, and the model trains on without a limit."""
    sizes = (8, 8, 5, 3, 2)
    model, twin = plain(), plain()
    twin.set_weights(model.get_weights())
    done = {1: 2, 2: 3, 3: 4}[most]
    name = rf"max_compiles={most}` allows, for x float32\({sizes[done]}, 5\).*float32\(8, 5\)"
    options = {"steps_per_epoch": 5, "shuffle": False, "verbose": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*compiled once more")
        with pytest.raises(fs.DataError, match=name):
            fs.fit(model, of_sizes(rows, sizes), max_compiles=most, **options)
        for x, y in list(of_sizes(rows, sizes))[:done]:
            twin.train_on_batch(x, y)
        for got, want in zip(model.get_weights(), twin.get_weights(), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
        assert int(model.optimizer.iterations) == done
        fs.fit(model, of_sizes(rows, sizes), **options)
        # All of its programs are there now, so that nothing is compiled.
        fs.fit(model, of_sizes(rows, sizes), max_compiles=1, **options)


def test_a_warning_points_at_the_users_own_line():
    """Not into fitstep, where nobody can do anything about it."""
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batches = ((np.ones((n, 2)), np.ones((n, 1))) for n in (3, 4, 5))
    with pytest.warns(UserWarning, match="is compiled once more") as caught:
        fs.fit(model, batches, steps_per_epoch=3, shuffle=False, verbose=0)
    assert {one.filename for one in caught if "compiled once more" in str(one.message)} == {
        __file__
    }
