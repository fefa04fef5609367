"""Trace a step once for each shape of batch, and compile it."""

import inspect
import itertools
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.extend.core import jaxpr_as_fun
from keras import tree

from fitstep import _cache
from fitstep._errors import StateError
from fitstep._keras import _trainer
from fitstep._returned import check_logs, check_scalars
from fitstep._state import METHODS
from fitstep.engine import _means
from fitstep.engine._dataflow import Dataflow
from fitstep.engine._live import Live

# `(model, mode, naming, state, arrays, batch) -> (logs or outputs, the new arrays, places)`, pure;
# `arrays` has one for each variable, `state` is made of them, and the places are those of the
# variables that the step returned by their position.
Step = Callable[..., tuple[Any, list[Any], set[int]]]


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
    # Keras's tree takes a sparse array as one array, JAX's as the arrays it is made of.
    shapes = [getattr(leaf, "shape", ()) for leaf in tree.flatten(batch)]
    return next((shape[0] for shape in shapes if shape), 1)


def run_eagerly(step: Step, live: Live, arrays: list[Any], batch: Any) -> tuple[Any, list[Any]]:
    """One step op by op, on concrete values."""
    batch = jax.tree.map(jnp.asarray, batch)
    state = live.state(arrays)
    result, new, _ = step(live.model, live.mode, live.naming(), state, arrays[:-2], batch)
    seed, count = arrays[-2:]
    return result, [*new, seed, count + 1 if live.mode == "train" else count]


class Trace:
    """The model's step, traced once for one shape of batch; what it returns is checked.

    Args:
        step: the pure step, as `Step` says.
        arrays: the arrays of the variables; only their shapes, dtypes and shardings count.
        leaves, structure: the batch, flattened.
        donate: whether the program may overwrite its inputs.

    Attributes:
        function: what was traced, `(given up, kept, means, batch) -> (new, result, means)`. It
            refers to no array of the state, which would stay for as long as it does.
        written: the places of the arrays that come back.
        log_names: the names of the logs, sorted.
    """

    def __init__(
        self,
        step: Step,
        live: Live,
        arrays: list[Any],
        leaves: list[Any],
        structure: Any,
        *,
        donate: bool,
    ):
        self.live, self.arrays, self.leaves, self.structure = live, arrays, leaves, structure
        model, record, mode = live.model, live.record, live.mode
        naming, count = live.naming(), len(arrays)
        self.given_up = given_up = live.given_up() if donate else []
        self.kept = kept = [i for i in range(count) if i not in set(given_up)]
        written: list[int] = []
        log_names: list[str] = []
        positional: set[int] = set()

        def function(given: Any, left: Any, means: Any, batch: Any) -> Any:
            inputs = _placed(count, (given_up, given), (kept, left))
            seed, steps = inputs[-2:]
            state = naming.state(inputs, steps, seed, dict(record.slots))
            batch = jax.tree.unflatten(structure, batch)
            result, new, by_position = step(model, mode, naming, state, inputs[:-2], batch)
            positional.update(by_position)
            new = [*new, seed, steps + 1 if mode == "train" else steps]
            # What is given up must come back; of the rest only what the step has changed.
            written[:] = [i for i in range(count) if i in given_up or new[i] is not inputs[i]]
            if mode != "predict":
                log_names[:] = sorted(result)
                result = {name: jnp.asarray(result[name]) for name in log_names}
            return tuple(new[i] for i in written), result, means

        # What JAX says of an error in the trace names the function.
        function.__name__ = function.__qualname__ = METHODS[mode]
        self.function, self.written, self.log_names = function, written, log_names
        self._positional = positional
        self.donated = (0, 2) if donate else ()
        self.inputs = (
            tuple(arrays[i] for i in given_up),
            tuple(arrays[i] for i in kept),
            tuple(leaves),
        )
        given, left, batch = self.inputs
        self.traced = jax.jit(function, donate_argnums=self.donated).trace(given, left, (), batch)

    def extras(self) -> tuple[str, ...]:
        """The logs of the user's own step that are no metrics; warns of ignored weights.

        Raises:
            StateError: if one of them is no scalar, or variables were exchanged.
        """
        method = METHODS[self.live.mode]
        if self.live.mode == "predict" or _trainer.is_stock(self.live.model, method):
            return ()
        jaxpr = self.traced.jaxpr.jaxpr
        new = dict(zip(self.written, jaxpr.outvars, strict=False))
        logs = jaxpr.outvars[len(self.written) :]
        inputs = dict(zip([*self.given_up, *self.kept], jaxpr.invars, strict=False))
        flow, places = Dataflow(jaxpr), self.live.wiring.places
        self._check_exchanged(flow, new, inputs)
        # Metrics that the step leaves alone do not come back: they are still its inputs.
        metrics = [new.get(i, inputs[i]) for i in set(places["metrics"])]
        extras = tuple(
            name
            for name, log in zip(self.log_names, logs, strict=True)
            # A number that depends on nothing at all, such as the rows of the batch, is none either.
            if not flow.depends_only_on(log, metrics)
            or (flow.depends_only_on(log, ()) and not self._is_in_a_result(name, log))
        )
        check_scalars(self.traced.out_info[1], extras, method)
        batch = jax.tree.unflatten(self.structure, jaxpr.invars[len(inputs) :])
        weights = jax.tree.leaves(keras.utils.unpack_x_y_sample_weight(batch)[2])
        results = [*logs, *(new[i] for i in places["trainable"] if i in new)]
        warned = self.live.record.warned
        ignored = not any(flow.depends_on(result, weights) for result in results)
        if weights and ignored and method not in warned:
            warned.add(method)
            _warn_at(getattr(self.live.model, method), _IGNORED_WEIGHTS.format(method=method))
        return extras

    def _is_in_a_result(self, name: str, log: Any) -> bool:
        """Whether an array that depends on nothing is part of what a metric gives."""
        if log.aval.shape == ():
            return False
        results = self.live.model.get_metrics_result()
        return name in check_logs(results, METHODS[self.live.mode])

    def _check_exchanged(self, flow: Dataflow, new: dict[int, Any], inputs: dict[int, Any]) -> None:
        """Find variables that were updated and then returned in each other's places.

        Two cases are certain enough: each new value carries on the other's old one, and has
        nothing of its own; or each is the other's old value with something added to it.

        Raises:
            StateError: names the two.
        """
        kinds: dict[Any, list[int]] = {}
        for i in sorted(self._positional & new.keys()):
            if not flow.is_input(new[i]):
                kinds.setdefault((new[i].aval.shape, new[i].aval.dtype), []).append(i)
        for alike in kinds.values():
            added = {i: flow.added_to(new[i]) for i in alike}
            strange = [i for i in alike if inputs[i] not in added[i]]
            carried = {i: flow.carried_from(new[i]) for i in strange}
            for i, j in itertools.combinations(strange, 2):
                crossed = inputs[j] in carried[i] and inputs[i] in carried[j]
                alone = not (
                    flow.depends_on(new[i], [inputs[i]]) or flow.depends_on(new[j], [inputs[j]])
                )
                both_added = inputs[j] in added[i] and inputs[i] in added[j]
                if crossed and (alone or both_added):
                    names = self.live.names()
                    raise StateError(
                        f"`{METHODS[self.live.mode]}`: the variables `{names[i]}` and `{names[j]}` "
                        f"were exchanged in the returned state: each carries on the old value of "
                        f"the other. Expected: each in the place it came in. If that is meant, "
                        f"return a `fitstep.State`: `state.replace(...)` takes them by name."
                    )


