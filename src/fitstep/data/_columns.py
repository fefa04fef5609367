"""Columns become one array, or an error that says which column is in the way.

A place is how the user would write the value: `x`, `x['age']`, `y[0]`.
"""

from typing import Any, NamedTuple

import keras
import numpy as np

from fitstep._errors import DataError


class Remedies(NamedTuple):
    """What a library's users write against missing values, and against what is no number."""

    fill: str
    numbers: str


def within(place: str, name: Any) -> str:
    return f"{place}[{name!r}]"


def missing(place: str, count: int, remedies: Remedies) -> DataError:
    """Nulls, which would become NaN, or make whole numbers floating-point ones."""
    what = "1 missing value (null)" if count == 1 else f"{count} missing values (nulls)"
    return DataError(f"`{place}` has {what}. {remedies.fill}")


def no_numbers(place: str, dtype: Any, example: Any, remedies: Remedies) -> DataError:
    """Text, dates, decimals and the like, with a value that shows it."""
    return DataError(
        f"`{place}` must hold numbers. Received: dtype {dtype}, e.g. {example!r:.80}. "
        f"{remedies.numbers}"
    )


def unequal(place: str, lengths: Any) -> DataError:
    """Lists that make no rectangle."""
    received = ", ".join(map(str, sorted(set(lengths))[:5]))
    return DataError(
        f"`{place}` must hold lists of one length, at least 1. Received lengths: {received}. Pad or "
        "cut them first, e.g. with `keras.utils.pad_sequences`."
    )


def in_lists(place: str, values: np.ndarray, rows: int, widths: Any) -> np.ndarray:
    """The values of all lists, one after another, as one row for each list.

    Raises:
        DataError: where the lists are empty or of several lengths.
    """
    found = {int(width) for width in np.unique(widths)}
    if rows and (len(found) != 1 or 0 in found):
        raise unequal(place, found)
    return values.reshape(rows, *found, *values.shape[1:]) if rows else values[:0]


def as_table(place: str, columns: dict[str, np.ndarray]) -> np.ndarray:
    """One array, (rows, columns), of the dtype that holds them all.

    Where a column is floating-point, all become Keras's `floatx`, as of a pandas frame. A single
    column is not copied, and may hold lists.

    Raises:
        DataError: without columns, or with a column of lists among others.
    """
    if not columns:
        raise DataError(f"`{place}` has no columns. Give at least one.")
    first = next(iter(columns.values()))
    if len(columns) == 1:
        return first if first.ndim > 1 else first[:, None]
    for name, column in columns.items():
        if column.ndim > 1:
            raise DataError(
                f"`{within(place, name)}` holds lists or arrays beside other columns, which make no "
                f"array together. Received shape {column.shape[1:]} in each row. Give that column "
                "alone, or the columns in a dict by the names of the model's inputs."
            )
    dtype = np.result_type(*columns.values())
    if np.issubdtype(dtype, np.floating):
        dtype = np.dtype(keras.backend.floatx())
    table = np.empty((len(first), len(columns)), dtype)
    for index, column in enumerate(columns.values()):
        table[:, index] = column
    return table
