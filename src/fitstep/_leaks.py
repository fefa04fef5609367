"""What a traced step left behind on the model's objects: found, named and taken away.

A traced value stands for those of every later step and has no value of its own; where it is kept, it
fails later, far from the cause.
"""

from typing import Any

import keras
from jax.core import Tracer

from fitstep._keras import _trainer

_DEPTH = 3


class Leaks:
    """Remembers the attributes of a model's objects before a trace.

    Looked at are the model, its layers, optimizer and metrics, the user's own objects among
    their attributes, and the classes of all of them that are not Keras's.
    """

    def __init__(self, model: Any):
        optimizer = getattr(model, "optimizer", None)
        owners = {id(model): ("self", model)}
        for layer in _trainer.layers(model):
            owners.setdefault(id(layer), (layer.name, layer))
        if optimizer is not None:
            owners[id(optimizer)] = ("self.optimizer", optimizer)
        for metric in model.metrics:
            owners.setdefault(id(metric), (metric.name, metric))
        for label, owner in list(owners.values()):
            for name, value in vars(owner).items():
                for thing in _own_objects(value):
                    owners.setdefault(id(thing), (f"{label}.{name}", thing))
        for _, owner in list(owners.values()):
            for cls in type(owner).__mro__:
                if not _is_foreign(cls):
                    owners.setdefault(id(cls), (cls.__name__, cls))
        self._before = [(label, owner, dict(vars(owner))) for label, owner in owners.values()]

    def take_away(self) -> list[str]:
        """Put back what was there before the trace; returns the names of what was not."""
        leaks = []
        for label, owner, before in self._before:
            for name, value in list(vars(owner).items()):
                if name in _trainer.LOSSES_OF_A_STEP or not _holds_tracer(value):
                    continue
                leaks.append(f"{label}.{name}")
                if before.get(name) is value:
                    _scrub(value)
                else:
                    _set_back(owner, name, before)
        return leaks


def _set_back(owner: Any, name: str, before: dict[str, Any]) -> None:
    # Around `__setattr__`, with which Keras tracks what is assigned.
    change = type if isinstance(owner, type) else object
    if name in before:
        change.__setattr__(owner, name, before[name])
    else:
        change.__delattr__(owner, name)


def _own_objects(value: Any, depth: int = _DEPTH) -> list[Any]:
    """The plain objects of the user's own in an attribute, which may be a container."""
    if isinstance(value, list | tuple | set):
        items = list(value)
    elif isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, type | keras.Layer | keras.Variable) or _is_foreign(type(value)):
        return []
    else:
        return [value] if hasattr(value, "__dict__") else []
    return [thing for item in items for thing in _own_objects(item, depth - 1)] if depth else []


def _is_foreign(cls: type) -> bool:
    """Whether a class is of Python, Keras, JAX or fitstep: not the user's own."""
    package = cls.__module__.partition(".")[0]
    return package in {"builtins", "keras", "jax", "jaxlib", "numpy", "types", "fitstep"}


def _holds_tracer(value: Any, depth: int = _DEPTH) -> bool:
    if isinstance(value, Tracer):
        return True
    if depth and isinstance(value, list | tuple | set):
        return any(_holds_tracer(item, depth - 1) for item in list(value))
    if depth and isinstance(value, dict):
        return any(_holds_tracer(item, depth - 1) for item in list(value.values()))
    return False


def _scrub(value: Any) -> None:
    """Take traced values out of a container that was there before the trace."""
    if isinstance(value, list):
        value[:] = [item for item in value if not isinstance(item, Tracer)]
    elif isinstance(value, dict):
        for key in [key for key, item in value.items() if isinstance(item, Tracer)]:
            del value[key]
    elif isinstance(value, set):
        value -= {item for item in value if isinstance(item, Tracer)}
    items = value.values() if isinstance(value, dict) else value
    for item in list(items) if isinstance(value, list | dict | tuple) else []:
        _scrub(item)
