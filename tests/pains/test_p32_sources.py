"""Pain 32: whatever yields batches drives `fs.steps`, and is asked for no more than a step needs.

The example: a generator whose next batch depends on what the model says after the step before.
"""

import itertools

import keras
import numpy as np
import pytest
from keras import layers

import fitstep as fs
from tests.pains import twins
from tests.pains.loops import BATCH, PAIRS, X, Y, plain, running_means, steps

pytestmark = pytest.mark.usefixtures("equal_programs_compiled_once")


def test_the_next_batch_may_depend_on_the_step_before():
    """Drawn one at a time, each after the step before it: the batches follow the model's weights."""
    model, twin, events = plain(), plain(), []

    def play(actor, rounds):
        for i in range(rounds):
            events.append(("draw", i))
            bias = float(actor.layers[1].bias.numpy()[0])
            yield X[:BATCH] + bias, Y[:BATCH] - bias

    for i, _ in enumerate(steps(model, play(model, 5))):
        events.append(("step", i))
    assert events == [(what, i) for i in range(5) for what in ("draw", "step")]
    for x, y in play(twin, 5):
        twin.train_on_batch(x, y)
    twins.assert_close(model.get_weights(), twin.get_weights())


class Draws:
    """An iterator that is no generator."""

    def __init__(self):
        self.left = list(PAIRS)

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


class Loader:
    """An iterable that starts anew each time."""

    def __iter__(self):
        return iter(PAIRS)


class Items(keras.utils.PyDataset):
    def __len__(self):
        return len(PAIRS)

    def __getitem__(self, index):
        return PAIRS[index]


ITERATED_ONCE = {
    "generator": lambda: (pair for pair in PAIRS),
    "iterator": Draws,
    "zip": lambda: zip((x for x, _ in PAIRS), (y for _, y in PAIRS), strict=True),
    "map": lambda: map(tuple, PAIRS),
}


ITERATED_ANEW = {"list": lambda: list(PAIRS), "loader": Loader, "dataset": Items}


@pytest.mark.parametrize("name", [*ITERATED_ONCE, *ITERATED_ANEW])
def test_any_iterable_of_batches_is_a_source(name):
    """The weights are those of the same batches given to stock `train_on_batch`."""
    epochs = 2 if name in ITERATED_ANEW else 1
    source = (ITERATED_ONCE | ITERATED_ANEW)[name]
    model = plain()
    assert len(list(steps(model, source(), epochs=epochs, batch_size=None))) == 4 * epochs
    twins.assert_close(model.get_weights(), running_means(PAIRS, epochs)[1].get_weights())


@pytest.mark.parametrize("name", ITERATED_ONCE)
def test_what_is_iterated_once_says_so_when_more_is_asked(name):
    """A second epoch of a generator, or more steps than it has: a warning, and what there was."""
    with pytest.warns(UserWarning, match="ran out of data after 1 of 2 epochs"):
        assert len(list(steps(plain(), ITERATED_ONCE[name](), epochs=2))) == 4
    with pytest.warns(UserWarning, match="ran out of data"):
        assert len(list(steps(plain(), ITERATED_ONCE[name](), steps_per_epoch=6))) == 4


def test_arrays_alone_weights_and_lists_of_inputs():
    """`(x, y, sample_weight)` weighs; `x` alone, and a list of inputs, go to the model's own loss."""
    weight = np.linspace(0, 2, 30, dtype="float32")
    model, twin = plain(), plain()
    list(steps(model, (X, Y, weight)))
    for start in range(0, 30, BATCH):
        part = slice(start, start + BATCH)
        twin.train_on_batch(X[part], Y[part], weight[part])
    twins.assert_close(model.get_weights(), twin.get_weights())

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.seen = layers.Dense(1), []

        def call(self, inputs):
            return self.dense(sum(inputs) if isinstance(inputs, list) else inputs)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(y_pred**2)

    for data in (X, (X,), [X, X]):
        model = Own()
        model.compile("sgd")
        assert len(list(fs.steps(model, data, batch_size=BATCH))) == 4


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ((X[:0], Y[:0]), fs.DataError, "at least one row"),
        ((X, Y[:5]), fs.DataError, "equally many rows"),
        ([], fs.DataError, "no batch|at least one row"),
        (iter([]), fs.DataError, "empty"),
        (iter([[X, Y]]), fs.DataError, r"must be a tuple: \(x,\), \(x, y\)"),
        (7, ValueError, "Unrecognized data type"),
        (None, ValueError, "Unrecognized data type|at least one row"),
    ],
)
def test_data_that_is_none_is_refused(data, error, message):
    """Before the first step, with what is wrong and how a batch looks."""
    with pytest.raises(error, match=message):
        list(steps(plain(), data))


def test_max_steps_draws_no_more():
    """`max_steps` and `steps_per_epoch` end the loop with the last batch that they need."""
    drawn = []

    def endless():
        for i in itertools.count():
            drawn.append(i)
            yield PAIRS[0]

    assert len(list(steps(plain(), endless(), max_steps=3))) == 3
    assert drawn == [0, 1, 2]
    drawn.clear()
    assert len(list(steps(plain(), endless(), steps_per_epoch=2, epochs=2))) == 4
    assert drawn == [0, 1, 2, 3]
    assert len(list(steps(plain(), epochs=5, max_steps=6))) == 6
