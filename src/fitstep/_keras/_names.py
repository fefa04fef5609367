"""Stable names for variables, from where each hangs in the object tree.

Keras's own paths carry counters that change when a model is built again, built symbolically,
cloned or reloaded. Here a name is the way from the root to the variable: attributes, positions in
lists, keys of dicts. Where a parent has no attribute for a child (the layers of a Sequential or of
a graph, the metrics of a model), the step is the child's own name if the user gave one, else its
class name, with a rank if a sibling has that already. What is shared is named at the first place.
So equal models have equal names: `encoder/dense_1/kernel`, `loss/total`, `momentums/dense/kernel`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.utils.naming import to_snake_case

# Keras's own lists of what is assigned to a layer or a metric. They say less than the attributes
# do, so they are opened last, for what no attribute leads to.
_TRACKED_BY_LAYER = (
    "_trainable_variables",
    "_non_trainable_variables",
    "_seed_generators",
    "_layers",
)
_TRACKED_BY_METRIC = ("_variables", "_metrics")

# Objects whose attributes are walked, and Keras's own attributes, which make no name.
_OPENED_IN_LAYER = (keras.Layer, keras.random.SeedGenerator)
_OPENED_IN_METRIC = (keras.Metric,)
_OPENED_IN_OPTIMIZER = (keras.optimizers.Optimizer,)
_GRAPH = ("_operations", "_operations_by_depth", "_nodes_by_depth")
_KEPT_BY_METRIC = frozenset(_TRACKED_BY_METRIC)
_KEPT_BY_OPTIMIZER = frozenset({"_variables", "_trainable_variables"})


@dataclass(eq=False, slots=True)
class _Place:
    """An object where the walk found it; its path is fixed when its first variable is named."""

    value: Any
    segment: str = ""
    parent: _Place | None = None
    reserved: frozenset[str] = frozenset()  # names that the user gave to siblings
    path: str | None = None


def model_names(model: keras.Model) -> dict[int, str]:
    """Names of `model.variables` by `id`, seed generators included; none occurs twice."""
    root = _Place(model, path="")
    return _walk([root], _inside_layer, _TRACKED_BY_LAYER, model.variables, "unreached")


def metric_names(model: keras.Model) -> dict[int, str]:
    """Names of `model.metrics_variables` by `id`; none occurs twice."""
    root = _Place(model, path="")
    roots = _unattached(model.metrics, root, _loss_tracker_names(model))
    return _walk(roots, _inside_metric, _TRACKED_BY_METRIC, model.metrics_variables, "unreached")


def optimizer_names(
    optimizer: keras.optimizers.Optimizer, owners: dict[int, str]
) -> dict[int, str]:
    """Names of `optimizer.variables` by `id`; none occurs twice.

    A list with one entry for each trained variable is a slot; `owners`, the `model_names`, says
    what an entry belongs to: `momentums/dense/kernel`.
    """
    root = _Place(optimizer, path="")
    inside = functools.partial(_inside_optimizer, owners=owners)
    return _walk([root], inside, (), optimizer.variables, "variable")


def _walk(
    roots: list[_Place],
    inside: Callable[[_Place], list[_Place]],
    tracked: tuple[str, ...],
    variables: Sequence[keras.Variable],
    leftover: str,
) -> dict[int, str]:
    """Name `variables`, depth first, then what only the lists `tracked` lead to."""
    wanted = {id(variable): position for position, variable in enumerate(variables)}
    names: dict[int, str] = {}
    taken: set[str] = set()
    ranks: dict[str, int] = {}
    # Keeps what it has seen alive: the `id` of a temporary, such as a list that a property makes,
    # could come up again and hide a whole submodel.
    seen: dict[int, _Place] = {}
    stack, unopened = roots[::-1], deque[_Place]()
    while len(names) < len(wanted) and (stack or unopened):
        if not stack:
            stack = _tracked(unopened.popleft(), tracked)[::-1]
            continue
        place = stack.pop()
        key = id(place.value)
        if key in seen:
            continue
        seen[key] = place
        if key in wanted:
            names[key] = _path(place, taken, ranks)
        elif not isinstance(place.value, keras.Variable):
            stack += inside(place)[::-1]
            unopened.append(place)
    # What a foreign object holds has no name but its position.
    root = _Place(None, path="")
    for key, position in wanted.items():
        if key not in names:
            names[key] = _path(_Place(None, f"{leftover}/{position}", root), taken, ranks)
    return names


def _path(place: _Place, taken: set[str], ranks: dict[str, int]) -> str:
    """The path of a place, fixed from the top down: what holds no variable takes no name."""
    pending = []
    while place.path is None:
        pending.append(place)
        assert place.parent is not None  # a root has its path from the start
        place = place.parent
    path = place.path
    for place in reversed(pending):
        stem = f"{path}/{place.segment}" if path else place.segment
        rank = ranks.get(stem, 0)
        while True:
            suffix = f"_{rank}" if rank else ""
            rank += 1
            if stem + suffix not in taken and place.segment + suffix not in place.reserved:
                break
        ranks[stem] = rank
        path = place.path = stem + suffix
        taken.add(path)
    return path


def _inside_layer(place: _Place) -> list[_Place]:
    """The layers of a Sequential or of a graph in their order, then attributes or elements."""
    graph: Iterable[Any] = ()
    if isinstance(place.value, keras.Sequential):
        graph = vars(place.value)["_layers"]
    elif isinstance(place.value, keras.Layer):
        graph = vars(place.value).get("_operations", ())
    # A graph also has operations that are no layers, such as `keras.ops.add`.
    layers = [operation for operation in graph if isinstance(operation, keras.Layer)]
    return _unattached(layers, place) + _attached(place, _OPENED_IN_LAYER, _kept_by_layer())


@functools.cache
def _kept_by_layer() -> frozenset[str]:
    """Attributes that every layer has, hence Keras's own; to walk them would triple the time."""
    return frozenset({*vars(keras.Layer(name="layer")), *_GRAPH})


