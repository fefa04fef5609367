"""Batches from whatever `fit` takes, through Keras's own adapters, never in foreign memory.

JAX on a CPU aliases the memory of a NumPy array that it is handed, and runs asynchronously: a
source that refills its buffer would change the batch under a running step. So what a source
yields is copied, and slices of the user's arrays are too.
"""

import types
from collections.abc import Callable, Iterable, Iterator
from numbers import Number
from typing import Any

import jax
import keras
import numpy as np
from keras import tree
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter,
    can_convert_arrays,
)
from keras.src.trainers.data_adapters.array_slicing import (
    NumpySliceable,
    convert_to_sliceable,
    train_validation_split,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.utils.rng_utils import get_random_seed

from fitstep._errors import DataError
from fitstep._keras._streams import Sized, stand_in, stream
from fitstep._keras._workers import in_order
from fitstep._warn import warn
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
        size, count, order = self._batch_size, self._num_samples, self.order()
        for start in range(0, count, size):
            rows = slice(start, min(start + size, count))
            yield rows if order is None else order[rows]

    def order(self) -> np.ndarray | None:
        """The rows of a pass in their order, anew for each; None if they stay as they are."""
        size, count = self._batch_size, self._num_samples
        if self._rng is None:
            return None
        if self._shuffle != "batch":
            return self._rng.permutation(count)
        starts = range(0, count, size)
        return np.concatenate([self._rng.permutation(min(size, count - s)) + s for s in starts])

    def is_dense(self) -> bool:
        """Whether all arrays can be gathered row by row."""
        return not any(
            data_adapter_utils.is_scipy_sparse(leaf)
            or data_adapter_utils.is_jax_sparse(leaf)
            or data_adapter_utils.is_tensorflow_sparse(leaf)
            or data_adapter_utils.is_tensorflow_ragged(leaf)
            for leaf in tree.flatten(self._inputs)
        )


class _Unsized(DataAdapter):
    """A source of which nothing is known beforehand."""

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


class Generated(_Unsized):
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


class Iterated(_Unsized):
    """An iterable of batches, such as a list or a loader of the user's, iterated anew each pass."""

    def __init__(self, iterable: Iterable[Any]):
        self._iterable = iterable

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        yield from data_adapter_utils.get_jax_iterator(map(_checked_tuple, self._iterable))


def iterated(data: Any) -> Any:
    """Any iterable of batches that `keras.Model.fit` does not know, as something that `source` does.

    An iterator is gone through once, another iterable once a pass. What Keras knows stays as it is.
    """
    in_tuples = isinstance(data, list) and bool(data) and all(isinstance(b, tuple) for b in data)
    if not in_tuples and (_is_known(data) or can_convert_arrays(data)):
        return data
    if isinstance(data, Iterator):
        return (batch for batch in data)
    return Iterated(data) if isinstance(data, Iterable) else data


def _is_known(data: Any) -> bool:
    return (
        isinstance(data, DataAdapter | keras.utils.PyDataset | types.GeneratorType)
        or data_adapters.is_tf_dataset(data)
        or data_adapters.is_torch_dataloader(data)
        or data_adapters.is_grain_dataset(data)
    )


def is_shuffled_by_rows(x: Any, *others: Any) -> bool:
    """Whether `shuffle` is ours to do: for arrays, and for a `PyDataset` that has a length."""
    if isinstance(x, keras.utils.PyDataset):
        return x.num_batches is not None
    return not isinstance(x, DataAdapter) and can_convert_arrays((x, *others))


def _checked_tuple(batch: Any) -> tuple[Any, ...]:
    if not isinstance(batch, tuple):
        raise DataError(
            "A batch must be a tuple: (x,), (x, y) or (x, y, sample_weight). "
            f"Received: {batch!r:.80} of type {type(batch).__name__}."
        )
    return as_arrays(batch)


class CopiedBatches(Sized):
    """Another adapter, whose batches are copied as they are drawn."""

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        for batch in self._adapter.get_jax_iterator():
            yield copied(batch)

    def listens(self) -> bool:
        """Whether the adapter does anything when an epoch ends."""
        return type(self._adapter).on_epoch_end is not DataAdapter.on_epoch_end

    def on_epoch_begin(self) -> None:
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._adapter.on_epoch_end()


class ArraySource:
    """Arrays of equally many rows, which may be gathered in any order and number.

    Attributes:
        rows, batch_size, num_batches: of one pass; the last batch may have fewer rows.
        ahead: whether batches may be drawn before they are needed.
        once: whether there is only one pass.
        listens: whether it is told of the ends of passes, and may shuffle then.
        kinds: for the feed, what it knows of batches by their number of rows.
    """

    ahead = True
    once = False
    listens = False

    def __init__(self, adapter: Arrays):
        self.rows: int = adapter._num_samples
        self.batch_size = min(adapter._batch_size, self.rows)
        self.num_batches: int = adapter._size
        self.kinds: dict[int, Any] = {}
        self._adapter = adapter
        sliceables = convert_to_sliceable(adapter._inputs, target_backend="jax")
        self._columns, self._structure = jax.tree.flatten(sliceables)

    def begin(self) -> None:
        """A pass begins."""

    def end(self) -> None:
        """A pass ends."""

    def order(self) -> np.ndarray | None:
        """The rows of a pass in their order, anew for each; None if they stay as they are."""
        return self._adapter.order()

    def first(self, rows: int) -> tuple[list[np.ndarray], Any]:
        """The first rows, flattened."""
        leaves = [column.convert_to_jax_compatible(column[:rows]) for column in self._columns]
        return leaves, self._structure

    def gathered(
        self, rows: Any, count: int, room: int, empty: Callable[..., np.ndarray]
    ) -> list[np.ndarray]:
        """Rows, a slice or indices, in new memory, with room for more behind them.

        Args:
            count: the number of rows.
            empty: makes an array of a shape and dtype.
        """
        gathered = []
        for column in self._columns:
            if isinstance(column, NumpySliceable):
                array = column.array
                leaf = empty((count + room, *array.shape[1:]), _canonical(array.dtype))
                if isinstance(rows, slice):
                    leaf[:count] = array[rows]
                elif leaf.dtype == array.dtype and array.flags.c_contiguous:
                    # "clip" is not slowed down by a check; `take` copies all of a view first.
                    np.take(array, rows, axis=0, out=leaf[:count], mode="clip")
                else:
                    leaf[:count] = array[rows]
            else:
                part = column.convert_to_jax_compatible(column[rows])
                leaf = empty((count + room, *part.shape[1:]), _canonical(part.dtype))
                leaf[:count] = part
            gathered.append(leaf)
        return gathered


class BatchSource:
    """A source that yields batches one by one, through one of Keras's adapters.

    Attributes:
        num_batches: of one pass, if that is known.
        ahead, once, listens: as of an `ArraySource`.
        checked, stacked: for the feed, the kinds of batches that were looked at, and stacked.
    """

    def __init__(self, adapter: DataAdapter, *, ahead: bool):
        self.ahead = ahead
        self.once = isinstance(adapter, Generated)
        self.listens = isinstance(adapter, CopiedBatches) and adapter.listens()
        self.checked: set[Any] = set()
        self.stacked: set[Any] = set()
        self._adapter = adapter

    @property
    def num_batches(self) -> int | None:
        return self._adapter.num_batches

    def begin(self) -> None:
        """A pass begins."""
        self._adapter.on_epoch_begin()

    def end(self) -> None:
        """A pass ends."""
        self._adapter.on_epoch_end()

    def batches(self) -> Iterator[Any]:
        """The batches of one pass."""
        return iter(self._adapter.get_jax_iterator())


Source = ArraySource | BatchSource


def source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: Any = False,
    class_weight: Any = None,
    rng: Callable[[], np.random.Generator] | None = None,
) -> Source:
    """The batches of anything that `keras.Model.fit` takes.

    Args:
        steps: the batches of an epoch, from which Keras takes the size of a batch if none is given.
        rng: makes the generator that shuffles arrays; asked for only where `shuffle` is true.

    Raises:
        DataError: for arrays without rows, or with text and the like where numbers belong.
    """
    x, y, sample_weight = as_arrays((x, y, sample_weight))
    if isinstance(x, Iterator) and not _is_known(x):
        x = (batch for batch in x)
    for name, count in (("batch_size", batch_size), ("the number of steps", steps)):
        least = 1 if name == "batch_size" else 0
        if count is not None and count < least:
            raise ValueError(f"{name} must be >= {least}. Received: {count}.")
    if isinstance(x, Iterated) and class_weight is not None:
        raise ValueError(
            f"`class_weight` is not supported for batches from an iterable. Give each batch its "
            f"`sample_weight`. Received: class_weight={class_weight}"
        )
    if isinstance(x, DataAdapter):
        return BatchSource(CopiedBatches(x), ahead=False)
    if can_convert_arrays((x, y, sample_weight)):
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
        # Rows of sparse arrays can't be stacked.
        return ArraySource(adapter) if adapter.is_dense() else BatchSource(adapter, ahead=True)
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
    if is_generator:
        return BatchSource(Generated(x), ahead=False)
    if (loader := stream(x, adapter)) is not None:
        return BatchSource(loader, ahead=False)
    adapter = CopiedBatches(in_order(adapter))
    return BatchSource(adapter, ahead=isinstance(x, keras.utils.PyDataset))


def limited_steps(steps: int | None) -> int | None:
    """The steps of an epoch, or the lower limit that Keras takes from its environment."""
    limit = keras.config.max_steps_per_epoch()
    if limit and (not steps or limit < steps):
        warn(f"Limiting steps_per_epoch to {limit}")
        return limit
    return steps


def _canonical(dtype: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(dtype)


def own(batch: Any) -> Any:
    """One batch of the user's, in memory of its own."""
    return tree.map_structure(_as_array, as_arrays(batch))


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
    for name, part in zip(("y", "sample_weight"), parts[1:], strict=True):
        if any(map(data_adapter_utils.is_scipy_sparse, tree.flatten(part))):
            raise DataError(
                f"`{name}` is a sparse matrix, which only `x` may be. Give `{name}.toarray()`."
            )
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
