"""Every source of data that Keras takes gives the run that `keras.Model.fit` makes of it."""

import warnings

import jax
import keras
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from jax import numpy as jnp

import fitstep as fs
from tests.sources.runs import (
    BATCH,
    CLOSE,
    Items,
    dense,
    embedding,
    endless,
    equal_runs,
    lazy,
    list_of_inputs,
    two_inputs,
    two_outputs,
    untouched,
)

pytestmark = pytest.mark.usefixtures("equal_programs_compiled_once")

# Keras's nightly asks JAX 0.12 for the dtype of the data when it builds a model, stock `fit` too.
NARROWED = pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")


def finite(x, y, batches):
    source = endless(x, y)
    for _ in range(batches):
        yield next(source)


def csr(x):
    return scipy.sparse.csr_matrix(np.where(np.abs(x) > 0.5, x, 0))


ARRAYS = {
    "NumPy": lambda x, y: (x, y),
    "float64": lambda x, y: (x.astype("float64"), y.astype("float64")),
    "float16": lambda x, y: (x.astype("float16"), y.astype("float16")),
    "whole numbers": lambda x, y: ((10 * x).astype("int64"), (y > 0).astype("uint8")),
    "truth values": lambda x, y: (x > 0, y > 0),
    "JAX": lambda x, y: (jnp.asarray(x), jnp.asarray(y)),
    "frame and series": lambda x, y: (pd.DataFrame(x), pd.Series(y[:, 0])),
    "frame of mixed numbers": lambda x, y: (
        pd.DataFrame(x).assign(flag=np.arange(len(x)) % 2).drop(columns=4),
        pd.DataFrame(y),
    ),
    "SciPy sparse": lambda x, y: (csr(x), y),
    "NumPy and JAX mixed": lambda x, y: (x, jnp.asarray(y)),
    "targets of one dimension": lambda x, y: (x, y[:, 0]),
}


@NARROWED
@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_of_every_kind(rows, kind):
    """Arrays, frames, series and sparse matrices train as in Keras; some with a partial batch."""
    count = 70 if kind in ("NumPy", "frame and series", "SciPy sparse") else 64
    x, y = rows[0][:count], rows[1][:count]
    equal_runs(dense, lambda: ARRAYS[kind](x, y), epochs=2)


def test_frames_and_sparse_matrices_evaluate_and_predict_as_in_keras(rows):
    """The same loss, metrics and predictions as Keras's own from a frame and a sparse matrix."""
    x, y = rows
    model = dense()
    for data in (pd.DataFrame(x), csr(x)):
        np.testing.assert_allclose(
            fs.evaluate(model, data, y, verbose=0), model.evaluate(data, y, verbose=0), rtol=1e-6
        )
        got = fs.predict(model, data, verbose=0)
        np.testing.assert_allclose(got, model.predict(data, verbose=0), **CLOSE)
        assert got.shape == (70, 1)


def test_a_dict_of_inputs_in_any_order(rows):
    """Named inputs find their places, whatever the order of the dict's keys."""
    x, y = rows
    equal_runs(two_inputs, lambda: ({"b": x[:, 2:], "a": x[:, :2]}, y), epochs=2)


def test_a_list_of_inputs_of_different_kinds(rows):
    """A list with a JAX array and a NumPy array is two inputs."""
    x, y = rows
    equal_runs(list_of_inputs, lambda: ([jnp.asarray(x[:, :2]), x[:, 2:]], y), epochs=2)


def test_several_outputs_with_a_dict_of_targets_and_weights(rows):
    """Targets and sample weights by output name, from arrays."""
    x, y = rows
    weights = {"value": np.linspace(0, 2, 70), "sign": np.linspace(1, 0, 70)}
    targets = {"sign": (y > 0).astype("int32"), "value": y}
    model = equal_runs(two_outputs, lambda: (x, targets), sample_weight=weights, epochs=2)
    got, stock = fs.predict(model, x, verbose=0), model.predict(x, verbose=0)
    assert list(got) == list(stock)
    for name in got:
        np.testing.assert_allclose(got[name], stock[name], **CLOSE)
    np.testing.assert_allclose(
        fs.evaluate(model, x, targets, verbose=0), model.evaluate(x, targets, verbose=0), rtol=1e-6
    )


