"""Pain 20: validate, checkpoint and stop by steps, not by epochs.

The example: 3 passes of 10 batches in rounds of 4 steps, which are 4, 4, 4, 4, 4, 4, 4 and 2.
"""

import csv
import re

import keras
import numpy as np
import pytest
from keras import callbacks, layers

import fitstep as fs
from tests.pains import twins

pytestmark = pytest.mark.usefixtures("equal_programs_compiled_once")

BATCH = 4
EIGHT = [4, 4, 4, 4, 4, 4, 4, 2]
# Stock Keras and fitstep compile the same step apart; a float32 mean of some 40 numbers.
CLOSE = {"rtol": 2e-5, "atol": 1e-6}
generator = np.random.default_rng(3)
X = generator.normal(size=(40, 3)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) + 0.1 * generator.normal(size=(40, 1))).astype("float32")
VALIDATION = (X[::3] * 0.5, Y[::3] - 0.1)


def build(own_class=False):
    keras.utils.set_random_seed(5)
    sequential = fs.Sequential if own_class else keras.Sequential
    model = sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def fit(model, x=X, y=Y, **options):
    options = {"batch_size": BATCH, "verbose": 0, "shuffle": False} | options
    return fs.fit(model, x, y, **options)


class Watch(callbacks.Callback):
    """Counts the steps between two calls of `on_epoch_end` in the optimizer's own count."""

    def __init__(self):
        super().__init__()
        self.rounds, self.begun, self.logs, self.seen = [], [], [], 0

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(epoch)

    def on_epoch_end(self, epoch, logs=None):
        now = int(self.model.optimizer.iterations.numpy())
        self.rounds.append(now - self.seen)
        self.logs.append(dict(logs))
        self.seen = now


def by_hand(batches, cuts, validation=VALIDATION):
    """Stock `train_on_batch`: the mean over the rows of each round, a validation, the weights."""
    model, batches, rounds = build(), iter(batches), []
    for cut in cuts:
        logs, rows = [], []
        for _, (x, y) in zip(range(cut), batches, strict=False):
            logs.append(model.train_on_batch(x, y, return_dict=True))
            rows.append(len(x))
        means = {name: np.average([log[name] for log in logs], weights=rows) for name in logs[0]}
        tested = model.evaluate(*validation, verbose=0, return_dict=True)
        rounds.append(means | {f"val_{name}": value for name, value in tested.items()})
    return rounds, model


def assert_history(history, rounds):
    assert history.epoch == list(range(len(rounds)))
    assert set(history.history) == set(rounds[0])
    for name, values in history.history.items():
        np.testing.assert_allclose(values, [one[name] for one in rounds], **CLOSE, err_msg=name)


def same_weights(model, twin):
    for got, want in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, **CLOSE)


