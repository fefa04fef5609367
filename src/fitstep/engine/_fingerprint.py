"""What a traced step depends on besides its arrays: the Python objects it was traced from.

A compiled step has the values of Python attributes baked in. Between runs the fingerprint of the
model tells whether its programs are still those of the model.
"""

import types
import weakref
from typing import Any

import numpy as np

from fitstep._keras import _objects, _trainer

Fingerprint = dict[tuple[int, str], Any]

_PLAIN = (int, float, bool, str, bytes, complex, range, type(None), np.generic)
_MANY = 1000  # a container with more is only identified
# A NumPy array up to this size is compared by its values, since it may be written to in place.
_SMALL = 2**14
# What a loop sets itself, or Keras makes for each layer alone; no step depends on it.
_OF_THE_LOOP = frozenset(
    {
        "build",
        "built",
        "call_context_args",
        "compiled",
        "history",
        "predict_function",
        "quantize",
        "steps_per_execution",
        "stop_evaluating",
        "stop_predicting",
        "stop_training",
        "test_function",
        "train_function",
    }
)
# Names of the classes that are no part of the user's code.
_FOREIGN = ("keras.", "fitstep.", "builtins", "abc", "typing")


class Same:
    """Compares an object by identity, without keeping it alive."""

    __slots__ = ("_reference",)

    def __init__(self, thing: Any):
        self._reference = weakref.ref(thing)

    def thing(self) -> Any:
        return self._reference()

    def __eq__(self, other: object) -> bool:
        thing = self._reference()
        return isinstance(other, Same) and thing is not None and thing is other._reference()

    def __hash__(self) -> int:
        return id(self._reference())


def fingerprint(model: Any) -> Fingerprint:
    """What the programs of a model depend on, by the id of an object and the name of an attribute.

    Asked once a run; costs about 30 us a layer (`benchmarks/fixed.py`).
    """
    found: Fingerprint = {}
    kept_by_keras = _trainer.own_attributes()
    classes: set[type] = set()
    for one in _objects.owned(model):
        owner, is_keras = id(one.thing), one.is_keras
        part_of = _part if one.is_root or is_keras else _part_below
        classes.add(type(one.thing))
        found[owner, ""] = _same(one.thing)
        for name, value in one.attributes.items():
            if name in _OF_THE_LOOP:
                continue
            of_keras = name[0] == "_" and (is_keras or name in kept_by_keras)
            if not of_keras or name in _objects.OF_A_STEP:
                found[owner, name] = part_of(value)
    for cls in {base for known in classes for base in known.__mro__}:
        if not str(cls.__module__).startswith(_FOREIGN):
            for name, value in vars(cls).items():
                if not name.startswith(("__", "_abc_")):
                    found[id(cls), name] = _part(value)
    return found


def _part(value: Any, depth: int = 3) -> Any:
    """A value to be compared later: by value, by its parts, or by identity."""
    cls = type(value)
    if cls in _PLAIN or issubclass(cls, np.generic):
        return (cls, value)
    if issubclass(cls, list | tuple | dict | set | frozenset):
        if not depth or len(value) > _MANY:
            return (cls, id(value), len(value))
        if issubclass(cls, dict):
            pairs = list(value.items())  # at once: another thread may write to it
            return {_part(key, 0): _part(item, depth - 1) for key, item in pairs}
        parts = [_part(item, depth - 1) for item in list(value)]
        return (cls, frozenset(parts)) if issubclass(cls, set | frozenset) else tuple(parts)
    if issubclass(cls, np.ndarray) and value.nbytes <= _SMALL and not value.dtype.hasobject:
        return (value.shape, value.dtype.str, hash(value.tobytes()))
    if issubclass(cls, types.MethodType | staticmethod | classmethod):
        return _part(value.__func__)
    if issubclass(cls, property):
        return tuple([_part(each) for each in (value.fget, value.fset, value.fdel)])
    return _same(value)


def _part_below(value: Any) -> Any:
    """The same for an object below the layers: its containers are data, and only identified."""
    if issubclass(type(value), list | tuple | dict | set | frozenset):
        return (type(value), id(value))
    return _part(value)


def _same(thing: Any) -> Any:
    try:
        return Same(thing)
    except (TypeError, ReferenceError):  # no weak reference: the number tells it from another
        return (type(thing), id(thing))


def differences(before: Fingerprint, after: Fingerprint) -> set[tuple[int, str]]:
    """What has changed between two fingerprints.

    An attribute that is new, and hides none of the class, cannot have been baked in: Keras adds
    some when it saves a model.
    """
    added = {key for key in after.keys() - before.keys() if _can_be_baked_in(key, after)}
    return added | {key for key, value in before.items() if after.get(key) != value}


def _can_be_baked_in(added: tuple[int, str], after: Fingerprint) -> bool:
    owner, name = added
    known = after.get((owner, ""))
    return not (name and isinstance(known, Same)) or hasattr(type(known.thing()), name)
