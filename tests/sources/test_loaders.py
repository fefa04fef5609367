"""Loaders of other libraries and data sets with workers: the numbers of arrays, nothing drawn twice.

The oracle is `keras.Model.fit` on the arrays of the same rows.
"""

import gc
import importlib
import multiprocessing
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import pytest

import fitstep as fs
from tests.sources.runs import BATCH, CLOSE, Items, dense, endless, lazy

pytestmark = [
    pytest.mark.usefixtures("equal_programs_compiled_once"),
    # JAX warns of every fork; the children here touch neither JAX nor Keras.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
    pytest.mark.filterwarnings(
        r"ignore:.*use of fork\(\) may lead to deadlocks:DeprecationWarning"
    ),
]


class Rows:
    """Single rows by index, as torch and Grain ask for them; notes in `drawn` which."""

    def __init__(self, x, y, drawn=None, failing=None):
        self.x, self.y, self.drawn, self.failing = x, y, drawn, failing

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.drawn is not None:
            self.drawn.append(int(index))
        if index == self.failing:
            raise OSError("the disk")
        return self.x[index], self.y[index]


def batches_of(rows, times=1):
    """Batches of rows, each row read when its batch is; `times` passes, or None for no end."""
    done = 0
    while times is None or done < times:
        for start in range(0, len(rows), BATCH):
            pairs = [rows[index] for index in range(start, min(start + BATCH, len(rows)))]
            yield tuple(np.stack(part) for part in zip(*pairs, strict=True))
        done += 1