@NARROWED
def test_whole_numbers_reach_an_embedding():
    """int64 indices stay indices."""
    x = np.random.default_rng(0).integers(0, 7, (70, 5))
    y = x.sum(axis=1, keepdims=True).astype("float32")
    equal_runs(embedding, lambda: (x, y), epochs=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_of_batches(rows, workers):
    """A `PyDataset` gives its batches in order; with more workers stock Keras's order is wrong."""
    equal_runs(dense, lambda: Items(*rows, workers=workers, max_queue_size=2), epochs=2)


def test_a_dataset_with_workers_is_shuffled_as_without(rows):
    """The same seed gives the same order of batches, by three threads or by none."""
    weights = []
    for workers in (0, 3):
        keras.utils.set_random_seed(21)
        model = dense()
        fs.fit(model, Items(*rows, workers=workers), epochs=3, verbose=0)
        weights.append(model.get_weights())
    for got, want in zip(*weights, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_dataset_evaluates_predicts_and_validates(rows):
    """Validation, evaluation and prediction from a `PyDataset` are Keras's."""
    x, y = rows
    model = equal_runs(
        dense, lambda: (x, y), validation_data=Items(x[:40], y[:40], workers=0), epochs=2
    )
    items = Items(x, y, workers=0)
    np.testing.assert_allclose(
        fs.evaluate(model, items, verbose=0), model.evaluate(items, verbose=0), rtol=1e-6
    )
    np.testing.assert_allclose(
        fs.predict(model, items, verbose=0), model.predict(x, verbose=0), **CLOSE
    )


def test_a_dataset_is_asked_for_each_batch_once_an_epoch(rows):
    """Nothing is read beyond the epochs, but the one item that Keras looks at beforehand."""
    items = Items(*rows, workers=0)
    fs.fit(dense(), items, epochs=3, shuffle=False, verbose=0)
    assert items.asked[-9:] == [0, 1, 2] * 3
    assert items.asked[:-9] in ([], [0])


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_a_dataset_is_told_of_the_ends_of_epochs_as_often_as_in_keras(rows, verb):
    """`on_epoch_end` of a `PyDataset`, at which many reshuffle, is called as Keras calls it."""
    ended = []
    for owner in (keras.Model, fs):
        items = Items(*rows, workers=0)
        getattr(owner, verb)(dense(), items, verbose=0)
        ended.append(items.ended)
    assert ended[1] == ended[0]


class Reshuffling(Items):
    """Another order of the rows after each epoch, as Keras's documentation has it."""

    def __init__(self, x, y, **kwargs):
        super().__init__(x.copy(), y.copy(), **kwargs)
        self.generator = np.random.default_rng(3)

    def on_epoch_end(self):
        order = self.generator.permutation(len(self.x))
        self.x, self.y = self.x[order], self.y[order]


def test_a_dataset_that_reshuffles_gives_the_same_order_as_in_keras(rows):
    """A `PyDataset` with a seeded order of its own is the same run in Keras and in fitstep."""
    equal_runs(dense, lambda: Reshuffling(*rows, workers=0), epochs=3)


@pytest.mark.parametrize("build", [dense, lazy])
def test_an_endless_generator_with_steps(rows, build):
    """`steps_per_epoch` ends the epochs; the next one goes on where the generator is."""
    equal_runs(build, lambda: endless(*rows), steps_per_epoch=4, epochs=3)


@NARROWED
@pytest.mark.filterwarnings("ignore:.*is compiled once more")  # for the third size
def test_a_generator_of_frames_weights_and_batches_of_any_size(rows):
    """What a generator yields may be frames, have weights, and change its size."""
    x, y = rows

    def source():
        while True:
            for start, stop in ((0, 10), (10, 50), (50, 53)):
                part = slice(start, stop)
                yield pd.DataFrame(x[part]), pd.DataFrame(y[part]), np.arange(start, stop) / 30

    equal_runs(dense, source, steps_per_epoch=3, epochs=2)


def test_a_generator_of_dicts(rows):
    """Dicts of inputs and of targets come through a generator too."""
    x, y = rows

    def source():
        while True:
            yield x[:20], {"sign": (y[:20] > 0).astype("int32"), "value": y[:20]}

    equal_runs(two_outputs, source, steps_per_epoch=2, epochs=2)


@pytest.mark.parametrize("steps", [{}, {"steps_per_epoch": 4}], ids=["no steps", "steps"])
def test_a_generator_that_ends_early_trains_on_each_batch_once_and_says_so(rows, steps):
    """Of two epochs asked for, one is had, or one and a half: no batch twice, and a warning."""
    keras.utils.set_random_seed(21)
    stock = dense()
    # Without steps stock Keras makes a second epoch of two batches that it looked at in the first.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = stock.fit(
            finite(*rows, 6), epochs=2 if steps else 1, shuffle=False, verbose=0, **steps
        )
    keras.utils.set_random_seed(21)
    model = dense()
    with pytest.warns(UserWarning, match="ran out of data"):
        history = fs.fit(model, finite(*rows, 6), epochs=2, shuffle=False, verbose=0, **steps)
    assert int(model.optimizer.iterations) == 6
    assert history.epoch == expected.epoch
    for key, values in expected.history.items():
        np.testing.assert_allclose(history.history[key], values, **CLOSE)
    for got, want in zip(model.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, **CLOSE)


def test_a_validation_generator_is_drawn_from_as_far_as_its_steps(rows):
    """Three validations of two steps take six batches in their order, and none a second time."""
    x, y = rows
    drawn = []
    model = dense()
    model.compile(
        keras.optimizers.SGD(0.0), "mse"
    )  # weights stand still: NumPy can tell the losses
    errors = (model.predict(x, verbose=0) - y)[:, 0] ** 2
    history = fs.fit(
        model, x, y, epochs=3, verbose=0,
        validation_data=endless(x, y, drawn), validation_steps=2,
    )  # fmt: skip
    assert drawn == list(range(6))
    batches = [errors[:32], errors[32:64], errors[64:]] * 2
    expected = [np.mean(np.concatenate(batches[i : i + 2])) for i in (0, 2, 4)]
    np.testing.assert_allclose(history.history["val_loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("build", [dense, lazy])
@pytest.mark.parametrize("steps", [1, 3])
def test_no_more_is_drawn_from_a_generator_than_is_trained_on(rows, build, steps):
    """Steps draw as many batches as they train on, and the next one drawn is the one after them."""
    drawn = []
    source = endless(*rows, drawn)
    fs.fit(build(), source, steps_per_epoch=steps, shuffle=False, verbose=0)
    assert drawn == list(range(steps))
    expected = rows[0][BATCH : 2 * BATCH] if steps == 1 else rows[0][:BATCH]
    np.testing.assert_array_equal(next(source)[0], expected)


def test_at_each_step_only_its_batches_are_drawn(rows):
    """When a step is reported one batch a step is drawn, with the execution's batches at most ahead."""
    for stride in (1, 2):
        drawn, seen = [], []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, drawn=drawn, seen=seen: seen.append(
                (batch + 1, len(drawn))
            )
        )
        fs.fit(
            dense(), endless(*rows, drawn), steps_per_epoch=6, shuffle=False, verbose=0,
            callbacks=[note], steps_per_execution=stride,
        )  # fmt: skip
        assert len(seen) == 6 // stride
        assert all(done <= count <= done + stride for done, count in seen)


def test_stopping_early_leaves_the_rest_undrawn(rows):
    """A callback that stops at the second step has had two batches drawn, and no third."""
    drawn = []
    model = dense()

    def stop(batch, logs):
        model.stop_training = batch == 1

    fs.fit(
        model, endless(*rows, drawn), steps_per_epoch=9, shuffle=False, verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)],
    )  # fmt: skip
    assert drawn == [0, 1]
    assert int(model.optimizer.iterations) == 2


