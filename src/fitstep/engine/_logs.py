"""Which logs of a step come from metrics, and the mean over the rows of those that do not.

Keras's own loop keeps the last batch's value of every log as soon as one of them is no metric.
Here a log that is computed from the metrics' state alone is a metric (its last value counts),
every other one is averaged, each batch by its rows. The program itself tells which is which.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def from_metrics(jaxpr: Any, logs: Sequence[Any], metrics: Sequence[Any]) -> list[bool]:
    """For each log whether it depends on nothing but the metrics' new values and constants.

    Args:
        jaxpr: the step's jaxpr.
        logs: the output variables (or literals) of the logs.
        metrics: the output variables of the metrics' state.
    """
    sources: dict[Any, list[Any]] = {}
    _collect(jaxpr, {}, sources)
    inputs = set(jaxpr.invars)
    ends = {_resolve(sources, v) for v in metrics if not _is_literal(v)}
    return [_reaches_only(_resolve(sources, log), ends, inputs, sources) for log in logs]


def _is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")


def _resolve(sources: dict[Any, list[Any]], variable: Any) -> Any:
    """Follow plain renamings, such as the results of a nested `jit`."""
    while not _is_literal(variable) and isinstance(sources.get(variable), tuple):
        (variable,) = sources[variable]
    return variable


def _collect(jaxpr: Any, names: dict[Any, Any], sources: dict[Any, Any]) -> None:
    """For every variable what it is computed from; calls are followed into their bodies."""

    def outer(variable: Any) -> Any:
        return variable if _is_literal(variable) else names.get(variable, variable)

    for eqn in jaxpr.eqns:
        body = next((eqn.params[key] for key in _BODIES if key in eqn.params), None)
        body = getattr(body, "jaxpr", body)
        called = (
            hasattr(body, "eqns")
            and len(body.invars) == len(eqn.invars)
            and len(body.outvars) == len(eqn.outvars)
            and eqn.primitive.name not in ("scan", "while", "cond")
        )
        if not called:
            for out in eqn.outvars:
                sources[outer(out)] = [outer(v) for v in eqn.invars]
            continue
        # The same body may be called twice, so its variables get names of this call.
        call = object()
        inner = {v: (call, v) for e in body.eqns for v in e.outvars}
        inner |= {v: (call, v) for v in body.constvars}
        inner |= {v: outer(arg) for v, arg in zip(body.invars, eqn.invars, strict=True)}
        _collect(body, inner, sources)
        for out, result in zip(eqn.outvars, body.outvars, strict=True):
            resolved = result if _is_literal(result) else inner.get(result, result)
            sources[outer(out)] = (resolved,)


def _reaches_only(log: Any, ends: set[Any], inputs: set[Any], sources: dict[Any, Any]) -> bool:
    seen: set[Any] = set()
    waiting = [log]
    while waiting:
        variable = waiting.pop()
        if _is_literal(variable) or variable in ends or variable in seen:
            continue
        if variable in inputs:
            return False
        seen.add(variable)
        waiting += sources.get(variable, ())
    return True


def no_means(count: int) -> tuple[jax.Array, jax.Array]:
    """The running means before the first batch: the means and the rows that they stand for."""
    return jnp.zeros((count,)), jnp.zeros(())


def updated_means(
    means: tuple[jax.Array, jax.Array], values: Sequence[Any], rows: int
) -> tuple[jax.Array, jax.Array]:
    """Running means, weighted by rows, after one more batch."""
    mean, total = means
    total = total + rows
    new = jnp.stack([jnp.asarray(value, mean.dtype) for value in values])
    return mean + (new - mean) * (rows / total), total
