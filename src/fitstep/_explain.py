"""Say what the engine has chosen and compiled for a model, and why."""

from typing import Any, NamedTuple

from fitstep._keras import _trainer
from fitstep.engine._facts import Choice, Compilation
from fitstep.engine._live import record_of


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
        lines = ["steps in one execution, in the last run"]
        lines += [f"  {one.mode:8}{one.steps:3}  {one.reason}" for one in self.choices]
        total = sum(one.seconds for one in self.programs)
        lines.append(f"programs: {len(self.programs)} compiled in {total:.1f} s")
        for one in self.programs:
            steps = f"{one.steps} steps" if one.steps > 1 else "1 step"
            lines.append(f"  {one.mode:8}{steps:9}{one.seconds:6.2f} s  {one.cause}: {one.batch}")
        return "\n".join(lines)


def explain(model: Any) -> Explanation:
    """Say how many steps share an execution, what was compiled for a model, and why.

    Args:
        model: a `keras.Model` that `fit`, `evaluate` or `predict` of fitstep has run on.

    Returns:
        An `Explanation`; print it.

    Example:
        >>> print(fitstep.explain(model))
    """
    _trainer.check_model(model, "explain")
    record = record_of(model)
    return Explanation(tuple(record.choices.values()), tuple(record.compilations))
