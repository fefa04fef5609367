"""What depends on what: told from the jaxpr, also through calls."""

import jax
import jax.numpy as jnp
import pytest

from fitstep.engine._dataflow import Dataflow


def _double(x):
    return x * 2


FUNCTIONS = {
    "plain": lambda a, b: (a + 1, (a + 1) * 3, b * 2),
    "nested jit": lambda a, b: (jax.jit(_double)(a), jax.jit(_double)(jax.jit(_double)(a)), b),
    "all in one jit": jax.jit(lambda a, b: (a + 1, (a + 1) * 3, b * 2)),
    "remat": lambda a, b: jax.checkpoint(lambda a, b: (a + 1, jnp.sin(a + 1), b))(a, b),
    "jit in jit": jax.jit(lambda a, b: jax.jit(lambda a, b: (a + 1, (a + 1) * 2, b + 1))(a, b)),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_inputs_are_told_apart(function):
    """The first two results depend on `a` alone, the third on `b` alone."""
    jaxpr = jax.make_jaxpr(function)(1.0, 2.0).jaxpr
    a, b = jaxpr.invars
    flow = Dataflow(jaxpr)
    first, second, third = jaxpr.outvars
    assert flow.depends_on(first, [a]) and not flow.depends_on(first, [b])
    assert flow.depends_on(second, [a]) and not flow.depends_on(second, [b])
    assert flow.depends_on(third, [b]) and not flow.depends_on(third, [a])


def test_a_result_computed_from_another_result_ends_there():
    """`mean = total / count` depends on nothing but the new total and count."""

    def step(total, count, x):
        total, count = total + x.sum(), count + x.size
        return total, count, jnp.where(count == 0, 0.0, total / count), x.mean()

    jaxpr = jax.make_jaxpr(step)(0.0, 0, jnp.ones(3)).jaxpr
    total, count, mean, other = jaxpr.outvars
    flow = Dataflow(jaxpr)
    assert flow.depends_only_on(mean, [total, count])
    assert not flow.depends_only_on(mean, [total])
    assert not flow.depends_only_on(other, [total, count])


def test_one_function_called_twice_keeps_its_calls_apart():
    """Two calls of the same jitted function are two computations."""
    inner = jax.jit(_double)
    jaxpr = jax.make_jaxpr(lambda a, b: (inner(inner(a)), inner(inner(b))))(1.0, 2.0).jaxpr
    a, b = jaxpr.invars
    flow = Dataflow(jaxpr)
    assert not flow.depends_on(jaxpr.outvars[0], [b])
    assert not flow.depends_on(jaxpr.outvars[1], [a])


def test_loops_and_branches_depend_on_all_their_inputs():
    """What a loop computes may depend on everything that goes in."""

    def step(a, b):
        return jax.lax.cond(a > 0, lambda a, b: (a, b), lambda a, b: (b, a), a, b)

    jaxpr = jax.make_jaxpr(step)(1.0, 2.0).jaxpr
    flow = Dataflow(jaxpr)
    assert all(flow.depends_on(out, [v]) for out in jaxpr.outvars for v in jaxpr.invars)


def test_constants_depend_on_nothing():
    """A constant result is computed from no input."""
    jaxpr = jax.make_jaxpr(lambda a: (jnp.float32(3), a))(1.0).jaxpr
    flow = Dataflow(jaxpr)
    assert flow.depends_only_on(jaxpr.outvars[0], [])
    assert not flow.depends_only_on(jaxpr.outvars[1], [])
