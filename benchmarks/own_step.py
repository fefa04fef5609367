"""What a step of one's own costs, in Keras's stock contract: the credit experiment's (us/step)."""

from functools import partial

import keras

import fitstep as fs
from benchmarks import by_hand
from fitstep.cli._cases import Case
from fitstep.experiments import credit
from fitstep.records._timings import interleaved, microseconds, ratio

EPOCHS = 20  # of 20 steps


def credit_case() -> Case:
    """The experiment's model, on the training rows of its first fold."""
    config = credit.Config()
    x, y = next(credit.stratified_folds(config.folds, config.seed)).train

    def make() -> keras.Model:
        model = credit.compiled("cost-priced", config)
        model(x[:1])  # builds it
        return model

    return Case("credit, batch 32", make, x, y, config.batch_size)


def main(pairs: int) -> None:
    case = credit_case()
    hands = {
        "jit": by_hand.jitted(case.build(), case),
        "scan 16": by_hand.scanned(case.build(), case),
    }
    by_hand.check(case, hands)
    options = {"batch_size": case.batch_size, "epochs": EPOCHS, "verbose": 0}
    runs = {
        "stock": partial(case.build().fit, case.x, case.y, **options),
        **{name: partial(_repeat, epoch) for name, epoch in hands.items()},
        "fs.fit": partial(fs.fit, case.build(), case.x, case.y, **options),
    }
    seconds = interleaved(runs, pairs)
    for name, taken in seconds.items():
        over = ratio(seconds["fs.fit"], taken)
        cost = microseconds(taken, EPOCHS * case.steps)
        print(f"{name:10} {cost:6.0f} us/step; fs.fit takes {over} of it")


def _repeat(epoch: by_hand.Epoch) -> None:
    for _ in range(EPOCHS):
        epoch()
