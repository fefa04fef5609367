"""What a fit of one step costs when all is compiled: fs.fit beside stock fit (ms)."""

import statistics

import fitstep as fs
from benchmarks.models import cases
from benchmarks.timing import interleaved, ratio

PAIRS = 15


def main() -> None:
    print("| model | stock, ms | fs.fit, ms | ratio |")
    print("|---|---|---|---|")
    for case in cases():
        stock, ours = case.build(), case.build()
        x, y = case.x[: case.batch_size], case.y[: case.batch_size]
        arguments = {"batch_size": case.batch_size, "shuffle": False, "verbose": 0}
        runs = {
            "stock": lambda: stock.fit(x, y, **arguments),  # noqa: B023 - run in this turn
            "fs": lambda: fs.fit(ours, x, y, **arguments),  # noqa: B023
        }
        seconds = interleaved(runs, PAIRS)
        cells = [
            case.name,
            f"{statistics.median(seconds['stock']) * 1e3:.1f}",
            f"{statistics.median(seconds['fs']) * 1e3:.1f}",
            ratio(seconds["fs"], seconds["stock"]),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
