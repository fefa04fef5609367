"""Trace a step once for each kind of batch, and check what it returns."""

import dataclasses
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.extend.core import Literal
from keras import tree

from fitstep._errors import StateError
from fitstep._keras import _trainer
from fitstep._keras._devices import Devices
from fitstep._returned import check_logs, check_scalars
from fitstep._state import METHODS
from fitstep.engine._dataflow import BODIES, Dataflow
from fitstep.engine._live import Live
from fitstep.engine._passes import Kind

# `(model, mode, naming, state, arrays, batch) -> (logs or outputs, the new arrays, places)`, pure;
# `arrays` has one for each variable, `state` is made of them, and the places are those of the
# variables that the step returned by their position.
Step = Callable[..., tuple[Any, list[Any], set[int]]]


# What JAX keeps functions of the user's in, which may refer to the model. Rules of derivatives have
# done their part once a step is traced.
_RULES = ("custom_jvp_call", "custom_vjp_call")
_WITH_FUNCTIONS = (*_RULES, "callback")
_CALLS = ("jit", "pjit")
# A trace with more constants than this is not kept.
_MOST_CONSTANTS = 2**20


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step as JAX sees it: all that is needed to compile it in one form or another.

    Attributes:
        jaxpr: closed; takes the arrays given up, those kept, and the batch, one after the other.
        results: what it returns, described: the new arrays, the logs or outputs, no means.
        arrays: the arrays of all variables, described.
        inputs: the arrays given up, those kept, and the batch, described.
        given_up, kept: the places of the arrays that a program may overwrite, and of the others.
        written: the places of the arrays that come back, in their order.
        log_names: the names of the logs, sorted.
        extras: those of the logs that are to be averaged over the rows.
        rows: of a batch.
        devices: where all of these lie.
        fresh: JAX's own trace and the traced function, which refer to the model.
    """

    mode: str
    kind: Kind
    jaxpr: Any
    results: Any
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    inputs: tuple[Any, Any, Any]
    given_up: tuple[int, ...]
    kept: tuple[int, ...]
    written: tuple[int, ...]
    log_names: tuple[str, ...]
    extras: tuple[str, ...]
    rows: int
    devices: Devices
    fresh: tuple[Any, Callable[..., Any]] | None

    def holds(self, *primitives: str) -> bool:
        """Whether one of these operations is anywhere in the step; parts of names will do."""
        return _holds(self.jaxpr.jaxpr, primitives)

    def without_model(self) -> "Traced | None":
        """The same without what refers to the model, or None where that can't be told."""
        constants = sum(getattr(const, "nbytes", 0) for const in self.jaxpr.consts)
        if constants > _MOST_CONSTANTS:
            return None
        kept = dataclasses.replace(self, fresh=None)
        if kept.holds(*_RULES):
            try:
                kept = dataclasses.replace(kept, jaxpr=_without_rules(kept.jaxpr))
            except Exception:  # noqa: BLE001 - an operation that cannot be taken over is traced again
                return None
        return None if kept.holds(*_WITH_FUNCTIONS) else kept


def trace(step: Step, live: Live, arrays: list[Any], kind: Kind, *, donate: bool) -> Traced:
    """Trace the model's step for one kind of batch.

    Args:
        step: the pure step, as `Step` says.
        arrays: the arrays of the variables; only their shapes, dtypes and shardings count.
        donate: whether the program may overwrite its inputs.

    Raises:
        StateError: if what the step returns does not fit.
    """
    return _Trace(step, live, arrays, kind, donate=donate).result()


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