def _inside_metric(place: _Place) -> list[_Place]:
    """The metrics that `compile` was given, else attributes or elements."""
    if isinstance(place.value, CompileMetrics):
        return _unattached(place.value.metrics, place)
    return _attached(place, _OPENED_IN_METRIC, _KEPT_BY_METRIC)


def _inside_optimizer(place: _Place, owners: Mapping[Any, str]) -> list[_Place]:
    """The entries of a slot by what they belong to, else attributes or elements."""
    trained = vars(_holder(place))["_trainable_variables"]
    if _is_slot(place.value, len(trained)):
        return [
            _Place(entry, owners.get(id(variable), str(position)), place)
            for position, (entry, variable) in enumerate(zip(place.value, trained, strict=True))
            if entry is not None
        ]
    held = _held(place.value, _OPENED_IN_OPTIMIZER, _KEPT_BY_OPTIMIZER)
    # `owners` again: a dict may have the `id` of the trained variable as its key.
    return [_Place(child, owners.get(key) or _segment(key), place) for key, child in held]


def _is_slot(value: Any, count: int) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == count
        and all(entry is None or isinstance(entry, keras.Variable) for entry in value)
    )


def _tracked(place: _Place, lists: tuple[str, ...]) -> list[_Place]:
    """What Keras tracks for an object, whether or not an attribute leads there."""
    attributes = {} if isinstance(place.value, (list, tuple, dict)) else vars(place.value)
    return _unattached([child for name in lists for child in attributes.get(name, ())], place)


def _attached(place: _Place, opened: tuple[type, ...], skipped: frozenset[str]) -> list[_Place]:
    """Children by attribute, index or key; a variable by its own name where the user gave one."""
    children = []
    for key, child in _held(place.value, opened, skipped):
        given = _given_name(child, place) if isinstance(child, keras.Variable) else None
        children.append(_Place(child, given or _segment(key), place))
    return children


