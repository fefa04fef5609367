"""`fs.Run`: one training run as a value, checked where it is made."""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest

import fitstep as fs


def compiled() -> keras.Model:
    """The smallest model that can be trained."""
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_a_run_holds_what_it_was_given_and_cannot_be_changed():
    """A run is a frozen value with the defaults of `keras.Model.fit`, save for 32 rows a batch."""
    model, x = compiled(), np.ones((3, 1))
    two: Any = np.int64(2)
    run = fs.Run(model, x, x, epochs=two, callbacks=[keras.callbacks.History()])
    assert (run.model, run.x, run.epochs, run.batch_size, run.shuffle) == (model, x, 2, 32, True)
    assert isinstance(run.callbacks, tuple)
    assert "array" not in repr(run)
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.epochs = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"epochs": 0}, ValueError, r"`Run(epochs=...)` must be >= 1. Received: epochs=0."),
        (
            {"epochs": 2.0},
            TypeError,
            r"`Run(epochs=...)` must be an integer. Received: epochs=2.0.",
        ),
        ({"epochs": None}, TypeError, r"`Run(epochs=...)` must be an integer."),
        ({"batch_size": -1}, ValueError, r"`Run(batch_size=...)` must be >= 1."),
        ({"batch_size": True}, TypeError, r"`Run(batch_size=...)` must be an integer."),
        ({"steps_per_epoch": 0}, ValueError, r"`Run(steps_per_epoch=...)` must be >= 1."),
        ({"validation_steps": 0}, ValueError, r"`Run(validation_steps=...)` must be >= 1."),
        ({"callbacks": 3}, TypeError, r"`Run(callbacks=...)` must be a list or tuple"),
        ({"callbacks": [3]}, TypeError, r"must hold instances of keras.callbacks.Callback"),
    ],
)
def test_wrong_arguments_are_named(arguments, kind, said):
    """Each argument out of range is refused with its name, what it must be and what came."""
    with pytest.raises(kind) as caught:
        fs.Run(compiled(), np.ones((3, 1)), **arguments)
    assert said in str(caught.value)


def test_the_model_must_be_compiled():
    """A model that is not compiled, or no model, is refused with the remedy."""
    with pytest.raises(ValueError, match=r"must be compiled: call `model.compile"):
        fs.Run(keras.Sequential([keras.layers.Dense(1)], name="net"), np.ones((3, 1)))
    with pytest.raises(TypeError, match=r"must be a keras.Model. Received: 'net'"):
        fs.Run("net", np.ones((3, 1)))
