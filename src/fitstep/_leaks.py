"""What a traced step left behind on the model's objects: found, named and taken away.

A traced value stands for those of every later step and has no value of its own; where it is kept, it
fails later, far from the cause.
"""

import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
from jax.core import Tracer

from fitstep._keras import _objects


class Leaks:
    """Remembers the attributes of a model's objects before a trace.

    Looked at are all that `_objects.owned` finds, and the classes of them that are the user's.
    """

    def __init__(self, model: Any):
        self._before: list[tuple[str, Any, dict[str, Any]]] = []
        classes: dict[type, None] = {}
        for label, thing, attributes, *_ in _objects.owned(model):
            if type(thing).__dictoffset__:
                self._before.append((label, thing, attributes))
            classes |= dict.fromkeys(cls for cls in type(thing).__mro__ if not _is_foreign(cls))
        self._before += [(cls.__name__, cls, dict(vars(cls))) for cls in classes]

    def __enter__(self) -> "Leaks":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """After a step that raised, take away what it left behind: the error is what counts."""
        if error is not None:
            self.take_away()

    def take_away(self) -> list[str]:
        """Put back what was there before the trace; returns the names of what was not."""
        leaks = []
        for label, owner, before in self._before:
            for name, value in list(vars(owner).items()):
                if name in _objects.LOSSES_OF_A_STEP or not _holds_tracer(value):
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


def _is_foreign(cls: type) -> bool:
    """Whether a class is of Python, Keras, JAX or fitstep: not the user's own."""
    package = str(cls.__module__).partition(".")[0]
    return package in {"builtins", "keras", "jax", "jaxlib", "numpy", "types", "fitstep"}


def _holds_tracer(value: Any) -> bool:
    return any(issubclass(type(item), Tracer) for item in _within(value))


def _within(value: Any) -> Iterator[Any]:
    """A value and all that hangs in its containers, pytrees and closures, each thing once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) not in seen:
            seen.add(id(item))
            yield item
            waiting += _parts(item)


def _parts(value: Any) -> list[Any]:
    cls = type(value)  # `isinstance` asks the object, which may be a proxy of nothing
    if issubclass(cls, dict):
        return list(value.values())
    if issubclass(cls, list | tuple | set | frozenset | deque):
        return list(value)
    if issubclass(cls, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if issubclass(cls, types.MethodType):
        return [value.__self__]
    if issubclass(cls, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
    try:
        node = jax.tree_util.default_registry.flatten_one_level(value)
        return [] if node is None else list(node[0])
    except Exception:  # noqa: BLE001 - the user's own pytree, which is perhaps not filled yet
        return []


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


def _scrub(value: Any) -> None:
    """Take traced values out of the containers that were there before the trace."""
    for item in list(_within(value)):
        if isinstance(item, dict):
            for key in [key for key, each in item.items() if isinstance(each, Tracer)]:
                del item[key]
        elif isinstance(item, list | deque):
            kept = [each for each in item if not isinstance(each, Tracer)]
            item.clear()
            item.extend(kept)
        elif isinstance(item, set):
            item -= {each for each in item if isinstance(each, Tracer)}
        elif isinstance(item, types.FunctionType):
            for cell in item.__closure__ or ():
                if _is_full(cell) and isinstance(cell.cell_contents, Tracer):
                    cell.cell_contents = None