class ItemsOfRows(keras.utils.PyDataset):
    """Batches of rows by index; without an end if `times` is None."""

    def __init__(self, rows, times=1, **kwargs):
        super().__init__(**kwargs)
        self.rows, self.times = rows, times

    @property
    def num_batches(self):
        return None if self.times is None else -(-len(self.rows) // BATCH)

    def __getitem__(self, index):
        start = index * BATCH % (-(-len(self.rows) // BATCH) * BATCH)
        stop = min(start + BATCH, len(self.rows))
        pairs = [self.rows[i] for i in range(start, stop)]
        return tuple(np.stack(part) for part in zip(*pairs, strict=True))


def items(**options):
    return lambda _, rows, times: ItemsOfRows(rows, times, **options)


def torch_items(**options):
    def source(torch, rows, times):
        class Set(torch.utils.data.Dataset):
            def __len__(self):
                return len(rows)

            def __getitem__(self, index):
                return rows[index]

        if times is None:
            return None
        return torch.utils.data.DataLoader(Set(), batch_size=BATCH, **options)

    return source


def torch_stream(**options):
    def source(torch, rows, times):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                worker = torch.utils.data.get_worker_info()
                mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
                for index, batch in enumerate(batches_of(rows, times)):
                    if index % workers == mine:
                        yield batch

        return torch.utils.data.DataLoader(Stream(), batch_size=None, **options)

    return source


def grain_map(grain, rows, times):
    return grain.MapDataset.source(rows).batch(BATCH) if times else None


def grain_iterator(grain, rows, times):
    plain = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return grain.MapDataset.source(rows).to_iter_dataset(plain).batch(BATCH) if times else None


def grain_map_of_batches(grain, rows, times):
    """Without an end: batches as elements, so that an epoch ends within a pass as in the others."""
    made = grain.MapDataset.source(list(batches_of(Rows(rows.x, rows.y))))
    return made.repeat(times)


def grain_loader(workers=0):
    def source(grain, rows, times):
        if not times:
            return None
        if workers:
            importlib.import_module("absl.flags").FLAGS.mark_as_parsed()  # Grain asks for one
        return grain.DataLoader(
            data_source=list(zip(rows.x, rows.y, strict=True)) if workers else rows,
            sampler=grain.samplers.SequentialSampler(len(rows), grain.sharding.NoSharding()),
            operations=[grain.transforms.Batch(BATCH)] if not workers else [],
            worker_count=workers,
            read_options=grain.ReadOptions(num_threads=1, prefetch_buffer_size=1),
        )

    return source


def tensorflow_slices(tensorflow, rows, times):
    data = tensorflow.data.Dataset.from_tensor_slices((rows.x, rows.y)).batch(BATCH)
    return data if times else data.repeat()


def tensorflow_generator(tensorflow, rows, times):
    kinds = tuple(tensorflow.TensorSpec((None, *part.shape[1:])) for part in (rows.x, rows.y))
    return tensorflow.data.Dataset.from_generator(
        lambda: batches_of(rows, times), output_signature=kinds
    )


class Kind(NamedTuple):
    """A kind of source.

    Attributes:
        library: what it needs.
        make: from the library, the rows and the number of passes; None where there is no such one.
        ahead: how many batches it may read ahead of the steps by its own settings; None: all.
        sees: whether draws and failures happen in this process.
    """

    library: str | None
    make: Callable
    ahead: int | None = 0
    sees: bool = True


KINDS = {
    "items": Kind(None, items(workers=0)),
    "items, a thread": Kind(None, items(workers=1)),
    "items, 2 threads": Kind(None, items(workers=2, max_queue_size=2), ahead=3),
    "items, 2 processes": Kind(
        None, items(workers=2, use_multiprocessing=True, max_queue_size=2), sees=False
    ),
    "torch, items": Kind("torch", torch_items()),
    "torch, items, 2 processes": Kind("torch", torch_items(num_workers=2), sees=False),
    "torch, stream": Kind("torch", torch_stream()),
    "torch, stream, 2 processes": Kind("torch", torch_stream(num_workers=2), sees=False),
    "Grain, map": Kind("grain", grain_map, ahead=17),
    "Grain, map of batches": Kind("grain", grain_map_of_batches, sees=False),
    "Grain, iterator": Kind("grain", grain_iterator),
    "Grain, loader": Kind("grain", grain_loader(), ahead=1),
    "tf.data, slices": Kind("tensorflow", tensorflow_slices, sees=False),
    "tf.data, generator": Kind("tensorflow", tensorflow_generator, ahead=2),
}


def source_of(kind, rows, times=1):
    library = None
    if kind.library:
        library = pytest.importorskip(kind.library, reason=f"{kind.library} is not installed")
    source = kind.make(library, rows, times)
    if source is None:
        pytest.skip("has no such form")
    return source


def every_kind(names=None):
    return pytest.mark.parametrize(
        "kind", [pytest.param(KINDS[name], id=name) for name in names or KINDS]
    )


def seen():
    return every_kind([name for name, kind in KINDS.items() if kind.sees])


def seeded(build):
    keras.utils.set_random_seed(21)
    return build()


def of_arrays(build, x, y, **options):
    """The run of stock Keras on the arrays."""
    model = seeded(build)
    history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **options)
    return history.history, model


def assert_same(history, model, expected):
    losses, stock = expected
    assert list(history.history) == list(losses)
    for key, values in losses.items():
        np.testing.assert_allclose(history.history[key], values, **CLOSE, err_msg=key)
    for got, want in zip(model.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, **CLOSE)


@every_kind()
@pytest.mark.parametrize("build", [dense, lazy])
def test_a_source_gives_the_run_of_its_arrays(rows, kind, build):
    """Two epochs with a partial batch: losses, metrics and weights of arrays; and not a word."""
    model = seeded(build)
    history = fs.fit(model, source_of(kind, Rows(*rows)), epochs=2, shuffle=False, verbose=0)
    assert_same(history, model, of_arrays(build, *rows, epochs=2))


@every_kind()
def test_a_source_evaluates_predicts_and_validates_as_its_arrays(rows, kind):
    """The numbers of `evaluate`, `predict` and of validation in two epochs are those of arrays."""
    model = dense()
    np.testing.assert_allclose(
        fs.evaluate(model, source_of(kind, Rows(*rows)), verbose=0),
        model.evaluate(*rows, verbose=0),
        **CLOSE,
    )
    np.testing.assert_allclose(
        fs.predict(model, source_of(kind, Rows(*rows)), verbose=0),
        model.predict(rows[0], verbose=0),
        **CLOSE,
    )
    model = seeded(dense)
    validation = source_of(kind, Rows(*rows))
    history = fs.fit(
        model, *rows, batch_size=BATCH, epochs=2, shuffle=False, verbose=0,
        validation_data=validation,
    )  # fmt: skip
    assert_same(history, model, of_arrays(dense, *rows, epochs=2, validation_data=rows))


@every_kind()
def test_an_epoch_of_steps_goes_on_where_the_last_one_ended(rows, kind):
    """4 steps an epoch of a source with 3 batches a pass: epochs end within passes."""
    source = source_of(kind, Rows(*rows), times=None)
    model, stock = seeded(dense), seeded(dense)
    expected = stock.fit(endless(*rows), steps_per_epoch=4, epochs=3, shuffle=False, verbose=0)
    history = fs.fit(model, source, steps_per_epoch=4, epochs=3, shuffle=False, verbose=0)
    assert_same(history, model, (expected.history, stock))


@every_kind()
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_more_steps_than_the_source_has_make_no_batch_twice(rows, kind):
    """Of an epoch of 5 steps, a source of 3 batches gives 3, and a warning."""
    model = seeded(dense)
    history = fs.fit(
        model, source_of(kind, Rows(*rows)), steps_per_epoch=5, shuffle=False, verbose=0
    )
    assert int(model.optimizer.iterations) in (3, 5)  # 5: the map of Grain here has no end
    if int(model.optimizer.iterations) == 3:
        assert_same(history, model, of_arrays(dense, *rows))


@seen()
@pytest.mark.parametrize("build", [dense, lazy])
def test_each_row_is_drawn_once_an_epoch(rows, kind, build):
    """Looking at the first batch draws none but it, and that is not drawn again, in any epoch."""
    drawn = []
    source = source_of(kind, Rows(*rows, drawn))
    fs.fit(build(), source, epochs=2, shuffle=False, verbose=0)
    first = [*range(BATCH)] if isinstance(source, keras.utils.PyDataset) else []
    # Keras tells a `PyDataset` that the epoch ended with the look, upon which it may reshuffle.
    assert sorted(drawn) == sorted(first + 2 * [*range(70)])


@seen()
def test_no_more_is_drawn_than_the_steps_need(rows, kind):
    """Two steps of a hundred batches draw two, and what the source itself reads ahead."""
    x, y = (np.concatenate([part] * 46)[: 100 * BATCH] for part in rows)
    drawn = []
    source = source_of(kind, Rows(x, y, drawn))
    fs.fit(dense(), source, steps_per_epoch=2, shuffle=False, verbose=0)
    time.sleep(0.1)  # for threads that read ahead
    looked = BATCH if isinstance(source, keras.utils.PyDataset) else 0
    assert 2 * BATCH <= len(drawn) - looked <= (2 + kind.ahead) * BATCH


# --- failures ---------------------------------------------------------------------------------


def running():
    """The threads and processes that are there, JAX's and Keras's own service threads aside."""
    return {t for t in threading.enumerate() if not t.name.startswith("ThreadPoolExecutor")} | set(
        multiprocessing.active_children()
    )


def left_over(before):
    """What is still running that was not before, after half a minute at most."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        gc.collect()
        if not (running() - before):
            return set()
        time.sleep(0.05)
    return running() - before


@every_kind([name for name in KINDS if name not in ("Grain, map of batches", "tf.data, slices")])
def test_an_error_of_the_source_comes_through_and_the_model_is_whole(rows, kind):
    """Row 40 fails: the user's own error with its line, one step made, and the model trains on."""
    before = running()
    model = seeded(dense)
    source = source_of(kind, Rows(*rows, failing=40))
    with pytest.raises(Exception, match="the disk") as caught:
        fs.fit(model, source, shuffle=False, verbose=0)
    if kind.library != "tensorflow":  # which makes an error of its own of it
        assert type(caught.value) is OSError
        text = "".join(traceback.format_exception(caught.value))
        assert re.search(r'raise OSError\("the disk"\)', text)
    _, stock = of_arrays(dense, *(part[:BATCH] for part in rows))
    assert int(model.optimizer.iterations) == 1
    for got, want in zip(model.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, **CLOSE)
    fs.fit(model, *rows, verbose=0)
    del source
    if kind.library:
        del caught  # the loader's own frames hold its threads and processes
    assert not left_over(before)


class Interrupting(keras.callbacks.Callback):
    """Presses Ctrl-C, or raises an error, after the second step."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            if self.error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            else:
                raise self.error


@every_kind()
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, OSError])
def test_no_thread_or_process_outlives_a_run(rows, kind, error):
    """Neither after a full run nor after Ctrl-C or an error whose traceback is still held."""
    before = running()
    x, y = (np.concatenate([part] * 10) for part in rows)
    source = source_of(kind, Rows(x, y))
    model = dense()
    if error is None:
        fs.fit(model, source, steps_per_epoch=4, epochs=2, shuffle=False, verbose=0)
    else:
        with pytest.raises(error) as caught:
            fs.fit(model, source, shuffle=False, verbose=0, callbacks=[Interrupting(error)])
        assert caught.value is not None
        assert int(model.optimizer.iterations) == 2
    assert not left_over(before)


def test_a_failure_ends_the_workers_of_the_validation_too(rows):
    """A validation that has batches left has its workers ended with the run that fails."""
    before = running()
    x, y = (np.concatenate([part] * 10) for part in rows)
    validation = Items(x, y, workers=2, max_queue_size=2)

    def fail(epoch, logs):
        if epoch == 1:
            raise OSError("the disk")

    with pytest.raises(OSError, match="the disk") as caught:
        fs.fit(
            dense(), x, y, epochs=3, verbose=0, validation_data=validation, validation_steps=2,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=fail)],
        )  # fmt: skip
    assert caught.value is not None
    assert not left_over(before)


# --- memory -----------------------------------------------------------------------------------


def refilled(rows):
    """Batches in one pair of buffers, which are overwritten as soon as the next one is asked for."""
    x, y = (np.empty((BATCH, *part.shape[1:]), part.dtype) for part in rows)
    for start in range(0, 64, BATCH):
        x[:], y[:] = (part[start : start + BATCH] for part in rows)
        yield x, y
        x[:], y[:] = 1e3, -1e3


def refilling_torch(torch, rows):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            for x, y in refilled(rows):
                yield torch.from_numpy(x), torch.from_numpy(y)

    return torch.utils.data.DataLoader(Stream(), batch_size=None)


def refilling_grain(grain, rows):
    class Stream(grain.IterDataset):
        def __init__(self):
            super().__init__()

        def __iter__(self):
            return Iterator()

    class Iterator(grain.DatasetIterator):
        def __init__(self):
            super().__init__()
            self.batches = refilled(rows)

        def __next__(self):
            return next(self.batches)

        def get_state(self):
            return {}

        def set_state(self, state):
            del state

    return Stream()


class OneBuffer(Items):
    """A `PyDataset` that fills one pair of arrays again for each item."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        if not hasattr(self, "buffers"):
            self.buffers = x.copy(), y.copy()
        self.buffers[0][:], self.buffers[1][:] = x, y
        return self.buffers


REFILLING = {
    "torch": ("torch", refilling_torch),
    "Grain": ("grain", refilling_grain),
    "items": (None, lambda _, rows: OneBuffer(rows[0][:64], rows[1][:64], workers=0)),
    "items, processes": (
        None,
        lambda _, rows: OneBuffer(rows[0][:64], rows[1][:64], workers=2, use_multiprocessing=True),
    ),
}


@pytest.mark.parametrize("kind", REFILLING)
@pytest.mark.parametrize("stride", [1, 2])
def test_a_source_that_refills_one_buffer_trains_on_what_it_yielded(rows, kind, stride):
    """Batches that share their memory give the numbers of fresh arrays, two steps at once too."""
    library, make = REFILLING[kind]
    module = pytest.importorskip(library, reason=f"{library} is not installed") if library else None
    model = seeded(dense)
    history = fs.fit(
        model, make(module, rows), epochs=2, shuffle=False, verbose=0, steps_per_execution=stride
    )
    assert_same(history, model, of_arrays(dense, *(part[:64] for part in rows), epochs=2))


# --- forms of single libraries ----------------------------------------------------------------


def test_torch_may_yield_dicts_and_single_tensors(rows):
    """A tensor, or a dict of tensors, is `x`; stock Keras takes the dict's keys for the batch."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, _ = rows
    model = dense()
    expected = model.predict(x, verbose=0)
    loader = torch.utils.data.DataLoader(torch.from_numpy(x), batch_size=BATCH)
    np.testing.assert_allclose(fs.predict(model, loader, verbose=0), expected, **CLOSE)
    inputs = keras.Input((5,), name="values")
    named = keras.Model({"values": inputs}, model(inputs))
    loader = torch.utils.data.DataLoader([{"values": row} for row in x], batch_size=BATCH)
    np.testing.assert_allclose(fs.predict(named, loader, verbose=0), expected, **CLOSE)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("library", ["torch", "tensorflow"])
def test_tensors_are_arrays(rows, library, dtype):
    """Tensors of other libraries as x and y are arrays, as in Keras."""
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    tensor = module.from_numpy if library == "torch" else module.constant
    model = seeded(dense)
    history = fs.fit(
        model, *(tensor(part.astype(dtype)) for part in rows),
        batch_size=BATCH, shuffle=False, verbose=0,
    )  # fmt: skip
    assert_same(history, model, of_arrays(dense, *rows))


def test_a_loader_of_hugging_face_rows(rows):
    """Torch's loader collates rows of a data set by itself; a function makes pairs of them."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    data = datasets.Dataset.from_dict({"image": rows[0], "label": rows[1]}).with_format("torch")
    collate = torch.utils.data.default_collate
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=BATCH,
        collate_fn=lambda found: (lambda b: (b["image"], b["label"]))(collate(found)),
    )
    model = seeded(dense)
    history = fs.fit(model, loader, epochs=2, shuffle=False, verbose=0)
    assert_same(history, model, of_arrays(dense, *rows, epochs=2))


def test_workers_of_torch_may_persist(rows):
    """A loader whose workers persist keeps them between epochs, and gives them up when it goes."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    before = running()
    loader = torch_items(num_workers=2, persistent_workers=True)(torch, Rows(*rows), 1)
    model = seeded(dense)
    history = fs.fit(model, loader, epochs=2, shuffle=False, verbose=0)
    assert_same(history, model, of_arrays(dense, *rows, epochs=2))
    del loader
    assert not left_over(before)


def test_workers_of_grain(rows):
    """Grain's loader with two processes, each of which reads its share of the elements."""
    grain = pytest.importorskip("grain", reason="grain is not installed")
    x, y = rows
    source = grain_loader(workers=2)(
        grain, Rows(x[:64].reshape(2, 32, 5), y[:64].reshape(2, 32, 1)), 1
    )
    model = seeded(dense)
    history = fs.fit(model, source, shuffle=False, verbose=0)
    assert_same(history, model, of_arrays(dense, x[:64], y[:64]))


@pytest.mark.parametrize("library", ["torch", "grain", "tensorflow"])
def test_a_loader_without_a_batch_is_named(library):
    """A loader that has no row is an error that says so, and the model is as it was."""
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    nothing = Rows(np.empty((0, 5), "float32"), np.empty((0, 1), "float32"))
    make = {"torch": torch_stream(), "grain": grain_iterator, "tensorflow": tensorflow_slices}
    for build in (dense, lazy):
        model = build()
        with pytest.raises(fs.DataError, match="has no batch"):
            fs.fit(model, make[library](module, nothing, 1), shuffle=False, verbose=0)


def test_keras_checks_the_other_arguments_without_drawing(rows):
    """Targets beside a loader of Grain are Keras's error, and no row has been read."""
    grain = pytest.importorskip("grain", reason="grain is not installed")
    drawn = []
    source = grain_map(grain, Rows(*rows, drawn), 1)
    with pytest.raises(ValueError, match=r"grain\.Dataset and grain\.DataLoader"):
        fs.fit(dense(), source, rows[1], verbose=0)
    with pytest.warns(UserWarning, match=r"`shuffle=True` was passed.*grain"):
        fs.fit(dense(), source, verbose=0)
    assert sorted(drawn) == [*range(70)]
