"""Compile a traced step: as it is, or as the body of a loop over a stack of batches."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from fitstep._state import METHODS
from fitstep.engine import _means
from fitstep.engine._trace import Traced, donated, placed


class Program:
    """One compiled step, or a loop of steps, for one kind of batch.

    Attributes:
        call: `(given up, kept, means, batch) -> (new arrays, logs or outputs, new means)`; of a
            loop `(given up, kept, means, stack, count, halt) -> (new arrays, last logs, new means,
            stacked logs or outputs, steps made)`, which ends early after a loss that is not
            finite if `halt` is true.
        width: the batches that a stack has room for; 1 for a step that takes one batch.
        seconds: what a step has taken, once that was measured.
        give_up: picks the arrays that are donated out of those of all variables.
        keep: picks the others.
        written: the places of the arrays that come back, in their order.
        extras: the names of the logs that are averaged over the rows.
        runs: how often it ran through; before the first time it is only given copies.
    """

    def __init__(self, call: Callable[..., Any], traced: Traced, *, width: int = 1):
        self.call = call
        self.width = width
        self.seconds: float | None = None
        self.runs = 0
        self.give_up = _picker(traced.given_up)
        self.keep = _picker(traced.kept)
        self.written = traced.written
        self.extras = traced.extras


def _shardings(traced: Traced, *, stacked: bool = False) -> tuple[Any, Any, Any] | None:
    """How the new arrays, the logs or outputs, and all else that a program returns are to lie.

    Variables stay where they are, so that one program can run after the other, and outputs are
    divided as the batch is.
    """
    devices = traced.devices
    if devices.mesh is None:
        return None
    results = everywhere = devices.everywhere()
    if traced.mode == "predict":
        results = jax.tree.map(
            lambda one: devices.sharding(one.shape, stacked=stacked), traced.results[1]
        )
    return tuple(traced.arrays[i].sharding for i in traced.written), results, everywhere


def _picker(places: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if len(places) < 2:
        return lambda arrays: tuple(arrays[i] for i in places)
    return operator.itemgetter(*places)


def compile_step(traced: Traced, *, checked: bool = False) -> Program:
    """Compile a traced step, with the running means of those of its logs that are no metrics.

    Args:
        checked: whether JAX is to look for NaN in the results, which it does for functions that
            it compiles itself, running them again op by op to find the place.
    """
    given, left, batch = traced.inputs
    extras, rows = traced.extras, traced.rows
    if traced.fresh and not (extras or traced.devices.mesh or checked):
        return Program(traced.fresh[0].lower().compile(), traced)
    outputs, jaxpr = jax.tree.structure(traced.results), jaxpr_as_fun(traced.jaxpr)

    def step_with_means(given: Any, left: Any, means: Any, batch: Any) -> Any:
        if checked and traced.fresh:
            new, result, _ = traced.fresh[1](given, left, (), batch)
        else:  # the trace that is there already
            flat = jaxpr(*jax.tree.leaves((given, left, batch)))
            new, result, _ = jax.tree.unflatten(outputs, flat)
        if extras:
            means = _means.updated_means(means, [result[name] for name in extras], rows)
        return new, result, means

    step_with_means.__name__ = step_with_means.__qualname__ = METHODS[traced.mode]
    program = jax.jit(
        step_with_means,
        donate_argnums=donated(traced.given_up),
        out_shardings=_shardings(traced),
    )
    if checked:
        return Program(program, traced)
    means = _means.no_means(len(extras)) if extras else ()
    return Program(program.lower(given, left, means, batch).compile(), traced)


def compile_loop(traced: Traced, width: int) -> Program:
    """Compile a traced step as the body of a loop over a stack of up to `width` batches.

    The number of steps is an input, so that a remainder needs no program of its own. The results
    have the same bits as one step after another.
    """
    given, left, _ = traced.inputs
    extras, rows = traced.extras, traced.rows
    step, outputs = jaxpr_as_fun(traced.jaxpr), jax.tree.structure(traced.results)
    given_up, kept, written = traced.given_up, traced.kept, traced.written
    count_of_arrays = len(traced.arrays)
    has_loss = traced.mode == "train" and "loss" in traced.log_names

    def steps(given: Any, left: Any, means: Any, stack: Any, count: Any, halt: Any) -> Any:
        arrays = placed(count_of_arrays, (given_up, given), (kept, left))
        results = jax.tree.map(
            lambda one: jnp.zeros((width, *one.shape), one.dtype), traced.results[1]
        )

        def body(carry: Any) -> Any:
            i, _, changing, means, results = carry
            inputs = list(arrays)
            for place, array in zip(written, changing, strict=True):
                inputs[place] = array
            batch = [jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False) for leaf in stack]
            flat = step(*[inputs[p] for p in given_up], *[inputs[p] for p in kept], *batch)
            new, result, _ = jax.tree.unflatten(outputs, flat)
            if extras:
                means = _means.updated_means(means, [result[name] for name in extras], rows)
            going_on = ~halt | jnp.isfinite(result["loss"]) if has_loss else True
            results = jax.tree.map(
                lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, i, 0),
                results,
                result,
            )
            new = tuple(
                jax.lax.convert_element_type(array, arrays[place].dtype)
                for place, array in zip(written, new, strict=True)
            )
            return i + 1, jnp.asarray(going_on), new, means, results

        start = (jnp.int32(0), jnp.asarray(True), tuple(arrays[p] for p in written), means, results)
        made, _, new, means, results = jax.lax.while_loop(
            lambda carry: (carry[0] < count) & carry[1], body, start
        )
        last = None
        if traced.mode != "predict":
            last = jax.tree.map(
                lambda all_: jax.lax.dynamic_index_in_dim(all_, made - 1, keepdims=False), results
            )
        return new, last, means, results, made

    steps.__name__ = steps.__qualname__ = f"{METHODS[traced.mode]}s"
    devices = traced.devices
    shardings = _shardings(traced, stacked=True)
    if shardings is not None:
        new, results, others = shardings
        shardings = (new, others, others, results, others)
    stack = tuple(
        jax.ShapeDtypeStruct((width, *shape), dtype, sharding=devices.sharding(shape, stacked=True))
        for shape, dtype in traced.kind.shapes
    )
    means = _means.no_means(len(extras)) if extras else ()
    count, halt = jax.ShapeDtypeStruct((), "int32"), jax.ShapeDtypeStruct((), "bool")
    program = jax.jit(steps, donate_argnums=donated(given_up), out_shardings=shardings)
    compiled = program.lower(given, left, means, stack, count, halt).compile()
    return Program(compiled, traced, width=width)
