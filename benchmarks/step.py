"""What a step costs: fs.fit beside stock fit and two hand-written loops (us/step, ratios).

All sides shuffle and gather the same NumPy arrays, and each run is an epoch and a call of its own.
A ratio is that of the medians of interleaved runs, with the quartiles of the ratios pair by pair.
"""

from collections.abc import Callable
from functools import partial

import keras

import fitstep as fs
from benchmarks import by_hand
from benchmarks.models import Bounds, bounded_cases
from fitstep.cli._cases import Case
from fitstep.records._timings import interleaved, microseconds, ratio

FREQUENT = 16  # `steps_per_execution` of the second stock side
SHORT = 50  # us; below it, a hand-written step leaves less room


def fits(model: keras.Model, case: Case, verbose: int) -> Callable[[], object]:
    """An epoch with Keras's loop."""
    return partial(model.fit, case.x, case.y, batch_size=case.batch_size, verbose=verbose)


def ours(model: keras.Model, case: Case, verbose: int) -> Callable[[], object]:
    """An epoch with fitstep's."""
    return partial(fs.fit, model, case.x, case.y, batch_size=case.batch_size, verbose=verbose)


def frequent(case: Case) -> keras.Model:
    """The model with several steps in one execution, as Keras does it."""
    model = case.build()
    model.compile("adam", model.loss, steps_per_execution=FREQUENT)
    return model


def compare(bounds: Bounds, pairs: int) -> tuple[list[str], list[str]]:
    """The cells of one model's row in either table."""
    case, over_stock = bounds
    hands = {
        "jit": by_hand.jitted(case.build(), case),
        "scan": by_hand.scanned(case.build(), case),
    }
    by_hand.check(case, hands)
    runs = {
        "stock": fits(case.build(), case, 0),
        "stock 16": fits(frequent(case), case, 0),
        **hands,
        "fs": ours(case.build(), case, 0),
        "stock bar": fits(case.build(), case, 1),
        "stock 16 bar": fits(frequent(case), case, 1),
        "fs bar": ours(case.build(), case, 1),
    }
    seconds = interleaved(runs, pairs)
    costs = {name: microseconds(taken, case.steps) for name, taken in seconds.items()}
    best = min(hands, key=lambda name: costs[name])
    quiet = [f"{costs[name]:.0f}" for name in ("stock", "stock 16", "jit", "scan", "fs")]
    quiet += [
        ratio(seconds["fs"], seconds["stock"]).against(over_stock),
        ratio(seconds["fs"], seconds[best]).against(1.25 if costs[best] < SHORT else 1.10),
    ]
    bar = [f"{costs[name]:.0f}" for name in ("stock bar", "stock 16 bar", "fs bar")]
    bar += [
        ratio(seconds["fs bar"], seconds["stock bar"]).against(over_stock),
        str(ratio(seconds["fs bar"], seconds["stock 16 bar"])),
    ]
    return [case.name, *quiet], [case.name, *bar]


def main(pairs: int) -> None:
    """Print both tables."""
    print("| model | stock | stock, 16 per execution | jit | scan 16 | fs.fit", end=" ")
    print("| fs / stock and bound | fs / best by hand and bound |")
    print("|---|---|---|---|---|---|---|---|")
    with_bar = []
    for bounds in bounded_cases():
        quiet, bar = compare(bounds, pairs)
        print(f"| {' | '.join(quiet)} |", flush=True)
        with_bar.append(bar)
    print("\nwith verbose=1, whose bar is written into memory\n")
    print("| model | stock | stock, 16 per execution | fs.fit | fs / stock and bound", end=" ")
    print("| fs / stock 16 |")
    print("|---|---|---|---|---|---|")
    for row in with_bar:
        print(f"| {' | '.join(row)} |", flush=True)