def test_evaluate_and_predict_draw_as_many_as_their_steps(rows):
    """`steps=2` draws two batches and gives the numbers of their rows."""
    x, y = rows
    model = dense()
    made = model.predict(x[:64], verbose=0)
    drawn = []
    got = fs.evaluate(model, endless(x, y, drawn), steps=2, verbose=0)[0]
    assert len(drawn) == 2
    np.testing.assert_allclose(got, np.mean((made - y[:64]) ** 2), rtol=1e-5)
    drawn = []
    got = fs.predict(model, endless(x, y, drawn), steps=2, verbose=0)
    assert len(drawn) == 2
    np.testing.assert_allclose(got, made, **CLOSE)


# --- what is no data --------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_no_rows_are_an_error_that_says_so(rows, verb):
    """Empty arrays are refused by `fit`, `evaluate` and `predict`, and the model is as it was."""
    x, y = rows
    data = (x[:0],) if verb == "predict" else (x[:0], y[:0])
    untouched(
        dense(), lambda m: getattr(fs, verb)(m, *data, verbose=0), ValueError, "(?i)empty|row|batch"
    )


def test_a_generator_without_batches_is_an_error_that_says_so():
    """Nothing to draw at all: a clear error, and the model is as it was."""
    nothing = iter(())
    error = untouched(
        dense(),
        lambda m: fs.fit(m, (pair for pair in nothing), shuffle=False, verbose=0),
        ValueError,
        "(?i)empty|no batch|no data|generator",
    )
    assert isinstance(error, ValueError)


