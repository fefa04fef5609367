"""Tables of polars, Arrow and Hugging Face train as the NumPy arrays of their rows do in Keras."""

import datetime as dt
import decimal
import importlib.util
import subprocess
import sys
from collections import OrderedDict, namedtuple

import keras
import numpy as np
import pytest

import fitstep as fs
from fitstep.data._tables import as_arrays
from tests.sources.runs import CLOSE, dense, two_inputs, two_outputs, untouched

# Hugging Face gives tensors where torch is installed.
TENSORS = "torch" if importlib.util.find_spec("torch") else "numpy"

pl = pytest.importorskip("polars", reason="polars is not installed")
pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
hf = pytest.importorskip("datasets", reason="datasets is not installed")

pytestmark = pytest.mark.usefixtures("equal_programs_compiled_once")


def columns_of(x):
    return {f"c{index}": x[:, index] for index in range(x.shape[1])}


def arrow_table(x):
    return pa.table({name: pa.array(column) for name, column in columns_of(x).items()})


def hf_dataset(x):
    return hf.Dataset(arrow_table(x))


TABLES = {
    "polars": (lambda x: pl.DataFrame(columns_of(x)), lambda y: pl.Series(y)),
    "Arrow": (arrow_table, lambda y: pa.array(y)),
    "Arrow batch and chunks": (
        lambda x: arrow_table(x).to_batches()[0],
        lambda y: pa.chunked_array([y[:20], y[20:]]),
    ),
    "Hugging Face": (hf_dataset, lambda y: hf.Dataset.from_dict({"label": y})["label"]),
    "Hugging Face with a format": (
        lambda x: hf_dataset(np.c_[x, x]).with_format("numpy", columns=[f"c{i}" for i in range(5)]),
        lambda y: hf.Dataset.from_dict({"label": y}).with_format(TENSORS)["label"],
    ),
    "Hugging Face, rows in another order": (
        lambda x: hf_dataset(x[::-1]).select(range(len(x) - 1, -1, -1)),
        lambda y: hf.Dataset.from_dict({"label": y[::-1]}).select(range(len(y) - 1, -1, -1))[
            "label"
        ],
    ),
}


def equal_to_arrays(build, tables, arrays, **kwargs):
    """Train on tables by fitstep and on the arrays of the same rows by Keras; the runs are equal.

    `tables` and `arrays` hold x, y and the other arguments that are data.
    """
    results = []
    for train, data in ((keras.Model.fit, arrays), (fs.fit, tables)):
        keras.utils.set_random_seed(21)
        model = build()
        history = train(model, **data, shuffle=False, verbose=0, **kwargs)
        results.append((history.history, model))
    (stock, stock_model), (ours, our_model) = results
    assert list(ours) == list(stock)
    for key, values in stock.items():
        np.testing.assert_allclose(ours[key], values, **CLOSE, err_msg=key)
    for got, want in zip(our_model.get_weights(), stock_model.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, **CLOSE)
    return our_model


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", TABLES)
def test_a_table_trains_as_its_arrays_do(rows, kind, dtype):
    """A table as x, a column as y and as weights; the last rows validate; a partial batch."""
    table, column = TABLES[kind]
    x, y = rows[0].astype(dtype), rows[1][:, 0].astype(dtype)
    weights = np.linspace(0.5, 1.5, len(x))
    equal_to_arrays(
        dense,
        {"x": table(x), "y": column(y), "sample_weight": column(weights)},
        {"x": x, "y": y, "sample_weight": weights},
        validation_split=0.3,
        epochs=2,
    )


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_validates_evaluates_and_predicts(rows, kind):
    """Validation data, `evaluate` and `predict` of tables give the numbers of their arrays."""
    table, column = TABLES[kind]
    x, y = rows[0], rows[1][:, 0]
    model = equal_to_arrays(
        dense,
        {"x": x, "y": y, "validation_data": (table(x[:40]), column(y[:40]))},
        {"x": x, "y": y, "validation_data": (x[:40], y[:40])},
    )
    np.testing.assert_allclose(
        fs.evaluate(model, table(x), column(y), verbose=0),
        model.evaluate(x, y, verbose=0),
        **CLOSE,
    )
    np.testing.assert_allclose(
        fs.predict(model, table(x), verbose=0), model.predict(x, verbose=0), **CLOSE
    )


