"""Tables and columns of polars, Arrow and Hugging Face among the user's data become arrays.

A library whose objects are here has been imported by the user: it is looked up, never imported.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

from fitstep._errors import DataError
from fitstep.data import _arrow, _huggingface, _polars

_READERS: dict[str, Callable[[Any, str], Any]] = {
    "polars.DataFrame": _polars.from_frame,
    "polars.Series": _polars.from_series,
    "pyarrow.Table": _arrow.from_table,
    "pyarrow.RecordBatch": _arrow.from_table,
    "pyarrow.Array": _arrow.from_column,
    "pyarrow.ChunkedArray": _arrow.from_column,
    "datasets.Dataset": _huggingface.from_dataset,
    "datasets.Column": _huggingface.from_column,
}
_LIBRARIES = ("polars", "pyarrow", "datasets")
_STREAM = (
    "is a stream of rows. Give a generator of its batches, `((batch['image'], batch['label']) for "
    "batch in dataset.with_format('numpy').batch(32).repeat(epochs))`, with `steps_per_epoch`."
)
# What is no table yet, and how the user makes one of it.
_REMEDIES = {
    "polars.LazyFrame": "is a query. Run it first: `{place}.collect()`.",
    "pyarrow.RecordBatchReader": "is a stream. Read it first: `{place}.read_all()`.",
    "pyarrow.Dataset": "is a set of files. Read it first: `{place}.to_table()`.",
    "datasets.IterableDataset": _STREAM,
    "datasets.IterableColumn": _STREAM,
    "datasets.DatasetDict": "holds several data sets. Give one of them: {splits}.",
    "datasets.IterableDatasetDict": "holds several data sets. Give one of them: {splits}.",
}


def as_arrays(
    parts: tuple[Any, ...], names: tuple[str, ...] = ("x", "y", "sample_weight")
) -> tuple[Any, ...]:
    """Of `(x, y, sample_weight)`, or fewer, what is a table or a column as a NumPy array.

    A table of numbers is (rows, columns), a column (rows,), a column of equally long lists (rows,
    length). Columns without nulls are not copied; so an array may be read-only. All else, and the
    containers around it, is given back as it is.

    Raises:
        DataError: for missing values, what is no number, lists of several lengths, and what is no
            table yet, each with its place.
    """
    if not any(library in sys.modules for library in _LIBRARIES):
        return parts
    return tuple(_converted(part, name) for name, part in zip(names, parts, strict=False))


def _converted(value: Any, place: str) -> Any:
    kind = _kind(value)
    if kind in _READERS:
        return _READERS[kind](value, place)
    if kind in _REMEDIES:
        splits = ", ".join(f"`{place}[{n!r}]`" for n in value) if isinstance(value, dict) else ""
        said = _REMEDIES[kind].format(place=place, splits=splits)
        raise DataError(f"`{place}` {said} Received: {type(value).__name__}.")
    if isinstance(value, dict):
        items = {key: _converted(item, f"{place}[{key!r}]") for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        changed = copy.copy(value)  # of the same kind, e.g. an OrderedDict
        changed.update(items)
        return changed
    if isinstance(value, list | tuple):
        items = [_converted(item, f"{place}[{index}]") for index, item in enumerate(value)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        make = getattr(type(value), "_make", type(value))  # of a named tuple
        return make(items)
    return value


def _kind(value: Any) -> str:
    """`library.Class` of what this module knows, whatever subclass of it the value is."""
    for parent in type(value).__mro__:
        name = f"{parent.__module__.partition('.')[0]}.{parent.__name__}"
        if name in _READERS or name in _REMEDIES:
            return name
    return ""
