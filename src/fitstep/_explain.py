"""Say what the engine has chosen and compiled for a model, and why."""

import textwrap
from typing import Any, NamedTuple

from fitstep._keras import _trainer
from fitstep.engine._facts import Choice, Compilation
from fitstep.engine._live import record_of

_COLUMNS = 100


class Explanation(NamedTuple):
    """What `explain` found; `print` shows it as text.

    Attributes:
        choices: for each mode that has run, how many steps share an execution, and why not more.
        programs: all that was compiled, in order, with the batch and the cause.
    """

    choices: tuple[Choice, ...]
    programs: tuple[Compilation, ...]

    def __str__(self) -> str:
        if not self.choices and not self.programs:
            return "Nothing has run yet. Call `fit`, `evaluate` or `predict` first."
        lines = ["steps in one execution, in the last run"] * bool(self.choices)
        lines += [
            _wrapped(f"  {one.mode:8}{one.steps:3}  {one.reason}", 15) for one in self.choices
        ]
        total = sum(one.seconds for one in self.programs)
        lines.append(f"programs: {len(self.programs)} compiled in {total:.1f} s")
        for one in self.programs:
            steps = f"{one.steps} steps" if one.steps > 1 else "1 step"
            head = f"  {one.mode:8}{steps:9}{one.seconds:6.2f} s"
            lines.append(_wrapped(f"{head}  {one.cause}: {one.batch}", 29))
        return "\n".join(lines)


def _wrapped(line: str, indent: int) -> str:
    return textwrap.fill(line, _COLUMNS, subsequent_indent=" " * indent, break_on_hyphens=False)


def explain(model: Any) -> Explanation:
    """Say how many steps share an execution, what was compiled for a model, and why.

    Args:
        model: a `keras.Model` that `fit`, `evaluate` or `predict` of fitstep has run on.

    Returns:
        An `Explanation`; print it.

    Example:
        >>> import fitstep as fs, keras
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> print(fs.explain(model))
        Nothing has run yet. Call `fit`, `evaluate` or `predict` first.
    """
    _trainer.check_model(model, "explain")
    record = record_of(model)
    return Explanation(tuple(record.choices.values()), tuple(record.compilations))
