"""What evaluate and predict cost: fitstep beside stock Keras (us/step, ratios)."""

from collections.abc import Callable

import fitstep as fs
from fitstep.cli._cases import Case, cases
from fitstep.records._timings import interleaved, microseconds, ratio

NAMES = ("MLP", "CNN")


def calls(case: Case) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Name -> the call with stock Keras and with fitstep, on a model each."""
    stock, ours = case.build(), case.build()
    options = {"batch_size": case.batch_size, "verbose": 0}

    def both(keras_call: Callable, own_call: Callable, *data: object) -> tuple:
        return (lambda: keras_call(*data, **options), lambda: own_call(ours, *data, **options))

    return {
        "evaluate": both(stock.evaluate, fs.evaluate, case.x, case.y),
        "predict": both(stock.predict, fs.predict, case.x),
    }


def main(pairs: int) -> None:
    print("| model | call | stock | fitstep | fs / stock |")
    print("|---|---|---|---|---|")
    for case in (case for case in cases() if case.name.startswith(NAMES)):
        for name, (stock, ours) in calls(case).items():
            seconds = interleaved({"stock": stock, "fs": ours}, pairs)
            costs = [f"{microseconds(seconds[side], case.steps):.0f}" for side in ("stock", "fs")]
            cells = [case.name, name, *costs, str(ratio(seconds["fs"], seconds["stock"]))]
            print(f"| {' | '.join(cells)} |", flush=True)