@pytest.mark.parametrize("batch_hook", [False, True])
@pytest.mark.parametrize("own_class", [False, True])
@pytest.mark.parametrize("rows", [40, 38])
def test_rounds_cross_passes_and_take_the_place_of_epochs(rows, own_class, batch_hook):
    """10 batches a pass, 3 passes, rounds of 4: eight rounds, each with its mean and validation."""
    model, watch, heard = build(own_class), Watch(), []
    hooks = [watch]
    if batch_hook:
        hooks.append(callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: heard.append(b)))
    run = model.fit if own_class else lambda *args, **kw: fs.fit(model, *args, **kw)
    history = run(
        X[:rows], Y[:rows], batch_size=BATCH, epochs=3, shuffle=False, verbose=0,
        validate_every=4, validation_data=VALIDATION, callbacks=hooks,
    )  # fmt: skip
    batches = twins.batches(X[:rows], Y[:rows], BATCH)
    rounds, twin = by_hand(batches * 3, EIGHT)
    assert watch.rounds == EIGHT
    assert watch.begun == list(range(8))
    assert heard == ([0, 1, 2, 3] * 7 + [0, 1] if batch_hook else [])
    assert_history(history, rounds)
    same_weights(model, twin)
    whole = build()
    whole.fit(X[:rows], Y[:rows], batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    same_weights(model, whole)


@pytest.mark.parametrize("validate_every", [1, 9, 10, 11, 30, 1000])
def test_rounds_of_any_length(validate_every):
    """One step, about a pass, all or more than all of the steps: the arithmetic holds."""
    model, watch = build(), Watch()
    history = fit(model, epochs=2, validate_every=validate_every, callbacks=[watch])
    full, rest = divmod(20, validate_every)
    assert watch.rounds == [validate_every] * full + [rest] * bool(rest)
    assert history.epoch == list(range(len(watch.rounds)))


def test_each_pass_is_a_new_permutation_with_every_row_once():
    """Shuffled rounds: rows by their number, cut by passes, not by rounds."""
    numbers, seen = np.arange(40, dtype="float32")[:, None], []

    class Notes(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, state, data):
            seen.extend(np.asarray(data[0])[:, 0].astype(int).tolist())
            return super().train_step(state, data)

    model = Notes()
    model.compile("sgd", "mse", run_eagerly=True)
    fit(model, numbers, numbers, epochs=3, validate_every=7, shuffle=True)
    passes = [seen[start : start + 40] for start in (0, 40, 80)]
    assert len(seen) == 120
    assert all(sorted(one) == list(range(40)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3


def test_early_stopping_restores_the_best_round():
    """Rounds as epochs: stops `patience` rounds after the best, whose weights come back."""
    model, kept = build(), []
    rising = iter([3.0, 1.0, 2.0, 2.5, 0.1])  # the validation gets worse after the second round
    fake = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: (
            logs.update(val_loss=next(rising)),
            kept.append(model.get_weights()),
        )
    )
    stop = callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    history = fit(
        model, epochs=3, validate_every=4, validation_data=VALIDATION, callbacks=[fake, stop]
    )
    assert history.epoch == [0, 1, 2, 3]
    assert (stop.best_epoch, stop.stopped_epoch) == (1, 3)
    twins.assert_same(model.get_weights(), kept[1])


def test_savers_schedules_and_loggers_act_on_rounds(tmp_path):
    """ModelCheckpoint keeps the best round, the rate is set by round, CSVLogger writes a line each."""
    model, rates = build(), []
    best = tmp_path / "best.keras"
    hooks = [
        callbacks.ModelCheckpoint(best, "val_loss", save_best_only=True),
        callbacks.LearningRateScheduler(lambda epoch: 0.01 * (epoch + 1)),
        callbacks.LambdaCallback(
            on_epoch_end=lambda e, logs: rates.append(float(model.optimizer.learning_rate))
        ),
        callbacks.CSVLogger(tmp_path / "log.csv"),
    ]
    options = {"validation_data": VALIDATION, "callbacks": hooks}
    history = fit(model, epochs=3, validate_every=4, **options).history
    np.testing.assert_allclose(rates, 0.01 * np.arange(1, 9), rtol=1e-6)
    with (tmp_path / "log.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [int(line["epoch"]) for line in lines] == list(range(8))
    np.testing.assert_allclose([float(line["val_loss"]) for line in lines], history["val_loss"])
    saved = keras.saving.load_model(best).evaluate(*VALIDATION, verbose=0, return_dict=True)
    np.testing.assert_allclose(saved["loss"], min(history["val_loss"]), **CLOSE)


def test_a_plateau_is_counted_in_rounds():
    """ReduceLROnPlateau with a metric that stands still halves the rate after each round but one."""
    model = build()
    hook = callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9, min_lr=0)
    fit(model, epochs=1, validate_every=3, callbacks=[hook])  # 4 rounds
    np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.05 / 8)


def test_backup_and_restore_goes_on_with_the_next_round(tmp_path):
    """Killed in round 5, a new model goes on there, on the batches that follow, to the same end."""

    class Kill(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 5:
                raise KeyboardInterrupt

    whole = build()
    fit(whole, epochs=3, validate_every=4)
    with pytest.raises(KeyboardInterrupt):
        backup = callbacks.BackupAndRestore(tmp_path / "backup")
        fit(build(), epochs=3, validate_every=4, callbacks=[backup, Kill()])
    model, backup, watch = build(), callbacks.BackupAndRestore(tmp_path / "backup"), Watch()
    history = fit(model, epochs=3, validate_every=4, callbacks=[backup, watch])
    assert history.epoch == watch.begun == [5, 6, 7]
    same_weights(model, whole)


@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_epoch_end", "on_epoch_begin"])
def test_nested_evaluations_do_no_harm(moment):
    """Keras's and fitstep's `evaluate` and `predict` in a callback change neither logs nor weights."""
    model = build()

    def nested(*_, **__):
        model.evaluate(*VALIDATION, verbose=0)
        fs.evaluate(model, *VALIDATION, verbose=0)
        fs.predict(model, X, verbose=0)

    hook = callbacks.LambdaCallback(**{moment: nested})
    options = {"epochs": 1, "validate_every": 4, "validation_data": VALIDATION}
    history = fit(model, callbacks=[hook], **options)
    rounds, twin = by_hand(twins.batches(X, Y, BATCH), [4, 4, 2])
    assert_history(history, rounds)
    same_weights(model, twin)


class Items(keras.utils.PyDataset):
    def __init__(self, count=10, **kwargs):
        super().__init__(**kwargs)
        self.count, self.begun, self.ended = count, 0, 0

    @property
    def num_batches(self):
        return self.count

    def __getitem__(self, i):
        i %= 10
        return X[i * BATCH : (i + 1) * BATCH], Y[i * BATCH : (i + 1) * BATCH]

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1


def test_a_dataset_hears_of_its_passes_not_of_rounds():
    """Three passes of a PyDataset are begun and ended three times more than stock `fit` does first."""
    model, items, watch = build(), Items(), Watch()
    fs.fit(model, items, epochs=3, validate_every=4, shuffle=False, verbose=0, callbacks=[watch])
    one_pass = Items()
    fs.fit(build(), one_pass, epochs=3, shuffle=False, verbose=0)
    assert (items.begun, items.ended) == (one_pass.begun, one_pass.ended)
    assert watch.rounds == EIGHT
    same_weights(model, by_hand(twins.batches(X, Y, BATCH) * 3, EIGHT)[1])


@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_sources_of_unknown_size(verbose, capsys):
    """An endless PyDataset ends with `max_steps`; a generator is one pass, drawn no further."""
    watch = Watch()
    options = {"validate_every": 4, "verbose": verbose, "shuffle": False}
    fs.fit(build(), Items(None), max_steps=10, callbacks=[watch], **options)
    assert watch.rounds == [4, 4, 2]
    drawn, watch = [], Watch()

    def batches():
        for i in range(7):
            drawn.append(i)
            yield Items()[i]

    history = fs.fit(build(), batches(), callbacks=[watch], **options)
    assert watch.rounds == [4, 3]
    assert history.epoch == [0, 1]
    drawn.clear()
    fs.fit(build(), batches(), max_steps=5, **options)
    assert drawn == [0, 1, 2, 3, 4]


def test_a_generator_has_only_one_pass_and_says_so():
    """`epochs` counts passes: where a second is asked for and has no batch, a warning tells."""
    batches = (Items()[i] for i in range(7))
    with pytest.warns(UserWarning, match="ran out of data after 1 of 3 passes"):
        history = fs.fit(build(), batches, epochs=3, validate_every=4, shuffle=False, verbose=0)
    assert history.epoch == [0, 1]


def test_data_without_a_batch_is_an_error():
    """As with epochs, a run without any batch isn't a success."""
    with pytest.raises(fs.DataError, match="no batch"):
        fs.fit(build(), Items(0), validate_every=4, shuffle=False, verbose=0)


@pytest.mark.parametrize(
    ("name", "value"), [("validation_freq", 2), ("steps_per_epoch", 5), ("initial_epoch", 1)]
)
def test_what_counts_epochs_is_refused_by_name(name, value):
    """Where there are no epochs, an argument that counts them has no meaning."""
    message = rf"`validate_every` and `{name}` can't be combined.*{name}={value}"
    with pytest.raises(ValueError, match=message):
        fit(build(), validate_every=4, **{name: value})


@pytest.mark.parametrize("name", ["validate_every", "max_steps", "max_compiles"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "4"])
def test_counts_are_integers_of_at_least_one(name, value):
    """Anything else is refused before the first step, with the value."""
    message = rf"`{name}` must be an integer >= 1. Received: {value!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(build(), **{name: value})


@pytest.mark.parametrize(
    ("max_steps", "cuts"), [(1, [1]), (10, [10]), (14, [10, 4]), (99, [10] * 3)]
)
@pytest.mark.parametrize("stride", [1, 3])
def test_max_steps_counts_over_epochs_and_ends_with_a_validation(max_steps, cuts, stride):
    """An epoch that is cut short has its mean, its validation and its `on_epoch_end`."""
    model, watch = build(), Watch()
    options = {"steps_per_execution": stride, "validation_data": VALIDATION, "callbacks": [watch]}
    history = fit(model, epochs=3, max_steps=max_steps, **options)
    assert watch.rounds == cuts
    rounds, twin = by_hand(twins.batches(X, Y, BATCH) * 3, cuts)
    assert_history(history, rounds)
    same_weights(model, twin)


@pytest.mark.parametrize("stride", [1, 3, 16])
def test_a_stride_ends_with_its_round(stride):
    """`steps_per_execution` tells of steps inside a round; none goes over its end."""
    heard = []
    hook = callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: heard.append(batch))
    options = {"validate_every": 4, "max_steps": 6, "steps_per_execution": stride}
    model, watch = build(), Watch()
    fit(model, epochs=3, callbacks=[hook, watch], **options)
    assert watch.rounds == [4, 2]
    assert heard == {1: [0, 1, 2, 3, 0, 1], 3: [2, 3, 1], 16: [3, 1]}[stride]
    same_weights(model, by_hand(twins.batches(X, Y, BATCH), [6])[1])


def headers_and_totals(text):
    text = re.sub(r"\x1b\[\d+m|\x08", "", text)
    # A bar is drawn over and over in one line: what counts is how it ends.
    lines = [line.rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").split("\n")]
    totals = [line.split()[0] for line in lines if "loss: " in line]
    return re.findall(r"Epoch (\S+)", text), totals


@pytest.mark.parametrize("verbose", [1, 2])
def test_the_progress_bar_counts_to_what_there_is(verbose, capsys):
    """`1/3` of the rounds, `4/4` of the steps, of a short round `2/2`, or `2/4` if nobody knew."""
    fit(build(), verbose=verbose, validate_every=4)
    assert headers_and_totals(capsys.readouterr().out) == (
        ["1/3", "2/3", "3/3"], ["4/4", "4/4", "2/2"],
    )  # fmt: skip
    fit(build(), verbose=verbose, epochs=2, max_steps=14)
    assert headers_and_totals(capsys.readouterr().out) == (["1/2", "2/2"], ["10/10", "4/4"])
    fs.fit(
        build(), (Items()[i] for i in range(6)), validate_every=4, verbose=verbose, shuffle=False
    )
    assert headers_and_totals(capsys.readouterr().out) == (["1/inf", "2/inf"], ["4/4", "2/4"])


@pytest.mark.parametrize("cut", [{"validate_every": 4}, {"steps_per_epoch": 4, "epochs": 2}])
def test_data_that_a_callback_changes_between_rounds_is_seen(cut):
    """Rows beyond the round's end are not read before it; Keras reads them at most a batch before."""
    x = np.zeros((32, 1), "float32")

    class First(keras.Sequential):
        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {**logs, "first": data[0][0, 0]}, state

    model = First([keras.Input((1,)), layers.Dense(1)])
    model.compile("sgd", "mse")

    def change(epoch, logs):
        x[:] = epoch + 1

    hook = callbacks.LambdaCallback(on_epoch_end=change)
    history = fit(model, x, np.zeros((32, 1)), callbacks=[hook], **cut).history
    assert history["first"] == [0, 1]


def test_logs_of_a_step_of_ones_own_are_means_over_the_rows_of_a_round():
    """A stock-contract step that reports the mean of its inputs: NumPy's mean of each round's rows."""

    class Own(keras.Sequential):
        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {**logs, "mean_x": data[0].mean()}, state

    model = Own([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    history = fit(model, X[:38], Y[:38], epochs=2, validate_every=4).history
    twice = np.concatenate([X[:38]] * 2)
    cuts = [16, 32, 46, 62, 76]  # the tenth and the twentieth batch have two rows
    means = [part.mean() for part in np.split(twice, cuts[:-1])]
    np.testing.assert_allclose(history["mean_x"], means, rtol=1e-4, atol=1e-6)
