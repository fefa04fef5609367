"""The state of a model as one frozen pytree."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from fitstep._errors import StateError

PARTS = ("trainable", "non_trainable", "optimizer", "metrics")
ITERATED = {
    "train": PARTS,
    "test": ("trainable", "non_trainable", "metrics"),
    "predict": ("trainable", "non_trainable"),
}
METHODS = {"train": "train_step", "test": "test_step", "predict": "predict_step"}


class Layout(NamedTuple):
    """The names of each part in Keras's order, and the parts that iteration yields.

    A name occurs twice in a part where Keras lists the same variable twice.
    """

    trainable: tuple[str, ...] = ()
    non_trainable: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    iterated: tuple[str, ...] = PARTS

    def names(self, part: str) -> tuple[str, ...]:
        return getattr(self, part)


NOTHING: Mapping[Any, Any] = MappingProxyType({})


def _empty() -> Mapping[str, Any]:
    return NOTHING


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class State:
    """Everything a step reads and writes, by name.

    A state unpacks as Keras's own stateless steps expect it: into lists of arrays in Keras's
    order, four in training (`trainable, non_trainable, optimizer, metrics = state`), three in
    testing (no optimizer), two in prediction (no metrics either).

    Args:
        step: int32 scalar, the number of batches that the model was trained on.
        seed: uint32 scalar, from `keras.utils.set_random_seed`, or drawn once for the model.
        trainable: name -> array, the trainable variables.
        non_trainable: name -> array, all other variables of the model, seed generators included.
        optimizer: name -> array, the optimizer's variables.
        metrics: name -> array, the variables of the metrics.
        slots: name -> pytree, what training algorithms carry from step to step.
        layout: the order of the names; not an array, so a change of it is another program.

    Example:
        >>> state = State(np.int32(0), np.uint32(1), {"kernel": np.ones(2)},
        ...               layout=Layout(trainable=("kernel",)))
        >>> trainable, non_trainable, optimizer, metrics = state
        >>> trainable
        [array([1., 1.])]
    """

    step: Any
    seed: Any
    trainable: Mapping[str, Any] = field(default_factory=_empty)
    non_trainable: Mapping[str, Any] = field(default_factory=_empty)
    optimizer: Mapping[str, Any] = field(default_factory=_empty)
    metrics: Mapping[str, Any] = field(default_factory=_empty)
    slots: Mapping[str, Any] = field(default_factory=_empty)
    layout: Layout = field(default_factory=Layout)

    def __repr__(self) -> str:
        parts = [
            f"{part}={{{', '.join(f'{n}: {described(a)}' for n, a in getattr(self, part).items())}}}"
            for part in PARTS
        ]
        slots = f", slots={sorted(self.slots)}" if self.slots else ""
        return f"State(step={self.step}, seed={self.seed}, {', '.join(parts)}{slots})"

    def part(self, part: str) -> list[Any]:
        """The arrays of a part as a list in Keras's order."""
        arrays = getattr(self, part)
        return [arrays[name] for name in self.layout.names(part)]

    def __iter__(self) -> Iterator[list[Any]]:
        return iter([self.part(part) for part in self.layout.iterated])

    def __len__(self) -> int:
        return len(self.layout.iterated)

    def __getitem__(self, index: int | slice) -> Any:
        return list(self)[index]

    def replace(self, **changes: Any) -> "State":
        """A state with some fields exchanged.

        A part is given as a mapping (the names in it are replaced, the others stay) or as a list
        of arrays in Keras's order.

        Raises:
            StateError: for a name the part does not have, or a list of another length.
        """
        for part in PARTS:
            if part in changes:
                changes[part] = self._updated(part, changes[part])
        return replace(self, **changes)

    def _updated(self, part: str, values: Any) -> Mapping[str, Any]:
        names = self.layout.names(part)
        if not isinstance(values, Mapping):
            values = list(values)
            if len(values) != len(names):
                raise StateError(
                    f"`state.replace({part}=...)` expects {len(names)} arrays. "
                    f"Received: {len(values)}."
                )
            values = dict(zip(names, values, strict=True))
        if unknown := [name for name in values if name not in getattr(self, part)]:
            raise StateError(
                f"`state.replace({part}=...)`: the model has no {part} variable "
                f"{', '.join(map(repr, unknown))}. It has: {', '.join(names) or 'none'}."
            )
        return MappingProxyType({**getattr(self, part), **values})

    def key(self, name: str) -> jax.Array:
        """A PRNG key made from the seed, `name` and the step: another one at each step.

        There is nothing to thread through the step, and a resumed run draws the same keys.

        Args:
            name: what the key is for; two names give independent keys.

        Returns:
            A typed key of `jax.random`.
        """
        stream = jax.random.fold_in(jax.random.key(self.seed), np.uint32(zlib.crc32(name.encode())))
        return jax.random.fold_in(stream, self.step)

    def tree_flatten(self):
        slots, structure = jax.tree_util.tree_flatten(dict(self.slots))
        # Each array once, in Keras's order: JAX would sort the keys of a dict.
        names = tuple(tuple(dict.fromkeys(self.layout.names(part))) for part in PARTS)
        parts = tuple(
            tuple(getattr(self, part)[name] for name in chosen)
            for part, chosen in zip(PARTS, names, strict=True)
        )
        return (self.step, self.seed, *parts, tuple(slots)), (self.layout, names, structure)

    @classmethod
    def tree_unflatten(cls, static, children):
        layout, names, structure = static
        step, seed, *parts, slots = children
        mappings = {
            part: MappingProxyType(dict(zip(chosen, arrays, strict=True)))
            for part, chosen, arrays in zip(PARTS, names, parts, strict=True)
        }
        slots = MappingProxyType(jax.tree_util.tree_unflatten(structure, slots))
        return cls(step, seed, **mappings, slots=slots, layout=layout)


class Naming(NamedTuple):
    """How arrays, one for each variable, make up a state.

    Attributes:
        variables: each Keras variable once.
        names: the name of each.
        places: for each part the places of its variables, in Keras's order.
    """

    variables: Sequence[Any]
    names: Sequence[str]
    places: Mapping[str, tuple[int, ...]]
    layout: Layout

    def state(self, arrays: Sequence[Any], step: Any, seed: Any, slots: Mapping[str, Any]) -> State:
        parts = {
            part: dict(
                zip(self.layout.names(part), (arrays[i] for i in self.places[part]), strict=True)
            )
            for part in PARTS
        }
        return State(step, seed, **parts, slots=slots, layout=self.layout)


def described(array: Any) -> str:
    """`float32[5,4]`, for an error."""
    if not hasattr(array, "dtype"):
        return type(array).__name__
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
