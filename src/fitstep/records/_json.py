"""JSON that every reader accepts, written so that a file is whole or not there.

JSON has no number for NaN and the infinities. They are written as the strings "NaN", "Infinity"
and "-Infinity", which Python's and JavaScript's own float parsers read back.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """A value as JSON can hold it; what JSON does not know becomes its `str`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _name(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, np.generic) or hasattr(value, "__array__"):
        return plain(np.asarray(value, dtype=_wide(value)).tolist())
    return str(value)


def line(value: Any) -> str:
    """One line of JSON."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False)


def write_json(path: Path, value: Any) -> None:
    """Write a value, indented; the old file stays until the new one is complete."""
    text = json.dumps(plain(value), allow_nan=False, ensure_ascii=False, indent=2)
    write_whole(path, lambda target: target.write_bytes(encoded(text)))


def encoded(text: str) -> bytes:
    """UTF-8, with JSON's escapes for what it lacks, such as a file name in another encoding."""
    return (text + "\n").encode("utf-8", "backslashreplace")


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make a hidden file beside `path`, then put it in its place in one move."""
    # The name stays last: Keras and Matplotlib choose the format by how it ends.
    target = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        write(target)
        target.replace(path)
    finally:
        target.unlink(missing_ok=True)


def _name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _wide(value: Any) -> Any:
    """float64 for the small floats (bfloat16 and its like), which `tolist` leaves as objects."""
    kind = np.asarray(value).dtype.kind
    return None if kind in "biufUSO" else np.float64
