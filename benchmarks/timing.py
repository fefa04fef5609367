"""Ratios of medians over interleaved runs, with their spread."""

import contextlib
import io
import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(runs: Mapping[str, Callable[[], object]], pairs: int) -> dict[str, list[float]]:
    """Seconds of each run, `pairs` times each in turn, after one run that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(pairs + 1):
        for name, run in runs.items():
            with contextlib.redirect_stdout(io.StringIO()):
                start = time.perf_counter()
                run()
                taken = time.perf_counter() - start
            if turn:
                seconds[name].append(taken)
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> str:
    """The ratio of the medians, and the quartiles of the ratios pair by pair."""
    pairwise = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    low, _, high = statistics.quantiles(pairwise, n=4)
    middle = statistics.median(ours) / statistics.median(theirs)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def microseconds(seconds: list[float], steps: int) -> str:
    return f"{statistics.median(seconds) / steps * 1e6:.0f}"
