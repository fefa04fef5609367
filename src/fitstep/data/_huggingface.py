"""Data sets and columns of Hugging Face's `datasets`, read through the Arrow tables behind them."""

import sys
from typing import Any

import numpy as np

from fitstep._errors import DataError
from fitstep.data import _arrow
from fitstep.data._columns import Remedies, as_table, within

REMEDIES = Remedies(
    fill="Drop their rows with `dataset.filter`, or fill them with `dataset.map`.",
    numbers=(
        "Choose columns of numbers with `dataset.select_columns([...])` and give the target as "
        "`y=dataset['label']`; encode text, categories and dates with `dataset.map`."
    ),
)


def from_dataset(dataset: Any, place: str) -> np.ndarray:
    """(rows, columns) of the columns that its format shows, in its order of rows."""
    names = dataset.format["columns"]
    return as_table(place, {name: _column(dataset, name, within(place, name)) for name in names})


def from_column(column: Any, place: str) -> np.ndarray:
    """(rows,), or (rows, length, ...) of lists, arrays and images that are equally large."""
    names = [column.column_name]
    dataset = column.source
    while not hasattr(dataset, "with_format"):  # a field of a column
        names.insert(0, dataset.column_name)
        dataset = dataset.source
    return _column(dataset, names[0], place, names[1:])


def _column(dataset: Any, name: str, place: str, fields: Any = ()) -> np.ndarray:
    if dataset.format["type"] == "custom":
        raise DataError(
            f"`{place}` comes from a data set with a transform, which would be applied only once to "
            "all rows. Apply it for good with `dataset.map(...)`, or give a loader that applies it "
            "row by row, e.g. `torch.utils.data.DataLoader`."
        )
    if type(dataset.features[name]).__name__ == "Image":
        return _images(dataset, name, place)
    column = dataset.with_format("arrow", columns=[name])[:][name]
    for field in fields:
        column = sys.modules["pyarrow.compute"].struct_field(column, field)
    return _arrow.from_column(column, place, REMEDIES)


def _images(dataset: Any, name: str, place: str) -> np.ndarray:
    images = dataset.with_format("numpy", columns=[name])[:][name]
    if isinstance(images, np.ndarray) and images.dtype != object:
        return images
    if any(image is None for image in images):
        raise DataError(f"`{place}` has rows without an image. Drop them with `dataset.filter`.")
    shapes = {image.shape for image in images}
    raise DataError(
        f"`{place}` must hold images of one shape. Received: {', '.join(map(str, sorted(shapes)[:5]))}. "
        "Resize them first with `dataset.map`."
    )
