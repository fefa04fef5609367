"""Batches from whatever `fit` takes, through Keras's own adapters, never in foreign memory.

JAX on a CPU aliases the memory of a NumPy array that it is handed, and runs asynchronously: a
source that refills its buffer would change the batch under a running step. So what a source
yields is copied, and slices of the user's arrays are too.
"""

import types
from collections.abc import Callable, Iterator
from numbers import Number
from typing import Any

import jax
import keras
import numpy as np
from keras import tree
from keras.src.backend.jax.trainer import JAXEpochIterator
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter,
    can_convert_arrays,
)
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.utils.rng_utils import get_random_seed

from fitstep._errors import DataError
from fitstep._keras._streams import Stream, stand_in, stream
from fitstep._keras._workers import in_order
from fitstep.data._tables import as_arrays


def global_seed() -> int | None:
    """The seed given to `keras.utils.set_random_seed`, if any."""
    return get_random_seed()


def split(arrays: Any, validation_split: float) -> tuple[Any, Any]:
    """The last rows for validation, as Keras's `validation_split` takes them."""
    return train_validation_split(as_arrays(arrays), validation_split=validation_split)


def class_weights_as_sample_weights(y: Any, class_weight: Any) -> Any:
    (y,) = as_arrays((y,), ("y",))
    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


def _copied(leaf: Any) -> Any:
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def copied(batch: Any) -> Any:
    """The batch with its NumPy arrays in memory of their own."""
    return tree.map_structure(_copied, batch)


class Arrays(ArrayDataAdapter):
    """Keras's adapter for arrays, shuffled by a generator of its own.

    Keras shuffles with NumPy's global generator, which belongs to the user.

    Args:
        shuffle: True for rows over all, `"batch"` for rows within batches.
        rng: the generator; needed where `shuffle` is true.
    """

    def __init__(
        self,
        *args: Any,
        shuffle: Any = False,
        rng: np.random.Generator | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, shuffle=shuffle, **kwargs)
        self._rng = rng

    def _get_iterator(self, slice_and_convert_fn: Callable, inputs: Any) -> Iterator[Any]:
        for rows in self._rows():
            batch = tree.map_structure(
                lambda x, rows=rows: slice_and_convert_fn(x, indices=rows),
                inputs,
                none_is_leaf=False,
            )
            # Rows picked by index are new memory already; a slice is the user's.
            yield copied(batch) if isinstance(rows, slice) else batch

    def _rows(self) -> Iterator[Any]:
        """The rows of each batch, as a slice or as indices."""
        size, count = self._batch_size, self._num_samples
        batches = [(start, min(start + size, count)) for start in range(0, count, size)]
        if self._rng is None:
            yield from (slice(start, stop) for start, stop in batches)
        elif self._shuffle == "batch":
            for start, stop in batches:
                yield self._rng.permutation(stop - start) + start
        else:
            order = self._rng.permutation(count)
            yield from (order[start:stop] for start, stop in batches)


class Generated(DataAdapter):
    """A Python generator, of which no batch is drawn before a step needs it.

    Keras's adapter draws two at once.
    """

    def __init__(self, generator: Iterator[Any]):
        self._generator = generator
        self._waiting: list[Any] = []
        self.peek()

    def peek(self) -> Any:
        """The first batch, which stays the next one to be drawn."""
        if not self._waiting:
            for batch in self._generator:
                self._waiting.append(copied(_checked_tuple(batch)))
                break
            else:
                raise DataError(
                    "The generator is empty. It must yield at least one batch, a tuple (x,), "
                    "(x, y) or (x, y, sample_weight)."
                )
        return self._waiting[0]

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        yield from data_adapter_utils.get_jax_iterator(self._draw())

    def _draw(self) -> Iterator[Any]:
        while self._waiting:
            yield self._waiting.pop()
        for batch in self._generator:
            yield copied(_checked_tuple(batch))

    @property
    def num_batches(self) -> None:
        return None

    @property
    def batch_size(self) -> None:
        return None

    @property
    def has_partial_batch(self) -> None:
        return None

    @property
    def partial_batch_size(self) -> None:
        return None