def _unattached(
    children: Sequence[Any], parent: _Place, names: dict[int, str] | None = None
) -> list[_Place]:
    """Children by the name in `names` or from the user, else by their class."""
    names = names or {}
    given = [names.get(id(child)) or _given_name(child, parent) for child in children]
    reserved = frozenset(name for name in given if name)
    return [
        _Place(child, name or _class_name(child), parent, frozenset() if name else reserved)
        for child, name in zip(children, given, strict=True)
    ]


def _held(
    value: Any, opened: tuple[type, ...], skipped: frozenset[str]
) -> list[tuple[str | int, Any]]:
    """Variables, containers and objects of the `opened` classes that `value` holds, by key."""
    if isinstance(value, (list, tuple)):
        keys, children = getattr(value, "_fields", range(len(value))), value
    elif isinstance(value, dict):
        # A key that is neither text nor a number has no stable text.
        keys = [key if isinstance(key, (str, int)) else rank for rank, key in enumerate(value)]
        children = list(value.values())
    else:
        keys = [name for name in vars(value) if name not in skipped]
        children = [vars(value)[name] for name in keys]
    # By class first: a vocabulary may have a million words.
    classes = _classes(frozenset(map(type, children)), opened)
    if not classes:
        return []
    pairs = zip(keys, children, strict=True)
    return [(key, child) for key, child in pairs if type(child) in classes]


@functools.lru_cache(maxsize=4096)
def _classes(classes: frozenset[type], opened: tuple[type, ...]) -> frozenset[type]:
    """Those of the classes that may lead to a variable."""
    wanted = (keras.Variable, list, tuple, dict, *opened)
    return frozenset(cls for cls in classes if issubclass(cls, wanted))


def _holder(place: _Place) -> Any:
    """The object that a place is, or that holds the container that it is."""
    while isinstance(place.value, (list, tuple, dict)):
        assert place.parent is not None
        place = place.parent
    return place.value


def _segment(key: str | int) -> str:
    return (str(key).lstrip("_") or "_").replace("/", ">")


def _given_name(value: Any, parent: _Place | None = None) -> str | None:
    """The name that the user gave, None if Keras made it up from the class and a counter."""
    name = _name(value)
    if name is None or _is_made_up(name, value):
        return None
    if isinstance(value, keras.Variable) and parent is not None:
        # `name=f"{self.name}_scale"` has the counter of the layer in it.
        holder = _holder(parent)
        prefix = _name(holder)
        if prefix and name.startswith(f"{prefix}_") and _is_made_up(prefix, holder):
            name = _class_name(holder) + name[len(prefix) :]
    return name.replace("/", ">")


def _name(value: Any) -> str | None:
    # A variable's name is Keras's property; the property of another object may be the user's.
    return value.name if isinstance(value, keras.Variable) else vars(value).get("name")


def _is_made_up(name: str, value: Any) -> bool:
    stem, _, counter = name.rpartition("_")
    return _class_name(value) in (name, stem if counter.isdigit() else name)


def _class_name(value: Any) -> str:
    return _snake_case(type(value).__name__)


_snake_case = functools.lru_cache(maxsize=4096)(to_snake_case)


def _loss_tracker_names(model: keras.Model) -> dict[int, str]:
    """Names for the means that Keras keeps, one for each loss, if a model has several losses.

    Keras names them after the output's layer, with its counter, or all after the same loss where no
    graph tells the layer. A name that the user gave stays; else it is the layer's class, or the
    index or key of the output.
    """
    compile_loss = vars(model).get("_compile_loss")
    if compile_loss is None or not compile_loss.metrics:
        return {}
    layers = {operation.name: operation for operation in vars(model).get("_operations", ())}
    names = {}
    for tracker, loss in zip(compile_loss.metrics, compile_loss._flat_losses, strict=True):
        *outer, last = loss.name.split("/")
        source = layers.get(last, loss.loss)
        source_name = _given_name(source) or _class_name(source)
        parts = [*outer, source_name] if last in layers else loss.path or [source_name]
        names[id(tracker)] = "_".join(map(str, [*parts, "loss"]))
    return names