@pytest.mark.parametrize("kind", TABLES)
def test_one_batch_may_be_a_table(rows, kind):
    """`train_on_batch`, `test_on_batch` and `predict_on_batch` of an `fs.Model` take tables."""
    table, column = TABLES[kind]
    x, y = rows[0], (rows[1][:, 0] > 0).astype("float32")
    results = []
    for data in ((x, y), (table(x), column(y))):
        keras.utils.set_random_seed(21)
        model = fs.Sequential(dense().layers)
        model.compile("sgd", "mse")
        results.append(
            [
                model.train_on_batch(*data),
                model.train_on_batch(*data, class_weight={0: 1.0, 1: 3.0}),
                model.test_on_batch(*data),
                model.predict_on_batch(data[0]),
            ]
        )
    for got, want in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(got, want, **CLOSE)


def test_class_weights_apply_to_a_column(rows):
    """`class_weight` looks up the values of a column, too."""
    x, y = rows[0], (rows[1][:, 0] > 0).astype("int64")
    equal_to_arrays(
        dense,
        {"x": pl.DataFrame(columns_of(x)), "y": pl.Series(y)},
        {"x": x, "y": y},
        class_weight={0: 1.0, 1: 3.0},
    )


def test_tables_and_columns_in_dicts(rows):
    """Named inputs, targets and weights may each be a table or a column, of several libraries."""
    x, y = rows
    equal_to_arrays(
        two_inputs,
        {"x": {"a": pl.DataFrame(columns_of(x[:, :2])), "b": arrow_table(x[:, 2:])}, "y": y},
        {"x": {"a": x[:, :2], "b": x[:, 2:]}, "y": y},
        epochs=2,
    )
    positive, value = y[:, 0] > 0, y[:, 0]
    weights = np.linspace(0, 2, len(x))
    equal_to_arrays(
        two_outputs,
        {
            "x": hf_dataset(x),
            "y": {"sign": pl.Series(positive.astype("int8")), "value": pa.array(value)},
            "sample_weight": {"sign": weights, "value": pl.Series(weights)},
        },
        {
            "x": x,
            "y": {"sign": positive.astype("int8"), "value": value},
            "sample_weight": {"sign": weights, "value": weights},
        },
    )


def test_columns_in_a_list_and_lists_in_a_column(rows):
    """A list of columns is a list of inputs; equally long lists are one array of two dimensions."""
    x, y = rows

    def build():
        inputs = [keras.Input((1,)), keras.Input((4,))]
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.concatenate(inputs)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    rest = x[:, 1:].tolist()
    for one, lists in (
        (pl.Series(x[:, 0]), pl.Series(rest, dtype=pl.Array(pl.Float32, 4))),
        (pl.Series(x[:, 0]), pl.Series(rest, dtype=pl.List(pl.Float32))),
        (pa.array(x[:, 0]), pa.array(rest, pa.list_(pa.float32(), 4))),
        (hf_dataset(x)["c0"], hf.Dataset.from_dict({"rest": rest})["rest"]),
    ):
        equal_to_arrays(build, {"x": [one, lists], "y": y}, {"x": [x[:, 0], x[:, 1:]], "y": y})


def test_a_generator_may_yield_frames(rows):
    """Each batch of a generator may be a frame and a series."""
    x, y = rows[0], rows[1][:, 0]

    def source(make_x, make_y):
        for start in range(0, 70, 32):
            part = slice(start, start + 32)
            yield make_x(x[part]), make_y(y[part])

    equal_to_arrays(
        dense,
        {"x": source(lambda x: pl.DataFrame(columns_of(x)), pl.Series)},
        {"x": source(np.array, np.array)},
        steps_per_epoch=3,
    )


# --- shapes, dtypes, memory -------------------------------------------------------------------


