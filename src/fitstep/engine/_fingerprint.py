"""What a traced step depends on besides its arrays: the Python objects it was traced from.

A compiled step has the values of Python attributes baked in. Between runs the fingerprint of the
model tells whether its programs are still those of the model.
"""

import types
import weakref
from typing import Any, NamedTuple

from fitstep._keras import _trainer

_PLAIN = (int, float, bool, str, type(None))
# What a loop sets itself; no step depends on it.
_OF_THE_LOOP = frozenset(
    {
        "history",
        "built",
        "compiled",
        "steps_per_execution",
        "stop_evaluating",
        "stop_predicting",
        "stop_training",
    }
)


class Same:
    """Compares an object by identity, without keeping it alive."""

    __slots__ = ("_reference",)

    def __init__(self, thing: Any):
        self._reference = weakref.ref(thing)

    def __eq__(self, other: object) -> bool:
        thing = self._reference()
        return isinstance(other, Same) and thing is not None and thing is other._reference()

    __hash__ = None  # type: ignore[assignment]


class Attribute(NamedTuple):
    """An attribute of an object, and whether it hides one of its class."""

    value: Any
    hides: bool


def fingerprint(model: Any) -> dict[tuple[int, str], Any]:
    """What the programs of a model depend on, by object and attribute.

    Costs about 2 us a layer; asked once a run.
    """
    found: dict[tuple[int, str], Any] = {}
    kept_by_keras = _trainer.own_attributes()
    classes: set[type] = set()
    for thing in [*_trainer.layers(model), *_trainer.compiled_objects(model)]:
        classes.add(type(thing))
        found[id(thing), ""] = Same(thing)
        is_keras = type(thing).__module__.startswith("keras.")
        for name, value in vars(thing).items():
            private = name.startswith("_") and name != _trainer.TRAINABLE
            if name in _OF_THE_LOOP or (private and (is_keras or name in kept_by_keras)):
                continue
            if (part := _part(value)) is not None:
                found[id(thing), name] = Attribute(part, hasattr(type(thing), name))
    for cls in {base for known in classes for base in known.__mro__}:
        if cls is not object and not cls.__module__.startswith(("keras.", "fitstep.")):
            for name, value in vars(cls).items():
                if isinstance(value, types.FunctionType):
                    found[id(cls), name] = Same(value)
    return found


def _part(value: Any, depth: int = 3) -> Any:
    """A value to be compared later: by value, by its parts, or by identity."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, list | tuple) and depth:
        return tuple(_part(item, depth - 1) for item in value)
    if isinstance(value, dict) and depth:
        return {key: _part(item, depth - 1) for key, item in value.items()}
    if isinstance(value, types.MethodType):
        return Same(value.__func__)
    try:
        return Same(value)
    except TypeError:  # some objects cannot be referred to weakly
        return None


def differences(before: dict[Any, Any], after: dict[Any, Any]) -> set[Any]:
    """What has changed between two fingerprints.

    An attribute that is new, and hides none of the class, cannot have been baked in: Keras adds
    some when it saves a model.
    """
    added = {
        key
        for key in after.keys() - before.keys()
        if not isinstance(after[key], Attribute) or after[key].hides
    }
    return added | {key for key, value in before.items() if after.get(key) != value}