def test_unequal_lengths_are_counted(rows):
    """Rows of x without rows of y: an error that counts both, before any step."""
    x, y = rows
    untouched(
        dense(),
        lambda m: fs.fit(m, x, y[:69], verbose=0),
        fs.DataError,
        "cardinality.*Received rows: x: 70; y: 69",
    )


NO_NUMBERS = {
    # data of no numbers, and what the error must say of it
    "text": (lambda x, y: (x.astype(str), y), r"`x` must .* dtype <U\d+, e\.g\. '"),
    "objects": (lambda x, y: (x.astype(object), y), r"`x` must .* dtype object"),
    "dates": (
        lambda x, y: (np.full(x.shape, "2020-01-01", "datetime64[D]"), y),
        r"`x` must .* dtype datetime64\[D\]",
    ),
    "text in y": (lambda x, y: (x, np.full(y.shape, "yes")), r"`y` must .* e\.g\. 'yes'"),
    "text in one of several": (
        lambda x, y: (x, {"a": y, "b": np.full(y.shape, b"no")}),
        r"`y\['b'\]` must .* e\.g\. b'no'",
    ),
    "a gap among objects": (
        lambda x, y: (np.where(x > 0, x, None), y),
        r"`x` must .* dtype object, e\.g\. None",
    ),
    "values behind a mask": (
        lambda x, y: (np.ma.masked_greater(x, 1.0), y),
        r"`x` is a masked array.*`x\.filled",
    ),
    "a frame with a column of text": (
        lambda x, y: (pd.DataFrame(x).assign(name="a").drop(columns=4), y),
        r"`x\['name'\]` must .* e\.g\. 'a'",
    ),
    "a frame with a column of dates": (
        lambda x, y: (pd.DataFrame(x).assign(day=pd.Timestamp("2020-01-01")).drop(columns=4), y),
        r"`x\['day'\]` must .* dtype datetime64",
    ),
    "a frame with a category": (
        lambda x, y: (pd.DataFrame(x).assign(kind=pd.Categorical(["a"] * 70)), y),
        r"`x\['kind'\]` must .* dtype category",
    ),
    "a list of texts": (lambda x, y: (["a"] * 70, y), "Unrecognized data type"),  # Keras's own
}


@pytest.mark.parametrize("kind", NO_NUMBERS)
@pytest.mark.parametrize("build", [dense, lazy])
def test_what_is_no_number_is_refused_with_its_place(rows, kind, build):
    """Text, objects and dates are an error that names array, dtype and value, before any step."""
    model = build()
    data, said = NO_NUMBERS[kind]
    with pytest.raises(ValueError, match=said):
        fs.fit(model, *data(*rows), verbose=0)
    if build is dense:
        assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("build", [dense, lazy])
def test_after_text_was_refused_numbers_train_the_same_model(rows, build):
    """A refusal leaves a model that right data trains, and builds where it was not built."""
    x, y = rows
    keras.utils.set_random_seed(21)
    model = build()
    with pytest.raises(fs.DataError, match="`x` must hold numbers"):
        fs.fit(model, x.astype(str), y, verbose=0)
    fs.fit(model, x, y, batch_size=70, verbose=0)
    assert int(model.optimizer.iterations) == 1
    assert all(np.all(np.isfinite(weight)) for weight in model.get_weights())


def test_no_number_from_a_generator_or_in_validation_is_refused_too(rows):
    """Text in a later place: in a generator's batch and in the validation data."""
    x, y = rows
    untouched(
        dense(),
        lambda m: fs.fit(m, ((x.astype(str), y) for _ in range(2)), shuffle=False, verbose=0),
        fs.DataError,
        "`x` must hold numbers",
    )
    model = dense()
    with pytest.raises(fs.DataError, match="`x` must hold numbers"):
        fs.fit(model, x, y, validation_data=(x.astype(str), y), verbose=0)
    assert all(np.all(np.isfinite(weight)) for weight in model.get_weights())


def test_nan_in_the_data_gives_what_keras_gives(rows):
    """A NaN in x makes the loss NaN from that batch on, as in Keras, without an error."""
    x, y = rows
    x = x.copy()
    x[40, 2] = np.nan
    model = equal_runs(dense, lambda: (x, y), epochs=2)
    assert np.isnan(model.get_weights()[0]).any()