def _checked_tuple(batch: Any) -> tuple[Any, ...]:
    if not isinstance(batch, tuple):
        raise DataError(
            "A generator must yield tuples: (x,), (x, y) or (x, y, sample_weight). "
            f"Received: {batch!r:.80} of type {type(batch).__name__}."
        )
    return as_arrays(batch)


class CopiedBatches(DataAdapter):
    """Another adapter, whose batches are copied as they are drawn."""

    def __init__(self, adapter: DataAdapter):
        self._adapter = adapter

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        for batch in self._adapter.get_jax_iterator():
            yield copied(batch)

    def on_epoch_begin(self) -> None:
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._adapter.on_epoch_end()

    @property
    def num_batches(self) -> int | None:
        return self._adapter.num_batches

    @property
    def batch_size(self) -> int | None:
        return self._adapter.batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        return self._adapter.has_partial_batch

    @property
    def partial_batch_size(self) -> int | None:
        return self._adapter.partial_batch_size


class Batches(JAXEpochIterator):
    """Keras's iterator over one epoch after another, one batch a step."""

    peeked = False
    _latest: Any = None  # the iterator of the running epoch

    def _get_iterator(self) -> Iterator[Any]:
        # On other devices Keras draws ahead, which a generator is not to notice.
        prompt = jax.default_backend() == "cpu" or isinstance(self.data_adapter, Generated)
        if keras.distribution.distribution() is None and prompt:
            self._latest = self.data_adapter.get_jax_iterator()
        else:
            self._latest = super()._get_iterator()
        return self._latest

    def _interrupted_warning(self) -> None:
        # A source of unknown length that starts anew has ended an epoch, not interrupted it.
        if self.steps_per_epoch or isinstance(self.data_adapter, Generated):
            super()._interrupted_warning()

    def close(self) -> None:
        """End what the source has running, e.g. workers, where a failure keeps its frames."""
        for iterator in (self._epoch_iterator, self._latest):
            if isinstance(iterator, types.GeneratorType):
                iterator.close()
        self._epoch_iterator = self._current_iterator = self._latest = None

    def first_batch(self) -> Any:
        """The first batch, for building the model; after a `reset` it is drawn again."""
        self.peeked = True
        if isinstance(self.data_adapter, Generated | Stream):
            first = self.data_adapter.peek()
            check_numbers(first)
            return next(iter(data_adapter_utils.get_jax_iterator([first])))
        for _, _, source in self:  # which tells the source that an epoch begins
            for batch in source:
                check_numbers(batch)
                return batch
            break
        raise DataError("The data has no batch: `x` is empty. Give at least one row.")


