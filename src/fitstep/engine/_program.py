"""Compile a traced step: as it is, or as the body of a loop over a stack of batches."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fitstep import _cache
from fitstep._state import METHODS
from fitstep.engine import _means
from fitstep.engine._trace import Traced, donated, evaluated, placed

# XLA makes one kernel of a loop that touches less than a KiB in a step on a CPU, and multiplies
# matrices in it in another way than in the step alone. A counter of 2 KiB keeps every loop from it.
_COUNTERS = 512


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


def lower(traced: Traced, width: int) -> Any:
    """A traced step ready to be compiled, which may then be done in another thread.

    JAX's settings are a thread's own, so this is done in the thread that has them.

    Args:
        width: the batches that a stack has room for; 1 for the step as it is.
    """
    _cache.ensure()
    return _lowered_step(traced) if width == 1 else _lowered_loop(traced, width)


def _lowered_step(traced: Traced) -> Any:
    """The step, with the running means of those of its logs that are no metrics."""
    given, left, batch = traced.inputs
    if traced.fresh and not (traced.extras or traced.devices.mesh):
        return traced.fresh[0].lower()
    outputs = jax.tree.structure(traced.results)

    def step(given: Any, left: Any, batch: Any) -> Any:
        flat = evaluated(traced.jaxpr, jax.tree.leaves((given, left, batch)))
        return jax.tree.unflatten(outputs, flat)

    return _jitted_step(traced, step).lower(given, left, _first_means(traced), batch)


def checked_step(traced: Traced) -> Program:
    """The step as JAX compiles it itself, since then it looks for NaN in the results.

    It runs the step again op by op to find the place.
    """
    assert traced.fresh is not None
    function = traced.fresh[1]

    def step(given: Any, left: Any, batch: Any) -> Any:
        return function(given, left, (), batch)

    return Program(_jitted_step(traced, step), traced)


def _jitted_step(traced: Traced, step: Callable[..., Any]) -> Any:
    extras, rows = traced.extras, traced.rows

    def step_with_means(given: Any, left: Any, means: Any, batch: Any) -> Any:
        new, result, _ = step(given, left, batch)
        if extras:
            means = _means.updated_means(means, [result[name] for name in extras], rows)
        return new, result, means

    step_with_means.__name__ = step_with_means.__qualname__ = METHODS[traced.mode]
    return jax.jit(
        step_with_means,
        donate_argnums=donated(traced.given_up),
        out_shardings=_shardings(traced),
    )


def _first_means(traced: Traced) -> Any:
    return _means.no_means(len(traced.extras)) if traced.extras else ()


def _lowered_loop(traced: Traced, width: int) -> Any:
    """The step as the body of a loop over a stack of up to `width` batches.

    The number of steps is an input, so that a remainder needs no program of its own. The results
    have the same bits as one step after another.
    """
    given, left, _ = traced.inputs
    extras, rows = traced.extras, traced.rows
    outputs = jax.tree.structure(traced.results)
    given_up, kept, written = traced.given_up, traced.kept, traced.written
    count_of_arrays = len(traced.arrays)
    has_loss = traced.mode == "train" and "loss" in traced.log_names

    def steps(given: Any, left: Any, means: Any, stack: Any, count: Any, halt: Any) -> Any:
        arrays = placed(count_of_arrays, (given_up, given), (kept, left))
        results = jax.tree.map(
            lambda one: jnp.zeros((width, *one.shape), one.dtype), traced.results[1]
        )

        def batch_at(i: Any) -> list[Any]:
            return [jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False) for leaf in stack]

        def body(carry: Any) -> Any:
            counter, _, batch, changing, means, results = carry
            i = counter[0]
            inputs = list(arrays)
            for place, array in zip(written, changing, strict=True):
                inputs[place] = array
            # What depends on weights that stay as they are, such as their penalty, is computed in
            # every step: out of the loop it is fused with nothing, and rounded once more.
            inputs, _ = jax.lax.optimization_barrier((inputs, i))
            flat = [inputs[p] for p in given_up] + [inputs[p] for p in kept] + batch
            flat = evaluated(traced.jaxpr, flat)
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
            # The next batch is taken out here, so that the step finds its own in memory, as it
            # does alone. Where taking it out is fused into a sum, the sum has other bits.
            return counter + 1, jnp.asarray(going_on), batch_at(i + 1), new, means, results

        changing = tuple(arrays[place] for place in written)
        counter = jnp.zeros(_COUNTERS if jax.default_backend() == "cpu" else 1, "int32")
        start = (counter, jnp.asarray(True), batch_at(0), changing, means, results)
        counter, _, _, new, means, results = jax.lax.while_loop(
            lambda carry: (carry[0][0] < count) & carry[1], body, start
        )
        made = counter[0]
        last = None
        if traced.mode != "predict":
            last = jax.tree.map(
                lambda all_: jax.lax.dynamic_index_in_dim(all_, made - 1, keepdims=False), results
            )
        return new, last, means, results, made

    steps.__name__ = steps.__qualname__ = f"{METHODS[traced.mode]}s"
    devices, shardings = traced.devices, _shardings(traced, stacked=True)
    if shardings is not None:
        new, results, others = shardings
        shardings = (new, others, others, results, others)
    stack = tuple(
        jax.ShapeDtypeStruct((width, *shape), dtype, sharding=devices.sharding(shape, stacked=True))
        for shape, dtype in traced.kind.shapes
    )
    count, halt = jax.ShapeDtypeStruct((), "int32"), jax.ShapeDtypeStruct((), "bool")
    program = jax.jit(steps, donate_argnums=donated(given_up), out_shardings=shardings)
    return program.lower(given, left, _first_means(traced), stack, count, halt)