SHAPES = {
    # a table or column, and the array that is made of it
    "whole numbers": (
        lambda: pl.DataFrame({"a": [1, 2], "b": [3, 4]}),
        np.array([[1, 3], [2, 4]], "int64"),
    ),
    "mixed numbers": (
        lambda: pl.DataFrame({"a": [1, 2], "b": [0.5, 1.0], "c": [True, False]}),
        np.array([[1, 0.5, 1], [2, 1, 0]], "float32"),
    ),
    "truth values": (lambda: pl.Series([True, False]), np.array([True, False])),
    "NaN is a number": (lambda: pl.Series([1.0, np.nan]), np.array([1.0, np.nan])),
    "one column": (lambda: pl.DataFrame({"a": [1, 2]}), np.array([[1], [2]], "int64")),
    "arrays in arrays": (
        lambda: pl.Series([[[1, 2]], [[3, 4]]], dtype=pl.Array(pl.Int8, (1, 2))),
        np.array([[[1, 2]], [[3, 4]]], "int8"),
    ),
    "lists in lists of a slice": (
        lambda: pa.array([[[1, 2]], [[3, 4]], [[5, 6]]], pa.list_(pa.list_(pa.int32())))[1:],
        np.array([[[3, 4]], [[5, 6]]], "int32"),
    ),
    "a slice of lists of one size": (
        lambda: pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int8(), 2))[1:],
        np.array([[3, 4], [5, 6]], "int8"),
    ),
    "tensors": (
        lambda: pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int8(), (2, 2)),
            pa.array([[1, 2, 3, 4]], pa.list_(pa.int8(), 4)),
        ),
        np.array([[[1, 2], [3, 4]]], "int8"),
    ),
    "arrays of Hugging Face": (
        lambda: hf.Dataset.from_dict(
            {"image": np.arange(12, dtype="uint8").reshape(2, 2, 3)},
            features=hf.Features({"image": hf.Array2D((2, 3), "uint8")}),
        ),
        np.arange(12, dtype="uint8").reshape(2, 2, 3),
    ),
    "a class of Hugging Face": (
        lambda: hf.Dataset.from_dict(
            {"label": [1, 0]}, features=hf.Features({"label": hf.ClassLabel(names=["no", "yes"])})
        )["label"],
        np.array([1, 0], "int64"),
    ),
    "a field of a column": (
        lambda: hf.Dataset.from_dict({"meta": [{"age": 3}, {"age": 4}]})["meta"]["age"],
        np.array([3, 4], "int64"),
    ),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_shapes_and_dtypes(kind):
    """A table is (rows, columns) of one dtype, a column keeps its own; nothing is rounded twice."""
    make, expected = SHAPES[kind]
    (got,) = as_arrays((make(),))
    assert isinstance(got, np.ndarray)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


