"""What depends on what in a traced step.

It tells which logs are computed from the metrics' state alone, and whether sample weights reach
the update: facts that the names of logs, or a look at the values, cannot give.
"""

from collections.abc import Iterable
from typing import Any

from jax.extend.core import Literal

# What computes each number of its result from the numbers in the same place of its inputs.
_ELEMENTWISE = frozenset(
    [
        "abs",
        "add",
        "add_any",
        "and",
        "ceil",
        "clamp",
        "convert_element_type",
        "copy",
        "cos",
        "div",
        "eq",
        "erf",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "is_finite",
        "le",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "or",
        "pow",
        "reduce_precision",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "sign",
        "sin",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tanh",
    ]
)
_SUMS = frozenset({"add", "add_any", "convert_element_type", "copy", "sub"})
BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_NO_CALLS = frozenset({"cond", "scan", "while"})


class Dataflow:
    """The variables of a jaxpr, each with those that it is computed from.

    Args:
        jaxpr: a `jax.extend.core.Jaxpr`. Calls such as a nested `jit` are followed into their
            bodies; loops and branches count as depending on all their inputs.
    """

    def __init__(self, jaxpr: Any):
        self.inputs = set(jaxpr.invars)
        self._sources: dict[Any, list[Any]] = {}
        self._elementwise: dict[Any, list[Any]] = {}
        self._added: dict[Any, list[Any]] = {}
        # Results of calls are other names for variables of the bodies.
        self._aliases: dict[Any, Any] = {}
        self._add(jaxpr, {})

    def is_input(self, variable: Any) -> bool:
        """Whether an input comes out as it went in."""
        original = self._original(variable)
        return not _is_literal(original) and original in self.inputs

    def depends_only_on(self, variable: Any, ends: Iterable[Any]) -> bool:
        """Whether a variable is computed from nothing but `ends` and constants."""
        return not self.inputs & self._origins(variable, ends)

    def depends_on(self, variable: Any, inputs: Iterable[Any]) -> bool:
        """Whether one of these inputs goes into a variable."""
        return bool(set(inputs) & self._origins(variable, ()))

    def carried_from(self, variable: Any) -> set[Any]:
        """The inputs of the same shape that a variable is computed from number by number.

        An update of a weight carries its old value on in this way; what goes through a product of
        matrices, a sum or a branch is no longer carried.
        """
        return self.inputs & self._walk(variable, set(), self._elementwise)

    def added_to(self, variable: Any) -> set[Any]:
        """The inputs that a variable is the sum of, or the difference, with whatever else."""
        return self.inputs & self._walk(variable, set(), self._added)

    def _origins(self, variable: Any, ends: Iterable[Any]) -> set[Any]:
        """Where one arrives by going back from a variable, without going beyond `ends`."""
        stops = {self._original(end) for end in ends if not _is_literal(end)}
        return self._walk(variable, stops, self._sources)

    def _walk(self, variable: Any, stops: set[Any], sources: dict[Any, list[Any]]) -> set[Any]:
        seen: set[Any] = set()
        waiting = [variable]
        while waiting:
            current = waiting.pop()
            if _is_literal(current):
                continue
            current = self._original(current)
            if _is_literal(current) or current in seen or current in stops:
                continue
            seen.add(current)
            waiting += sources.get(current, ())
        return seen

    def _original(self, variable: Any) -> Any:
        while not _is_literal(variable) and variable in self._aliases:
            variable = self._aliases[variable]
        return variable

    def _add(self, jaxpr: Any, names: dict[Any, Any]) -> None:
        def named(variable: Any) -> Any:
            return variable if _is_literal(variable) else names.get(variable, variable)

        for eqn in jaxpr.eqns:
            body = _body(eqn)
            if body is None:
                for out in eqn.outvars:
                    self._sources[named(out)] = [named(v) for v in eqn.invars]
                    if eqn.primitive.name in _ELEMENTWISE:
                        alike = [named(v) for v in eqn.invars if v.aval.shape == out.aval.shape]
                        self._elementwise[named(out)] = alike
                        if eqn.primitive.name in _SUMS:
                            subtracted = eqn.primitive.name == "sub"
                            self._added[named(out)] = alike[:1] if subtracted else alike
                continue
            # A body may be called twice, so its variables get names of this call.
            call = object()
            inner = {v: (call, v) for e in body.eqns for v in e.outvars}
            inner |= {v: (call, v) for v in body.constvars}
            inner |= {v: named(arg) for v, arg in zip(body.invars, eqn.invars, strict=True)}
            self._add(body, inner)
            for out, result in zip(eqn.outvars, body.outvars, strict=True):
                value = result if _is_literal(result) else inner.get(result, result)
                self._aliases[named(out)] = value


def _body(eqn: Any) -> Any:
    """The jaxpr that an equation calls with its own inputs and outputs, if it is a call."""
    if eqn.primitive.name in _NO_CALLS:
        return None
    closed = next((eqn.params[key] for key in BODIES if key in eqn.params), None)
    body: Any = getattr(closed, "jaxpr", closed)
    if not hasattr(body, "eqns") or len(body.invars) != len(eqn.invars):
        return None
    return body if len(body.outvars) == len(eqn.outvars) else None


def _is_literal(variable: Any) -> bool:
    return isinstance(variable, Literal)
