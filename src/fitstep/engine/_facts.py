"""What the engine chose and compiled, and why: facts that a run leaves behind for people to read."""

from typing import Any, NamedTuple

import jax
from jax.experimental.sparse import JAXSparse
from keras import tree

from fitstep.engine._passes import Kind


class Choice(NamedTuple):
    """How many steps share an execution in the last run of a mode.

    Attributes:
        mode: `"train"`, `"test"` or `"predict"`.
        steps: the most that do.
        reason: why not more.
    """

    mode: str
    steps: int
    reason: str


class Compilation(NamedTuple):
    """One program that was compiled.

    Attributes:
        mode: `"train"`, `"test"` or `"predict"`.
        batch: the arrays of a batch, such as `x float32(32, 20), y float32(32, 1)`.
        steps: how many steps an execution of it makes at most.
        seconds: what tracing and compiling took.
        cause: why the programs that were there did not do.
    """

    mode: str
    batch: str
    steps: int
    seconds: float
    cause: str


def described(kind: Kind) -> str:
    """A batch in words: each array's place, dtype and shape."""
    places = jax.tree.unflatten(kind.structure, range(len(kind.shapes)))
    parts = places if isinstance(places, tuple) and len(places) <= 3 else (places,)
    found = []
    for name, part in zip(("x", "y", "sample_weight"), parts, strict=False):
        for path, index in jax.tree_util.tree_leaves_with_path(part):
            shape, dtype = kind.shapes[index]
            size = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
            found.append(f"{name}{jax.tree_util.keystr(path)} {dtype}({size})")
    return ", ".join(found)


def is_sparse(kind: Kind) -> bool:
    """Whether a batch has sparse arrays, whose shapes follow the number of their entries."""
    batch = jax.tree.unflatten(kind.structure, range(len(kind.shapes)))
    arrays = tree.flatten(batch)  # takes a sparse array as one
    return any(isinstance(array, JAXSparse) for array in arrays)


def changed(before: Any, after: Any) -> str:
    """What differs between the settings of two programs, in words."""
    names = (
        "the mode",
        "`donate`",
        "`jax_debug_nans`",
        "`jax_enable_x64`",
        "`jax_default_matmul_precision`",
        "`jax_default_prng_impl`",
        "`jax_threefry_partitionable`",
        "`jax_numpy_dtype_promotion`",
        "`jax_default_device`",
        "the distribution",
        "the variables or which of them are trainable",
    )
    return ", ".join(n for n, a, b in zip(names, before, after, strict=True) if a != b)