def batches(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: Any = False,
    class_weight: Any = None,
    rng: Callable[[], np.random.Generator] | None = None,
) -> Batches:
    """An iterator over the batches of any source that `keras.Model.fit` takes.

    Args:
        rng: makes the generator that shuffles arrays; asked for only where `shuffle` is true.

    Raises:
        DataError: for arrays without rows, or with text and the like where numbers belong.
    """
    if isinstance(x, Batches):
        return x
    x, y, sample_weight = as_arrays((x, y, sample_weight))
    for name, count in (("batch_size", batch_size), ("the number of steps", steps)):
        if count is not None and count < (1 if name == "batch_size" else 0):
            raise ValueError(f"{name} must be >= 1. Received: {count}.")
    if isinstance(x, DataAdapter):
        adapter = CopiedBatches(x)
    elif can_convert_arrays((x, y, sample_weight)):
        shapes = [array.shape for array in tree.flatten((x, y)) if array is not None]
        if () in shapes:
            raise DataError("`x` and `y` must have rows. Received: an array without dimensions.")
        rows = [shape[0] for shape in shapes]
        if not rows or 0 in rows:
            raise DataError(f"`x` and `y` must have at least one row. Received rows: {rows}.")
        check_numbers((x, y, sample_weight))
        _check_equal_rows(x, y, sample_weight)
        adapter = Arrays(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=steps,
            class_weight=class_weight,
            shuffle=shuffle,
            rng=rng() if shuffle and rng else None,
        )
    else:
        is_generator = isinstance(x, types.GeneratorType)
        # Keras checks the other arguments, but would draw two batches of some sources at once.
        adapter = data_adapters.get_data_adapter(
            x=(batch for batch in [(np.zeros(1),)]) if is_generator else stand_in(x),
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        adapter = (
            Generated(x) if is_generator else stream(x, adapter) or CopiedBatches(in_order(adapter))
        )
    return Batches(adapter, steps_per_epoch=steps, shuffle=False)


def on_devices(batch: Any) -> Any:
    """One batch of the user's, in memory of its own, distributed as Keras distributes it."""
    batch = tree.map_structure(_as_array, as_arrays(batch))
    if keras.distribution.distribution() is None:
        return batch
    from keras.src.backend.jax.trainer import _distribute_data

    return _distribute_data(batch)


def _as_array(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, jax.Array) or data_adapter_utils.is_jax_sparse(leaf):
        return leaf
    if data_adapter_utils.is_scipy_sparse(leaf):
        return data_adapter_utils.scipy_sparse_to_jax_sparse(leaf)
    return np.array(leaf)


def check_numbers(batch: Any) -> None:
    """Refuse what Keras and JAX cannot compute with; takes a batch or the arrays of a whole run.

    Raises:
        DataError: which array or column, and what stands in it.
    """
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    for name, part in zip(("x", "y", "sample_weight"), parts, strict=True):
        for path, leaf in tree.flatten_with_path(part):
            for column, values in _columns(leaf):
                where = "".join(f"[{step!r}]" for step in (*path, *column))
                if isinstance(values, np.ma.MaskedArray):
                    # JAX would take what the mask hides for numbers.
                    raise DataError(
                        f"`{name}{where}` is a masked array, of which the mask would be ignored. "
                        f"Fill the gaps first, e.g. with `{name}.filled(0)`."
                    )
                if not _is_numeric(values):
                    raise DataError(
                        f"`{name}{where}` must hold numbers. Received: dtype {values.dtype}, e.g. "
                        f"{_telling_value(values)!r:.80}. Convert numbers with `astype('float32')`; encode "
                        f"text, categories and dates first, e.g. with `pandas.get_dummies`."
                    )


def _check_equal_rows(x: Any, y: Any, sample_weight: Any) -> None:
    rows = {
        name: [array.shape[0] for array in tree.flatten(part) if array is not None]
        for name, part in (("x", x), ("y", y), ("sample_weight", sample_weight))
    }
    if len({count for counts in rows.values() for count in counts}) > 1:
        received = "; ".join(
            f"{name}: {', '.join(map(str, counts))}" for name, counts in rows.items() if counts
        )
        raise DataError(
            f"Data cardinality is ambiguous: all arrays must have equally many rows. "
            f"Received rows: {received}."
        )


def _columns(leaf: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """An array as it is, a table column by column."""
    if hasattr(leaf, "columns"):
        yield from (((name,), values) for name, values in leaf.items())
    else:
        yield (), leaf


def _is_numeric(values: Any) -> bool:
    try:
        keras.backend.standardize_dtype(getattr(values, "dtype", "float32"))
    except ValueError:
        return False
    return True


def _telling_value(values: Any) -> Any:
    """The first value that is no number, else the first."""
    flat = np.asarray(values).ravel().tolist()
    return next((value for value in flat if not isinstance(value, Number)), next(iter(flat), None))