class _Trace:
    """A trace under way.

    Args:
        step: the pure step, as `Step` says.
        arrays: the arrays of the variables; only their shapes, dtypes and shardings count.
        kind: the batch.
        donate: whether the program may overwrite its inputs.
    """

    def __init__(
        self,
        step: Step,
        live: Live,
        arrays: list[Any],
        kind: Kind,
        *,
        donate: bool,
    ):
        self.live, self.kind, structure = live, kind, kind.structure
        model, record, mode = live.model, live.record, live.mode
        # Not the arrays themselves, which would stay for as long as this does.
        arrays = [_described(array, live.devices) for array in arrays]
        self.arrays = arrays
        naming, count = live.naming(), len(arrays)
        self.given_up = given_up = live.given_up() if donate else []
        self.kept = kept = [i for i in range(count) if i not in set(given_up)]
        written: list[int] = []
        log_names: list[str] = []
        positional: set[int] = set()

        def function(given: Any, left: Any, means: Any, batch: Any) -> Any:
            inputs = placed(count, (given_up, given), (kept, left))
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
        self.inputs = (
            tuple(arrays[i] for i in given_up),
            tuple(arrays[i] for i in kept),
            tuple(
                jax.ShapeDtypeStruct(shape, dtype, sharding=live.devices.sharding(shape))
                for shape, dtype in kind.shapes
            ),
        )
        given, left, batch = self.inputs
        jitted = jax.jit(function, donate_argnums=donated(given_up))
        self.traced = jitted.trace(given, left, (), batch)

    def result(self) -> Traced:
        """What was traced, once it is checked."""
        return Traced(
            mode=self.live.mode,
            kind=self.kind,
            jaxpr=self.traced.jaxpr,
            results=self.traced.out_info,
            arrays=tuple(self.arrays),
            inputs=self.inputs,
            given_up=tuple(self.given_up),
            kept=tuple(self.kept),
            written=tuple(self.written),
            log_names=tuple(self.log_names),
            extras=self.extras(),
            rows=rows_of(jax.tree.unflatten(self.kind.structure, self.inputs[2])),
            devices=self.live.devices,
            fresh=(self.traced, self.function),
        )

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
        batch = jax.tree.unflatten(self.kind.structure, jaxpr.invars[len(inputs) :])
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


def donated(given_up: Sequence[int]) -> tuple[int, ...]:
    """The arguments of a program that it may overwrite: the arrays given up and the means."""
    return (0, 2) if given_up else ()


def placed(count: int, *groups: tuple[Sequence[int], Sequence[Any]]) -> list[Any]:
    placed: list[Any] = [None] * count
    for places, arrays in groups:
        for i, array in zip(places, arrays, strict=True):
            placed[i] = array
    return placed


def _described(array: Any, devices: Devices) -> jax.ShapeDtypeStruct:
    placed = devices.mesh is not None or getattr(array, "committed", False)
    return jax.ShapeDtypeStruct(
        array.shape, array.dtype, sharding=array.sharding if placed else None
    )


def _without_rules(closed: Any) -> Any:
    """The same computation, in which what has a rule for its derivative has none any more."""
    inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: evaluated(closed, args))(*inputs)


def evaluated(closed: Any, args: Sequence[Any]) -> list[Any]:
    """What a closed jaxpr computes; for a function that is being traced.

    JAX's own `jaxpr_as_fun` keeps the rules of derivatives, and after it `jax_debug_nans` stays
    silent in its thread (JAX 0.10).
    """
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

    def value(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        name, given = equation.primitive.name, [value(v) for v in equation.invars]
        body = next((equation.params[k] for k in BODIES if k in equation.params), None)
        if name in _RULES or (name in _CALLS and body and _holds(body.jaxpr, _RULES)):
            results = evaluated(body, given)
        else:
            params = equation.primitive.get_bind_params(equation.params)
            with equation.ctx.manager:
                results = equation.primitive.bind(*given, **params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [value(v) for v in jaxpr.outvars]


def _holds(jaxpr: Any, primitives: Sequence[str]) -> bool:
    return any(
        any(part in equation.primitive.name for part in primitives)
        or any(_holds(inner, primitives) for inner in _inner(equation.params.values()))
        for equation in jaxpr.eqns
    )


def _inner(values: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in values:
        value = getattr(value, "jaxpr", value)
        if hasattr(value, "eqns"):
            yield value
        elif isinstance(value, tuple | list):
            yield from _inner(value)