@pytest.mark.parametrize("kind", ["generator", "dataset", "dataset with a worker"])
def test_a_source_that_fails_passes_its_own_error_and_leaves_the_last_step(rows, kind):
    """The user's exception arrives as it is; the model is that of the steps before, and trains on."""
    x, y = rows

    def failing():
        yield x[:32], y[:32]
        yield x[32:64], y[32:64]
        raise OSError("the disk")

    class Failing(Items):
        def __getitem__(self, index):
            if index == 2:
                raise OSError("the disk")
            return super().__getitem__(index)

    model, stock = dense(), dense()
    stock.set_weights(model.get_weights())
    stock.fit(x[:64], y[:64], shuffle=False, verbose=0)
    source = failing() if kind == "generator" else Failing(x, y, workers=int("worker" in kind))
    with pytest.raises(OSError, match="the disk"):
        fs.fit(model, source, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 2
    for got, want in zip(model.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, **CLOSE)
    fs.fit(model, x, y, verbose=0)
    assert int(model.optimizer.iterations) == 5


def test_a_source_that_fails_at_once_leaves_the_model_alone():
    """No batch at all before the failure: nothing has happened to the model."""

    def failing():
        raise OSError("the disk")
        yield

    untouched(
        dense(), lambda m: fs.fit(m, failing(), shuffle=False, verbose=0), OSError, "the disk"
    )


@pytest.mark.parametrize(
    ("build", "wrong"),
    [
        (list_of_inputs, lambda x: x),
        (list_of_inputs, lambda x: [x[:, :2], x[:, 2:], x]),
        (two_inputs, lambda x: {"a": x[:, :2]}),
        (dense, lambda x: x[:, :4]),
    ],
    ids=["one of two", "three of two", "a key missing", "too few features"],
)
@pytest.mark.filterwarnings(
    r"ignore:[\s\S]*structure of `inputs`:UserWarning"
)  # the nightly, first
def test_wrong_inputs_are_keras_s_error_and_harm_nothing(rows, build, wrong):
    """A wrong number of inputs or features is an error of Keras's kind; the model is as it was."""
    x, y = rows
    kinds = (ValueError, KeyError, TypeError, RuntimeError)  # Keras wraps some of them, or doesn't
    with pytest.raises(kinds):
        build().fit(wrong(x), y, verbose=0)
    untouched(build(), lambda m: fs.fit(m, wrong(x), y, verbose=0), kinds, None)


def test_a_batch_that_does_not_fit_ends_the_run_at_the_last_good_one(rows):
    """A third batch of another width is refused; the two before it count, and training goes on."""
    x, y = rows

    def source():
        yield x[:32], y[:32]
        yield x[32:64], y[32:64]
        yield x[:32, :4], y[:32]

    model = dense()
    with pytest.raises(ValueError, match=r"(?i)shape|incompatible"):
        fs.fit(model, source(), steps_per_epoch=3, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 2
    assert all(np.all(np.isfinite(weight)) for weight in model.get_weights())
    fs.fit(model, x, y, verbose=0)


def test_the_arrays_of_the_user_are_still_there_afterwards(rows):
    """JAX arrays given as data are not given up to the program: they can be used again."""
    x, y = (jnp.asarray(part) for part in rows)
    model = dense()
    fs.fit(model, x, y, batch_size=70, epochs=2, verbose=0)
    fs.evaluate(model, x, y, batch_size=70, verbose=0)
    np.testing.assert_array_equal(x, rows[0])
    np.testing.assert_array_equal(y, rows[1])
    assert isinstance(x, jax.Array)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras's word, at the first end
def test_a_validation_generator_that_is_exhausted_is_named(rows):
    """It is the validation's data that ended, which the error says, and what to give instead."""
    x, y = rows
    model = dense()
    with pytest.raises(fs.DataError, match=r"evaluation or validation has no batch.*any more"):
        fs.fit(model, x, y, epochs=3, validation_data=(pair for pair in [(x, y)]), verbose=0)
    assert all(np.all(np.isfinite(weight)) for weight in model.get_weights())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": -3}, "batch_size must be >= 1. Received: -3"),
        ({"batch_size": 0}, "batch_size must be >= 1. Received: 0"),
        ({"steps_per_epoch": -1}, "the number of steps must be >= 0. Received: -1"),
        ({"validation_split": 2.0}, "`validation_split` must be a share"),
        ({"epochs": "3"}, "`epochs` must be an integer. Received: '3'"),
        ({"callbacks": [1]}, "`callbacks` must hold instances"),
    ],
)
def test_a_number_out_of_range_is_named(rows, options, said):
    """What `fit` cannot do is told by the argument, before any step."""
    model = dense()
    with pytest.raises((ValueError, TypeError), match=said):
        fs.fit(model, *rows, verbose=0, **options)
    assert int(model.optimizer.iterations) == 0