def test_images_of_hugging_face_are_pixels():
    """Images of one size are one array of bytes."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 5, 3), "uint8")
    data = hf.Dataset.from_dict(
        {"image": [image.fromarray(p) for p in pixels]}, features=hf.Features({"image": hf.Image()})
    )
    for given in (data, data["image"], data.with_format("torch")["image"]):
        (got,) = as_arrays((given,))
        assert got.dtype == np.uint8
        np.testing.assert_array_equal(got, pixels)


def test_columns_without_nulls_are_not_copied():
    """The arrays of numbers and of lists lie in the memory of polars and Arrow."""
    numbers = pl.Series([1.0, 2.0, 3.0])
    lists = pl.Series([[1.0, 2.0]] * 3, dtype=pl.Array(pl.Float32, 2))
    arrow, chunked = pa.array([1.0, 2.0]), pa.chunked_array([[1, 2, 3]])
    arrow_lists = pa.array([[1.0, 2.0], [3.0, 4.0]])
    for given, memory in (
        (numbers, numbers.to_numpy()),
        (numbers.to_frame(), numbers.to_numpy()),
        (lists, lists.to_numpy()),
        (arrow, arrow.to_numpy()),
        (pa.table({"a": arrow}), arrow.to_numpy()),
        (chunked, chunked.chunk(0).to_numpy()),
        (arrow_lists, arrow_lists.values.to_numpy()),
        (hf.Dataset(pa.table({"a": arrow}))["a"], arrow.to_numpy()),
    ):
        (got,) = as_arrays((given,))
        assert np.shares_memory(got, memory)


def test_what_is_no_table_comes_back_as_it_is():
    """Other data and its containers are handed on, and containers keep their kind."""
    pair = namedtuple("pair", "left right")
    x = {"a": [np.ones(2), (1, None)], "b": pair(1, 2)}
    got = as_arrays((x, None))
    assert got[0] is x
    assert got[1] is None
    series = pl.Series([1, 2])
    ((ordered, named),) = as_arrays(((OrderedDict(b=series, a=1), pair(series, 2)),))
    assert list(ordered) == ["b", "a"]
    assert isinstance(ordered, OrderedDict)
    assert isinstance(named, pair)
    np.testing.assert_array_equal(named.left, [1, 2])


def test_the_tables_of_the_user_are_left_alone(rows):
    """Training does not write to a table."""
    frame = pl.DataFrame(columns_of(rows[0]))
    fs.fit(dense(), frame, pl.Series(rows[1][:, 0]), epochs=2, verbose=0)
    np.testing.assert_array_equal(frame.to_numpy(), rows[0])


def test_none_of_the_libraries_is_imported():
    """A script without tables does not load the libraries of tables."""
    script = (
        "import fitstep as fs, keras, numpy as np, sys\n"
        "sys.modules.update(pandas=None)\n"  # pandas itself may load pyarrow
        "model = keras.Sequential([keras.layers.Dense(1)]); model.compile('sgd', 'mse')\n"
        "fs.fit(model, np.ones((4, 2)), np.ones((4, 1)), verbose=0)\n"
        "print([name for name in ('polars', 'datasets') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


# --- what is no table of numbers --------------------------------------------------------------


def with_column(*values, **options):
    return pl.DataFrame({"c0": [1.0] * len(values), "age": pl.Series(values, **options)})


def hf_with(**columns):
    return hf.Dataset.from_dict({"c0": [1.0, 2.0], **columns})


REFUSED = {
    # x, and what the error must say of it
    "polars: a null among whole numbers": (
        lambda: with_column(1, None),
        r"`x\['age'\]` has 1 missing value \(null\)\..*fill_null",
    ),
    "polars: nulls among floating-point numbers": (
        lambda: with_column(None, None, dtype=pl.Float32),
        r"`x\['age'\]` has 2 missing values",
    ),
    "polars: a null in a list": (lambda: pl.Series([[1, 2], [3, None]]), "`x` has 1 missing value"),
    "polars: text": (
        lambda: with_column("old", "young"),
        r"`x\['age'\]` must hold numbers\. Received: dtype String, e\.g\. 'old'\..*encode text",
    ),
    "polars: a category": (
        lambda: with_column("old", "young", dtype=pl.Categorical),
        r"`x\['age'\]` must hold numbers\. Received: dtype Categorical",
    ),
    "polars: a date": (
        lambda: with_column(dt.date(2020, 1, 1)),
        r"`x\['age'\]` must hold numbers\. Received: dtype Date",
    ),
    "polars: a decimal": (
        lambda: with_column(decimal.Decimal("1.5")),
        r"`x\['age'\]` must hold numbers\. Received: dtype Decimal.*cast\(pl\.Float32\)",
    ),
    "polars: very long integers": (
        lambda: pl.Series([2**100], dtype=pl.Int128),
        "`x` must hold numbers. Received: dtype Int128",
    ),
    "polars: lists of several lengths": (
        lambda: pl.Series([[1, 2], [3]]),
        "`x` must hold lists of one length, at least 1. Received lengths: 1, 2",
    ),
    "polars: an empty list": (
        lambda: pl.Series([[1, 2], []], dtype=pl.List(pl.Int8)),
        "Received lengths: 0, 2",
    ),
    "polars: lists beside numbers": (
        lambda: with_column([1, 2], [3, 4]),
        r"`x\['age'\]` holds lists .* Received shape \(2,\) in each row",
    ),
    "polars: no columns": (lambda: pl.DataFrame(), "`x` has no columns"),
    "polars: no rows": (lambda: pl.DataFrame({"a": []}, schema={"a": pl.Int8}), "at least one row"),
    "polars: a query": (lambda: pl.LazyFrame({"a": [1]}), r"`x` is a query.*`x\.collect\(\)`"),
    "Arrow: a null": (
        lambda: pa.table({"age": [1, None]}),
        r"`x\['age'\]` has 1 missing value.*drop_null",
    ),
    "Arrow: a column of nulls": (lambda: pa.nulls(3), "`x` has 3 missing values"),
    "Arrow: text": (
        lambda: pa.table({"age": ["old"]}),
        r"`x\['age'\]` must hold numbers\. Received: dtype string, e\.g\. 'old'",
    ),
    "Arrow: a category": (
        lambda: pa.array(["old"]).dictionary_encode(),
        "`x` must hold numbers. Received: dtype dictionary",
    ),
    "Arrow: a time": (
        lambda: pa.array([dt.datetime(2020, 1, 1)]),  # noqa: DTZ001
        "`x` must hold numbers. Received: dtype timestamp",
    ),
    "Arrow: a decimal": (
        lambda: pa.array([decimal.Decimal("1.5")]),
        r"`x` must hold numbers. Received: dtype decimal128\(2, 1\)",
    ),
    "Arrow: lists of several lengths": (
        lambda: pa.chunked_array([[[1, 2]], [[3]]]),
        "Received lengths: 1, 2",
    ),
    "Arrow: a stream": (
        lambda: pa.table({"a": [1]}).to_reader(),
        r"`x` is a stream.*`x\.read_all\(\)`",
    ),
    "Hugging Face: text beside numbers": (
        lambda: hf_with(text=["a", "b"]),
        r"`x\['text'\]` must hold numbers\..*select_columns\(\[\.\.\.\]\).*`y=dataset\['label'\]`",
    ),
    "Hugging Face: a null": (
        lambda: hf_with(age=[1, None])["age"],
        r"`x` has 1 missing value.*dataset\.filter",
    ),
    "Hugging Face: a transform": (
        lambda: hf_with().with_transform(lambda batch: batch),
        r"`x\['c0'\]` comes from a data set with a transform.*dataset\.map",
    ),
    "Hugging Face: splits": (
        lambda: hf.DatasetDict(train=hf_with(), test=hf_with()),
        r"`x` holds several data sets\. Give one of them: `x\['train'\]`, `x\['test'\]`",
    ),
    "Hugging Face: a stream": (
        lambda: hf_with().to_iterable_dataset(),
        r"`x` is a stream of rows\. Give a generator of its batches.*Received: IterableDataset",
    ),
    "Hugging Face: a column of a stream": (
        lambda: hf_with().to_iterable_dataset()["c0"],
        "`x` is a stream of rows",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_table_of_numbers_is_refused_with_its_place(kind):
    """An error names the place, what stands there and the remedy, and the model is as it was."""
    make, said = REFUSED[kind]
    untouched(dense(), lambda m: fs.fit(m, make(), np.ones((2, 1)), verbose=0), fs.DataError, said)


def test_images_of_several_sizes_or_none_are_refused():
    """Images must be of one shape, and there in each row."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    small, large = (image.fromarray(np.zeros((n, 4, 3), "uint8")) for n in (4, 5))
    features = hf.Features({"image": hf.Image()})
    for images, said in (
        (
            [small, large],
            r"images of one shape\. Received: \(4, 4, 3\), \(5, 4, 3\)\..*dataset\.map",
        ),
        ([small, None], r"rows without an image"),
    ):
        data = hf.Dataset.from_dict({"image": images}, features=features)
        with pytest.raises(fs.DataError, match=said):
            as_arrays((data["image"],))


