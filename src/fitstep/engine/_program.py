"""Trace a step once for each shape of batch, and compile it."""

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.extend.core import jaxpr_as_fun

from fitstep._keras import _trainer
from fitstep._state import METHODS, check_scalars
from fitstep.engine import _means
from fitstep.engine._dataflow import Dataflow
from fitstep.engine._live import Live

# `(model, mode, wires, state, arrays, batch) -> (logs or outputs, the new arrays)`, pure; `arrays`
# has one for each variable, and `state` is made of them.
Step = Callable[..., tuple[Any, list[Any]]]


class Program:
    """One compiled step, for one shape of batch.

    Attributes:
        call: `(given up, kept, means, batch) -> (new arrays, logs or outputs, new means)`.
        give_up: picks the arrays that are donated out of those of all variables.
        keep: picks the others.
        written: the places of the arrays that come back, in their order.
        extras: the names of the logs that are averaged over the rows.
        proven: whether it ran through once; until then it is only given copies.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        given_up: Sequence[int],
        kept: Sequence[int],
        written: Sequence[int],
        extras: Sequence[str],
    ):
        self.call = call
        self.give_up = _picker(given_up)
        self.keep = _picker(kept)
        self.written = tuple(written)
        self.extras = tuple(extras)
        self.proven = False


def _picker(places: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if len(places) < 2:
        return lambda arrays: tuple(arrays[i] for i in places)
    return operator.itemgetter(*places)


def rows_of(batch: Any) -> int:
    """The rows of a batch: the first dimension of its first array, as Keras counts them."""
    for leaf in jax.tree.leaves(batch):
        if getattr(leaf, "shape", ()):
            return leaf.shape[0]
    return 1


def run_eagerly(step: Step, live: Live, arrays: list[Any], batch: Any) -> tuple[Any, list[Any]]:
    """One step op by op, on concrete values."""
    batch = jax.tree.map(jnp.asarray, batch)
    state = live.state(arrays)
    result, new = step(live.model, live.mode, live.wires(), state, arrays[:-1], batch)
    return result, [*new, arrays[-1] + 1 if live.mode == "train" else arrays[-1]]


def compile_step(
    step: Step,
    live: Live,
    arrays: list[Any],
    leaves: list[Any],
    structure: Any,
    *,
    donate: bool,
    checked: bool,
) -> Program:
    """Trace the model's step once, check what it returns, and compile it.

    Args:
        step: the pure step, as `Step` says.
        arrays: the arrays of the variables; only their shapes, dtypes and shardings count.
        leaves, structure: the batch, flattened.
        donate: whether the program may overwrite its inputs.
        checked: whether JAX is to look for NaN in the results, which it does for functions that
            it compiles itself, running them again op by op to find the place.
    """
    wires, record, mode = live.wires(), live.record, live.mode
    count = len(arrays)
    given_up = _given_up(live) if donate else []
    kept = [i for i in range(count) if i not in set(given_up)]
    written: list[int] = []
    log_names: list[str] = []

    def traced_step(given: Any, left: Any, means: Any, batch: Any) -> Any:
        inputs = _placed(count, (given_up, given), (kept, left))
        state = wires.state(inputs, inputs[-1], record.seed, dict(record.slots))
        batch = jax.tree.unflatten(structure, batch)
        result, new = step(live.model, mode, wires, state, inputs[:-1], batch)
        new = [*new, inputs[-1] + 1 if mode == "train" else inputs[-1]]
        # What is given up must come back; of the rest only what the step has changed.
        written[:] = [i for i in range(count) if i in given_up or new[i] is not inputs[i]]
        if mode != "predict":
            log_names[:] = sorted(result)
            result = {name: jnp.asarray(result[name]) for name in log_names}
        return tuple(new[i] for i in written), result, means

    donated = (0, 2) if donate else ()
    given, left = tuple(arrays[i] for i in given_up), tuple(arrays[i] for i in kept)
    traced = jax.jit(traced_step, donate_argnums=donated).trace(given, left, (), tuple(leaves))
    extras: tuple[str, ...] = ()
    method = METHODS[mode]
    if log_names and not _trainer.is_stock(live.model, method):
        facts = _Facts(live, traced.jaxpr.jaxpr, [*given_up, *kept], written, structure)
        extras = facts.extras(log_names)
        check_scalars(traced.out_info[1], extras, method)
        if facts.ignores_weights():
            warnings.warn(_IGNORED_WEIGHTS.format(method=method), stacklevel=2)
    distributed = keras.distribution.distribution() is not None
    if not (extras or distributed or checked):
        return Program(traced.lower().compile(), given_up, kept, written, extras)

    rows = rows_of(jax.tree.unflatten(structure, leaves))
    outputs, jaxpr = jax.tree.structure(traced.out_info), jaxpr_as_fun(traced.jaxpr)

    def step_with_means(given: Any, left: Any, means: Any, batch: Any) -> Any:
        if checked:
            new, result, _ = traced_step(given, left, (), batch)
        else:  # the trace that is there already
            flat = jaxpr(*jax.tree.leaves((given, left, batch)))
            new, result, _ = jax.tree.unflatten(outputs, flat)
        if extras:
            means = _means.updated_means(means, [result[name] for name in extras], rows)
        return new, result, means

    shardings = (tuple(arrays[i].sharding for i in written), None, None) if distributed else None
    program = jax.jit(step_with_means, donate_argnums=donated, out_shardings=shardings)
    if checked:
        return Program(program, given_up, kept, written, extras)
    means = _means.no_means(len(extras)) if extras else ()
    compiled = program.lower(given, left, means, tuple(leaves)).compile()
    return Program(compiled, given_up, kept, written, extras)


def _placed(count: int, *groups: tuple[Sequence[int], Sequence[Any]]) -> list[Any]:
    placed: list[Any] = [None] * count
    for places, arrays in groups:
        for i, array in zip(places, arrays, strict=True):
            placed[i] = array
    return placed


def _given_up(live: Live) -> list[int]:
    """What a program may overwrite: in training everything, in testing the metrics."""
    if live.mode == "predict":
        return []
    if live.mode == "test":
        return sorted(set(live.wiring.places["metrics"]))
    return list(range(len(live.wiring.variables)))


_IGNORED_WEIGHTS = (
    "The data has sample weights (`sample_weight` or `class_weight`), but `{method}` makes no use "
    "of them: they have no effect. Unpack them with `keras.utils.unpack_x_y_sample_weight(data)` "
    "and pass them to the loss, e.g. `self.compute_loss(x, y, y_pred, sample_weight)`."
)


class _Facts:
    """What the jaxpr of a user's own step tells about its logs and its sample weights."""

    def __init__(
        self, live: Live, jaxpr: Any, inputs: list[int], written: list[int], structure: Any
    ):
        self.live, self.jaxpr, self.inputs, self.written = live, jaxpr, inputs, written
        self.structure = structure
        self.flow = Dataflow(jaxpr)
        self.new = dict(zip(written, jaxpr.outvars, strict=False))
        self.logs = jaxpr.outvars[len(written) :]

    def extras(self, log_names: list[str]) -> tuple[str, ...]:
        """The logs that are no metrics, which depend on the metrics' new state alone."""
        # Metrics that the step leaves alone do not come back: they are still its inputs.
        ends = [
            self.new[i] if i in self.new else self.jaxpr.invars[self.inputs.index(i)]
            for i in set(self.live.wiring.places["metrics"])
        ]
        return tuple(
            name
            for name, log in zip(log_names, self.logs, strict=True)
            if not self.flow.depends_only_on(log, ends)
        )

    def ignores_weights(self) -> bool:
        """Whether there are sample weights that reach neither the update nor, in a test, a log."""
        batch = self.jaxpr.invars[len(self.inputs) :]
        data = jax.tree.unflatten(self.structure, batch)
        weights = jax.tree.leaves(keras.utils.unpack_x_y_sample_weight(data)[2])
        if not weights:
            return False
        results = self.logs
        if self.live.mode == "train":
            trainable = self.live.wiring.places["trainable"]
            results = [self.new[i] for i in trainable if i in self.new]
        return not any(self.flow.depends_on(result, weights) for result in results)
