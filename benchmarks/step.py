"""What a step costs: fs.fit beside stock fit and a hand-written jitted loop (us/step, ratios).

All sides draw the same unshuffled batches from arrays. A ratio is that of the medians of 15
interleaved epochs, with the quartiles of the ratios pair by pair.
"""

import math

import jax
import keras

import fitstep as fs
from benchmarks.models import Case, cases
from benchmarks.timing import interleaved, microseconds, ratio

PAIRS = 15


def hand_written(model: keras.Model, case: Case):
    """An epoch of the loop that one would write by hand: Keras's step, jitted, state donated."""
    state = tuple(
        [variable.value for variable in part]
        for part in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    step = jax.jit(model.train_step, donate_argnums=0)
    # The first step is given copies, so that the model keeps its own arrays.
    held = [jax.tree.map(lambda array: array + 0, state)]

    def epoch() -> None:
        state = held[0]
        for start in range(0, len(case.x), case.batch_size):
            rows = slice(start, start + case.batch_size)
            logs, state = step(state, (case.x[rows], case.y[rows]))
        held[0] = state
        jax.block_until_ready((logs, state))

    return epoch


def row(case: Case) -> list[str]:
    """The cells of one model's row."""
    steps = math.ceil(len(case.x) / case.batch_size)
    models = {name: case.build() for name in ("stock", "fs", "stock 1", "fs 1", "hand")}
    for model in models.values():  # metrics and optimizer are built by a first step
        model.train_on_batch(case.x[: case.batch_size], case.y[: case.batch_size])
    options = {"batch_size": case.batch_size, "shuffle": False}
    runs = {
        "stock": lambda: models["stock"].fit(case.x, case.y, verbose=0, **options),
        "fs": lambda: fs.fit(models["fs"], case.x, case.y, verbose=0, **options),
        "stock 1": lambda: models["stock 1"].fit(case.x, case.y, verbose=1, **options),
        "fs 1": lambda: fs.fit(models["fs 1"], case.x, case.y, verbose=1, **options),
        "hand": hand_written(models["hand"], case),
    }
    seconds = interleaved(runs, PAIRS)
    return [
        case.name,
        microseconds(seconds["stock"], steps),
        microseconds(seconds["hand"], steps),
        microseconds(seconds["fs"], steps),
        ratio(seconds["fs"], seconds["stock"]),
        ratio(seconds["fs 1"], seconds["stock 1"]),
        ratio(seconds["fs"], seconds["hand"]),
    ]


def main() -> None:
    """Print the table."""
    print(
        "| model | stock | by hand | fs.fit | fs / stock | fs / stock, verbose=1 | fs / by hand |"
    )
    print("|---|---|---|---|---|---|---|")
    for case in cases():
        print(f"| {' | '.join(row(case))} |", flush=True)