@pytest.mark.parametrize(
    ("verb", "place"), [("split", "x"), ("weight", "sample_weight"), ("valid", "x"), ("y", "y")]
)
def test_the_place_of_what_is_refused_is_named_wherever_it_stands(rows, verb, place):
    """Nulls in y, in the weights, in data that is split, and in validation data."""
    x, y = rows
    bad = pl.Series([None, 1.0] * 35)
    arguments = {
        "split": {"x": bad, "y": y, "validation_split": 0.5},
        "weight": {"x": x, "y": y, "sample_weight": bad},
        "valid": {"x": x, "y": y, "validation_data": (bad, y)},
        "y": {"x": x, "y": bad},
    }[verb]
    with pytest.raises(fs.DataError, match=f"`{place}` has 35 missing values"):
        fs.fit(dense(), **arguments, verbose=0)


def test_the_remedy_for_a_stream_of_hugging_face_works(rows):
    """A generator of the batches of an `IterableDataset`, as the error has it, trains."""
    x, y = rows
    data = hf.Dataset.from_dict({"image": x, "label": y[:, 0]}).to_iterable_dataset()
    epochs = 2
    batches = data.with_format("numpy").batch(32).repeat(epochs)
    equal_to_arrays(
        dense,
        {"x": ((b["image"], b["label"]) for b in batches), "steps_per_epoch": 3},
        {"x": x, "y": y[:, 0]},
        epochs=epochs,
    )
