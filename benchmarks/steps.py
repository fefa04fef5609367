"""A loop of one's own: fs.steps beside the bare jitted loop and train_on_batch (us/step)."""

from collections import deque
from collections.abc import Callable

import jax
import keras
import numpy as np

import fitstep as fs
from benchmarks import by_hand
from fitstep.cli._cases import Case, cases
from fitstep.records._timings import interleaved, microseconds, ratio

STEPS = 400
BARE = "jitted loop"


def with_engine(case: Case) -> keras.Model:
    """The case's model, as a model that has fitstep's engine behind its own methods."""
    model = case.build()
    ours = fs.Model(model.inputs, model.outputs)
    ours.compile("adam", model.loss)
    return ours


def on_batches(model: keras.Model, case: Case) -> Callable[[], object]:
    """An epoch of `train_on_batch`, which reads its logs after each step."""
    generator = np.random.default_rng(0)

    def epoch() -> None:
        order = generator.permutation(len(case.x))
        for start in range(0, len(order), case.batch_size):
            rows = order[start : start + case.batch_size]
            model.train_on_batch(np.take(case.x, rows, 0), np.take(case.y, rows, 0))

    return epoch


def over_steps(model: keras.Model, case: Case) -> Callable[[], object]:
    """An epoch of `fs.steps`, whose logs stay on the device."""

    def epoch() -> None:
        executed = fs.steps(model, (case.x, case.y), batch_size=case.batch_size, epochs=1)
        jax.block_until_ready(deque(executed, maxlen=1))  # the last step's logs

    return epoch


def main(pairs: int) -> None:
    case = cases()[0].cut(STEPS)
    runs = {
        BARE: by_hand.jitted(case.build(), case),
        "train_on_batch, stock": on_batches(case.build(), case),
        "train_on_batch, fitstep": on_batches(with_engine(case), case),
    }
    by_hand.check(case, {BARE: runs[BARE]})
    runs["fs.steps"] = over_steps(case.build(), case)
    seconds = interleaved(runs, pairs)
    print(f"{case.name}, {case.steps} steps")
    for name, taken in seconds.items():
        over = ratio(taken, seconds[BARE])
        print(f"{name:24} {microseconds(taken, case.steps):6.0f} us/step, {over} of the {BARE}")
