"""The order of a run, as it is written down in the loop."""

import keras
import numpy as np
import pytest

import fitstep as fs


class Recorder(keras.callbacks.Callback):
    """Notes every hook with its number."""

    def __init__(self, events):
        super().__init__()
        for kind in ("train", "test", "predict"):
            for moment in ("begin", "end"):
                self._note(events, f"on_{kind}_{moment}")
                self._note(events, f"on_{kind}_batch_{moment}")
        for moment in ("begin", "end"):
            self._note(events, f"on_epoch_{moment}")

    def _note(self, events, hook):
        def noted(*args, logs=None):
            number = args[:1] if args and isinstance(args[0], int) else ()
            events.append((hook.removeprefix("on_"), *number))

        setattr(self, hook, noted)


class Stepper(keras.Model):
    """A model that notes when its steps run, which they do eagerly."""

    def __init__(self, events):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.note = events.append  # a list would become a copy that Keras tracks

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        self.note(("train step",))
        return super().train_step(state, data)

    def test_step(self, state, data):
        self.note(("test step",))
        return super().test_step(state, data)

    def reset_metrics(self):
        self.note(("metrics reset",))
        super().reset_metrics()


def _events(fit, **options):
    events: list = []
    model = Stepper(events)
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.ones((5, 3), "float32")
    events.clear()
    fit(model, x, x[:, :1], callbacks=[Recorder(events)], verbose=0, **options)
    return events


def test_the_order_of_a_training_run():
    """An epoch: metrics reset, begin, steps between their hooks, validation, end."""
    x = np.ones((2, 3), "float32")
    events = _events(fs.fit, batch_size=3, epochs=1, validation_data=(x, x[:, :1]))
    assert events == [
        ("train_begin",),
        ("metrics reset",),
        ("epoch_begin", 0),
        ("train_batch_begin", 0),
        ("train step",),
        ("train_batch_end", 0),
        ("train_batch_begin", 1),
        ("train step",),
        ("train_batch_end", 1),
        ("test_begin",),
        ("metrics reset",),
        ("test_batch_begin", 0),
        ("test step",),
        ("test_batch_end", 0),
        ("test_end",),
        ("epoch_end", 0),
        ("train_end",),
    ]


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_the_order_is_that_of_keras(steps_per_execution):
    """The same hooks, numbers, steps and resets in the same order as `keras.Model.fit`."""

    def stock(model, *args, **kwargs):
        model.steps_per_execution = steps_per_execution
        model.fit(*args, **kwargs)

    def ours(model, *args, **kwargs):
        fs.fit(model, *args, steps_per_execution=steps_per_execution, **kwargs)

    x = np.ones((4, 3), "float32")
    options = {"batch_size": 1, "epochs": 2, "validation_data": (x, x[:, :1]), "validation_freq": 2}
    assert _events(ours, **options) == _events(stock, **options)
