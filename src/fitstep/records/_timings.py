"""Timings of peers that take turns, and their ratios with a spread.

Peers that run one after the other in one process meet the same noise of the machine, so that the
ratio of a pair says more than the seconds of either.
"""

import contextlib
import io
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

ENOUGH = 3  # pairs, where time is short


class Ratio(NamedTuple):
    """The ratio of the medians, between the quartiles of the ratios pair by pair."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def against(self, bound: float) -> str:
        """The ratio, and whether it keeps a bound."""
        met = self.middle <= bound
        return f"{self} {f'<= {bound:.2f}' if met else f'> {bound:.2f}, missed'}"


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    pairs: int,
    *,
    at_most: float = float("inf"),
    after_turn: Callable[[int, Mapping[str, Sequence[float]]], None] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each run, which take turns; what they print is swallowed.

    Args:
        runs: name -> what is timed.
        pairs: turns that count. One before them, which compiles, does not.
        at_most: seconds after which no turn begins, once there are three.
        after_turn: hears the turn's number, counted from 1, and the seconds so far.

    Returns:
        name -> seconds, one for each turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    _take_turn(runs)
    begun = time.perf_counter()
    for turn in range(1, pairs + 1):
        if turn > ENOUGH and time.perf_counter() - begun > at_most:
            break
        for name, taken in _take_turn(runs).items():
            seconds[name].append(taken)
        if after_turn is not None:
            after_turn(turn, seconds)
    return seconds


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """How many times as long ours take.

    Example:
        >>> print(ratio([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]))
        0.50 [0.50, 0.50]
    """
    pairwise = [a / b for a, b in zip(ours, theirs, strict=True)]
    middle = statistics.median(ours) / statistics.median(theirs)
    if len(pairwise) < 2:  # no spread
        return Ratio(middle, middle, middle)
    low, _, high = statistics.quantiles(pairwise, n=4, method="inclusive")
    return Ratio(middle, low, high)


def microseconds(seconds: Sequence[float], steps: int) -> float:
    """Microseconds a step, where each run made so many."""
    return statistics.median(seconds) / steps * 1e6


def _take_turn(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    taken = {}
    for name, run in runs.items():
        with contextlib.redirect_stdout(io.StringIO()):
            start = time.perf_counter()
            run()
            taken[name] = time.perf_counter() - start
    return taken
