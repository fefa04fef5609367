"""The Python objects that hang on a model: what a step may read, and where it may leave something."""

import contextlib
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

# The attributes of Keras's own objects that a step depends on, of those that start with "_".
OF_A_STEP = frozenset({"_dtype_policy", "_learning_rate", "_trainable"})
# The attributes in which Keras keeps traced losses during a step, and no longer.
LOSSES_OF_A_STEP = frozenset({"_losses", "_losses_override", "_loss_ids"})
# What has no Python side of its own to be looked at. What an initializer made is in the variables.
_NUMBERS = frozenset({bool, int, float, complex, str, bytes, type(None)})
_LEAVES = (
    type,
    *_NUMBERS,
    np.ndarray,
    np.generic,
    jax.Array,
    keras.Variable,
    keras.KerasTensor,
    keras.Initializer,
    keras.callbacks.Callback,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
_FOREIGN = sys.stdlib_module_names | {
    "jax", "jaxlib", "numpy", "pandas", "scipy", "sklearn", "matplotlib", "optree", "fitstep"
}  # fmt: skip
_DEPTH = 3
# A container with more than this is data, and so are more objects than these below one model.
_MANY_ITEMS, _MANY_OBJECTS = 100, 1000
_slots_of_classes: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


class Owned(NamedTuple):
    """An object that hangs on a model, how the user would write its place, and its attributes."""

    label: str
    thing: Any
    attributes: dict[str, Any]
    is_keras: bool
    is_root: bool


def owned(model: Any) -> Iterator[Owned]:
    """The model, its layers, optimizer, losses and metrics, and what hangs on them, each once.

    Followed are the attributes of the user's own objects, and of those of Keras that are no layer:
    regularisers, schedules, seed generators, metrics.
    """
    seen: set[int] = set()
    roots = _roots(model)
    known = {id(thing) for _, thing in roots}
    most = len(known) + _MANY_OBJECTS
    waiting = roots[::-1]
    while waiting and len(seen) < most:
        label, thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        is_keras = _module(thing).startswith("keras.")
        attributes = _attributes(thing)
        yield Owned(label, thing, attributes, is_keras, id(thing) in known)
        for name, value in attributes.items():
            if type(value) in _NUMBERS or (is_keras and name[0] == "_" and name not in OF_A_STEP):
                continue
            waiting += [(f"{label}.{name}", below) for below in _objects(value)]


def _attributes(thing: Any) -> dict[str, Any]:
    """All attributes of an object itself, those in slots included."""
    # Around `__getattr__`, which may do anything. A copy: another thread may write meanwhile.
    has_dict = type(thing).__dictoffset__
    own = dict(object.__getattribute__(thing, "__dict__")) if has_dict else {}
    for name in _slots(type(thing)):
        with contextlib.suppress(AttributeError):
            own[name] = object.__getattribute__(thing, name)
    return own


def _roots(model: Any) -> list[tuple[str, Any]]:
    optimizer = getattr(model, "optimizer", None)
    found = [("self", model)]
    found += [(layer.name, layer) for layer in model._flatten_layers(include_self=False)]
    found += [
        ("self.optimizer", optimizer),
        ("self.optimizer.inner_optimizer", getattr(optimizer, "inner_optimizer", None)),
        ("the losses of `compile`", model._compile_loss),
        ("the metrics of `compile`", model._compile_metrics),
        ("self.loss", model.loss if hasattr(model.loss, "__dict__") else None),
    ]
    metrics = [*model.metrics, *getattr(model._compile_metrics, "metrics", ())]
    found += [(metric.name, metric) for metric in metrics]
    return [(label, one) for label, one in found if not isinstance(one, _LEAVES)]


def _objects(value: Any, depth: int = _DEPTH) -> list[Any]:
    """The objects to be followed in an attribute, which may be a container."""
    cls = type(value)
    if cls in _NUMBERS or issubclass(cls, _LEAVES):
        return []
    if issubclass(cls, list | tuple | set | frozenset | dict):
        if not depth or len(value) > _MANY_ITEMS:
            return []
        items = list(value.values() if issubclass(cls, dict) else value)
        return [thing for item in items for thing in _objects(item, depth - 1)]
    if issubclass(cls, keras.Layer | keras.optimizers.Optimizer):
        return []  # a root, where it is the model's
    if _module(value).partition(".")[0] in _FOREIGN:
        return []
    return [value] if cls.__dictoffset__ or _slots(cls) else []


def _module(thing: Any) -> str:
    return str(type(thing).__module__)


def _slots(cls: type) -> tuple[str, ...]:
    known = _slots_of_classes.get(cls)
    if known is None:
        found = [vars(base).get("__slots__", ()) for base in cls.__mro__]
        names = [name for one in found for name in ((one,) if isinstance(one, str) else one)]
        known = tuple(name for name in names if name not in ("__dict__", "__weakref__"))
        _slots_of_classes[cls] = known
    return known
