"""One model used from several threads at once."""

import concurrent.futures
import functools
import sys
import threading

import keras
import numpy as np
import pytest

import fitstep as fs
from fitstep.engine._live import record_of
from tests.pains.twins import assert_same, count_of, counting_mlp, twin_of, values_of


@pytest.fixture
def _busy_threads():
    """Threads take turns hundreds of times a millisecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(count, work):
    """Run `work` in threads at once, and raise the first error of one of them."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(work) for _ in range(count)]]


@pytest.mark.usefixtures("_busy_threads")
@pytest.mark.parametrize("kind", ["plain", "fs.Sequential"])
def test_predictions_in_many_threads_at_once(rows, kind):
    """Six threads predict with one model that nobody has traced before: all get the true outputs."""
    x, _ = rows
    model = (fs if kind != "plain" else keras).Sequential(
        [keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    )
    kernel, bias = model.get_weights()
    predict = functools.partial(fs.predict, model) if kind == "plain" else model.predict
    for outputs in in_threads(6, lambda: predict(x, batch_size=7, verbose=0)):
        np.testing.assert_allclose(outputs, x @ kernel + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_busy_threads")
def test_predictions_beside_a_fit_disturb_no_step_of_it(rows):
    """A thread that predicts all the while, as a server does, changes no weight of the fit."""
    x, y = rows
    options = {"batch_size": 5, "epochs": 10, "shuffle": False, "verbose": 0}
    model = counting_mlp()
    twin = twin_of(model, counting_mlp)
    fs.fit(twin, x, y, **options)
    done, outputs = threading.Event(), []

    def serve():
        while not done.is_set():
            outputs.append(fs.predict(model, x, verbose=0))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        try:
            fs.fit(model, x, y, **options)
        finally:
            done.set()
        serving.result()
    assert len(outputs) > 1
    assert count_of(model) == 10 * 14
    assert_same(values_of(model), values_of(twin))


def test_a_callback_may_wait_for_a_thread_that_predicts(rows):
    """A thread that a callback starts and joins can use the model."""
    x, y = rows
    model = counting_mlp()
    outputs = []

    def predict_in_thread(batch, logs):
        outputs.extend(in_threads(1, lambda: fs.predict(model, x, verbose=0)))
        np.testing.assert_allclose(outputs[-1], model(x), rtol=1e-5, atol=1e-5)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=predict_in_thread)
    fs.fit(model, x, y, batch_size=35, verbose=0, callbacks=[callback])
    assert len(outputs) == 2


@pytest.mark.usefixtures("_busy_threads")
def test_a_model_has_one_record_whatever_thread_asks_first():
    """Eight threads that meet a model for the first time get the same record, and so one lock."""
    for _ in range(10):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        barrier = threading.Barrier(8)

        def ask(model=model, barrier=barrier):
            barrier.wait()
            return record_of(model)

        assert len({id(record) for record in in_threads(8, ask)}) == 1


# Keras says so where a generator ends with its one epoch.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_a_source_may_wait_for_a_thread_that_uses_the_model(rows, verb):
    """The first batch, on which a model is built, is drawn while other threads may use the model."""
    x, y = rows
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    predicted = threading.Event()

    def source():
        def predict():
            fs.predict(model, x, verbose=0)
            predicted.set()

        threading.Thread(target=predict, daemon=True).start()
        assert predicted.wait(60), "the thread could not use the model"
        yield x, y

    options = {"shuffle": False} if verb == "fit" else {}
    getattr(fs, verb)(model, source(), verbose=0, **options)
    assert predicted.is_set()


def test_a_thread_that_reads_numbers_while_another_traces_is_told_so(rows):
    """It is an error that names the variable, and not one from inside fitstep or JAX."""
    x, y = rows
    errors = []

    class Reading(fs.Sequential):
        def train_step(self, state, data):
            def read():
                try:
                    self.layers[0].get_weights()
                except fs.StateError as error:
                    errors.append(str(error))

            in_threads(1, read)
            return super().train_step(state, data)

    model = Reading([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=70, verbose=0)
    assert len(errors) == 1
    assert "kernel` was turned into numbers while another thread traces" in errors[0]


@pytest.mark.usefixtures("_busy_threads")
def test_evaluations_beside_a_fit_leave_its_weights_right(rows):
    """The two share their metrics, so no number of these is promised, but each update is."""
    x, y = rows
    options = {"batch_size": 5, "epochs": 10, "shuffle": False, "verbose": 0}
    model = counting_mlp()
    twin = twin_of(model, counting_mlp)
    fs.fit(twin, x, y, **options)
    done = threading.Event()

    def evaluate():
        while not done.is_set():
            fs.evaluate(model, x, y, batch_size=5, verbose=0)
            fs.capture(model)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        evaluating = pool.submit(evaluate)
        try:
            fs.fit(model, x, y, **options)
        finally:
            done.set()
        evaluating.result()
    assert count_of(model) == 10 * 14
    assert_same(values_of(model), values_of(twin))
