"""Tables and arrays of Arrow as NumPy arrays, in Arrow's own memory where nothing has to change."""

import sys
from typing import Any

import numpy as np

from fitstep.data._columns import (
    Remedies,
    as_table,
    in_lists,
    missing,
    no_numbers,
    unequal,
    within,
)

REMEDIES = Remedies(
    fill="Fill them with `pyarrow.compute.fill_null`, or drop their rows with `drop_null()`.",
    numbers="Convert numbers with `cast('float32')`; encode text, categories and dates first.",
)


def from_table(table: Any, place: str) -> np.ndarray:
    """(rows, columns), or the one column's shape where it holds lists."""
    columns = zip(table.column_names, table.itercolumns(), strict=True)
    return as_table(
        place, {name: from_column(column, within(place, name)) for name, column in columns}
    )


def from_column(column: Any, place: str, remedies: Remedies = REMEDIES) -> np.ndarray:
    """(rows,), or (rows, length) of lists that are equally long; several chunks are joined."""
    if count := column.null_count:
        raise missing(place, count, remedies)
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    parts = [_from_chunk(chunk, place, remedies) for chunk in chunks if len(chunk)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return np.empty(0)
    if len({part.shape[1:] for part in parts}) > 1:
        raise unequal(place, [part.shape[1] for part in parts])
    return np.concatenate(parts)


def _from_chunk(array: Any, place: str, remedies: Remedies) -> np.ndarray:
    types = sys.modules["pyarrow"].types
    kind = array.type
    if hasattr(array, "storage"):  # an extension type, e.g. the arrays of Hugging Face
        if hasattr(array, "to_numpy_ndarray"):
            return array.to_numpy_ndarray()
        return _from_chunk(array.storage, place, remedies)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        values = array.flatten()
        widths = (
            [kind.list_size]
            if types.is_fixed_size_list(kind)
            else array.value_lengths().to_numpy(zero_copy_only=False)
        )
        return in_lists(place, from_column(values, place, remedies), len(array), widths)
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise no_numbers(place, kind, array[0].as_py(), remedies)
    return array.to_numpy(zero_copy_only=False)