def _warn_at(method: Any, message: str) -> None:
    """Warn at the user's own code, for each model anew."""
    code = inspect.unwrap(getattr(method, "__func__", method)).__code__
    warnings.warn_explicit(message, UserWarning, code.co_filename, code.co_firstlineno)


_IGNORED_WEIGHTS = (
    "The data has sample weights (`sample_weight` or `class_weight`), but `{method}` makes no use "
    "of them: they have no effect. Unpack them with `keras.utils.unpack_x_y_sample_weight(data)` "
    "and pass them to the loss, e.g. `self.compute_loss(x, y, y_pred, sample_weight)`."
)


def compile_step(trace: Trace, *, checked: bool) -> Program:
    """Compile a traced step, with the running means of those of its logs that are no metrics.

    Args:
        checked: whether JAX is to look for NaN in the results, which it does for functions that
            it compiles itself, running them again op by op to find the place.
    """
    _cache.ensure()
    given, left, batch = trace.inputs
    extras = trace.extras()
    layout = (trace.given_up, trace.kept, trace.written, extras)
    distributed = keras.distribution.distribution() is not None
    if not (extras or distributed or checked):
        return Program(trace.traced.lower().compile(), *layout)
    rows = rows_of(jax.tree.unflatten(trace.structure, trace.leaves))
    outputs, jaxpr = jax.tree.structure(trace.traced.out_info), jaxpr_as_fun(trace.traced.jaxpr)
    function = trace.function

    def step_with_means(given: Any, left: Any, means: Any, batch: Any) -> Any:
        if checked:
            new, result, _ = function(given, left, (), batch)
        else:  # the trace that is there already
            flat = jaxpr(*jax.tree.leaves((given, left, batch)))
            new, result, _ = jax.tree.unflatten(outputs, flat)
        if extras:
            means = _means.updated_means(means, [result[name] for name in extras], rows)
        return new, result, means

    shardings = None
    if distributed:
        shardings = (tuple(trace.arrays[i].sharding for i in trace.written), None, None)
    program = jax.jit(step_with_means, donate_argnums=trace.donated, out_shardings=shardings)
    if checked:
        return Program(program, *layout)
    means = _means.no_means(len(extras)) if extras else ()
    return Program(program.lower(given, left, means, batch).compile(), *layout)


def _placed(count: int, *groups: tuple[Sequence[int], Sequence[Any]]) -> list[Any]:
    placed: list[Any] = [None] * count
    for places, arrays in groups:
        for i, array in zip(places, arrays, strict=True):
            placed[i] = array
    return placed
