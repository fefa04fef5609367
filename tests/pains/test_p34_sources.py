"""Pain 34: more is drawn from a source than is trained on, and a loader is read far ahead.

The example: a generator is asked for as many batches as there are steps, each when its step begins.
`tests/sources` tries each kind of source for itself.
"""

import keras
import numpy as np
import pytest

import fitstep as fs
from tests.sources.runs import dense


class Counted(keras.utils.PyDataset):
    """Batches of 8 rows; notes which were asked for, and how many steps were made until then."""

    def __init__(self, count, model):
        super().__init__()
        self.count, self.model, self.asked = count, model, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.asked.append((index, int(self.model.optimizer.iterations)))
        return np.ones((8, 5), "float32"), np.ones((8, 1), "float32")


@pytest.fixture
def model():
    model = dense()
    model.build((None, 5))
    return model


def test_a_generator_is_asked_for_each_batch_when_its_step_begins(model):
    """Never earlier, so that a batch may depend on the steps before it."""
    made = []

    def batches():
        while True:
            made.append(int(model.optimizer.iterations))
            yield np.ones((8, 5), "float32"), np.ones((8, 1), "float32")

    fs.fit(model, batches(), steps_per_epoch=7, epochs=2, shuffle=False, verbose=0)
    assert made == [*range(14)]


def test_a_stride_draws_its_own_batches_and_no_more(model):
    """With three steps between the calls of the hooks, no batch is drawn before its stride."""
    made = []

    def batches():
        while True:
            made.append(int(model.optimizer.iterations))
            yield np.ones((8, 5), "float32"), np.ones((8, 1), "float32")

    fs.fit(model, batches(), steps_per_epoch=6, steps_per_execution=3, shuffle=False, verbose=0)
    assert made == [0, 0, 2, 3, 3, 3]  # two steps are timed before more share an execution


def test_a_dataset_is_read_ahead_but_each_item_once(model):
    """Its items stand in their order, and none is asked for that is not trained on."""
    source = Counted(20, model)
    fs.fit(model, source, shuffle=False, verbose=0)
    indices = [index for index, _ in source.asked]
    assert indices in ([0, *range(20)], [*range(20)])  # Keras looks at the first one beforehand
    source.asked.clear()
    fs.fit(model, source, shuffle=False, verbose=0, max_steps=5)
    assert max(index for index, _ in source.asked) == 4


def test_a_dataset_whose_steps_are_watched_is_not_read_ahead(model):
    """A callback that acts after a batch may change what the data set gives next."""
    source = Counted(5, model)
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    fs.fit(model, source, shuffle=False, verbose=0, callbacks=[watch])
    assert source.asked[-5:] == [(index, index) for index in range(5)]


@pytest.mark.parametrize("verb", ["evaluate", "predict", "steps"])
def test_other_runs_draw_as_many_as_they_need(model, verb):
    """`evaluate`, `predict` and `steps` stop drawing where they stop."""
    drawn = []

    def batches():
        while True:
            drawn.append(len(drawn))
            yield np.ones((8, 5), "float32"), np.ones((8, 1), "float32")

    if verb == "steps":
        for count, _ in enumerate(fs.steps(model, batches(), steps_per_epoch=9)):
            if count == 2:
                break
    else:
        getattr(fs, verb)(model, batches(), steps=3, verbose=0)
    assert drawn == [0, 1, 2]


def test_grain_is_read_no_further_than_its_threads_need(model):
    """Of a map data set of ten thousand rows, one step reads tens of batches, not hundreds."""
    grain = pytest.importorskip("grain")
    read = []

    def row(index):
        read.append(index)
        return np.ones(5, "float32"), np.ones(1, "float32")

    source = grain.MapDataset.range(10_000).map(row).batch(8)
    fs.fit(model, source, steps_per_epoch=1, shuffle=False, verbose=0)
    assert 8 <= len(set(read)) <= 8 * 40


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("verb", ["fit", "steps", "evaluate", "validation"])
def test_data_without_targets_says_what_the_loss_needs(verb, built):
    """Stock Keras says that None is not a valid value for an array, and no more."""
    x = np.ones((8, 3), "float32")
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    if built:
        fs.fit(model, x, x[:, :1], verbose=0)
    calls = {
        "fit": lambda: fs.fit(model, x, verbose=0),
        "steps": lambda: next(fs.steps(model, x)),
        "evaluate": lambda: fs.evaluate(model, x, verbose=0),
        "validation": lambda: fs.fit(model, x, x[:, :1], validation_data=x, verbose=0),
    }
    with pytest.raises(ValueError, match="None") as caught:
        calls[verb]()
    assert any("the data has no `y`" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("name", ["y", "sample_weight"])
def test_sparse_targets_and_weights_are_refused_by_name(name):
    """Only `x` may be sparse."""
    sparse = pytest.importorskip("scipy.sparse")
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = {"y": np.ones((8, 1)), name: sparse.csr_matrix(np.ones((8, 1)))}
    with pytest.raises(fs.DataError, match=f"`{name}` is a sparse matrix"):
        fs.fit(model, np.ones((8, 3)), **data, verbose=0)
