"""`fs.explain`: how many steps share an execution and why not more, what was compiled and why."""

import keras
import numpy as np
import pytest
from keras import layers

import fitstep as fs
from fitstep.engine import _runner
from tests.pains import twins

pytestmark = pytest.mark.usefixtures("equal_programs_compiled_once")

X = np.random.default_rng(0).normal(size=(128, 5)).astype("float32")
Y = X[:, :1]


def build(**compile_options):
    model = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
    model.compile("sgd", "mse", **compile_options)
    return model


def choice(model, mode="train"):
    (found,) = [one for one in fs.explain(model).choices if one.mode == mode]
    return found.steps, found.reason


def chosen(model=None, x=X, y=Y, **options):
    model = model or build()
    fs.fit(model, x, y, **{"batch_size": 4, "verbose": 0} | options)
    return choice(model)


def test_before_anything_ran_it_says_so():
    """No choices, no programs, and a word on what to do."""
    found = fs.explain(build())
    assert (found.choices, found.programs) == ((), ())
    assert str(found) == "Nothing has run yet. Call `fit`, `evaluate` or `predict` first."


def test_what_is_no_model_is_refused():
    """By name, as the other functions do it."""
    with pytest.raises(TypeError, match=r"`fitstep.explain` takes a `keras.Model`"):
        fs.explain("model")


def test_each_mode_has_its_choice_and_its_programs():
    """32 steps of 4 rows: 16 in an execution; each program with its batch, steps, time and cause."""
    model = build()
    fs.fit(model, X[:126], Y[:126], batch_size=4, verbose=0)
    fs.evaluate(model, X, Y, batch_size=4, verbose=0)
    fs.predict(model, X, batch_size=4, verbose=0)
    found = fs.explain(model)
    assert [(one.mode, one.steps) for one in found.choices] == [
        ("train", 16), ("test", 16), ("predict", 16),
    ]  # fmt: skip
    assert all("all of the gain" in one.reason for one in found.choices)
    assert [(one.mode, one.batch, one.steps, one.cause) for one in found.programs] == [
        ("train", "x float32(4, 5), y float32(4, 1)", 16, "the first"),
        ("train", "x float32(2, 5), y float32(2, 1)", 1, "another batch"),
        ("test", "x float32(4, 5), y float32(4, 1)", 16, "the first"),
        ("predict", "x float32(4, 5)", 16, "the first"),
    ]
    assert all(one.seconds > 0 for one in found.programs)
    fs.fit(model, X[:126], Y[:126], batch_size=4, verbose=0)
    assert fs.explain(model).programs == found.programs


def test_a_convolution_on_a_cpu_runs_alone():
    """Loops slow convolutions down, so there is one step in an execution, and the reason."""
    model = keras.Sequential([keras.Input((5, 1)), layers.Conv1D(2, 3), layers.Flatten()])
    model.compile("sgd", "mse")
    steps, reason = chosen(model, X[:, :, None])
    assert steps == 1
    assert "convolution" in reason


class Listener(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


def test_a_batch_hook_is_named():
    """The class of the callback and its hook; one set on an instance counts too."""
    hook = "callbacks act between steps: {} has its own on_train_batch_{}"
    assert chosen(callbacks=[Listener()]) == (1, hook.format("Listener", "end"))
    begin = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: None)
    assert chosen(callbacks=[begin]) == (1, hook.format("LambdaCallback", "begin"))


def test_a_generator_is_asked_batch_by_batch():
    """Nothing is drawn ahead from what may depend on the steps before."""
    model = build()
    batches = ((X[:4], Y[:4]) for _ in range(8))
    fs.fit(model, batches, steps_per_epoch=8, shuffle=False, verbose=0)
    assert choice(model) == (1, "the source is asked for a batch only when a step needs it")


@pytest.mark.parametrize(
    ("options", "steps", "reason"),
    [
        ({"donate": False}, 1, "`donate=False` keeps the state before every step"),
        ({"steps_per_execution": 5}, 5, "`steps_per_execution` is 5"),
        ({"batch_size": 32}, 4, "steps of an epoch or round: 4"),
        ({"validate_every": 3}, 3, "steps of an epoch or round: 3"),
        ({"max_steps": 2}, 2, "`max_steps` leaves 2"),
        ({"max_steps": 1}, 1, "`max_steps` leaves 1"),
    ],
)
def test_what_the_call_asked_for_is_the_reason(options, steps, reason):
    """An argument that keeps an execution short is named with its value."""
    assert chosen(**options) == (steps, reason)


def test_steps_that_are_not_compiled_run_alone():
    """`run_eagerly` and the like run op by op; no program is listed."""
    model = build(run_eagerly=True)
    steps, reason = chosen(model, batch_size=64)
    assert steps == 1
    assert "run_eagerly" in reason
    assert fs.explain(model).programs == ()


def test_a_loop_of_ones_own_makes_one_step_at_a_time():
    """`fs.steps` says so itself; a bare `train_on_batch` lists its program."""
    model = build()
    list(fs.steps(model, (X, Y), batch_size=64))
    assert choice(model) == (1, "`fitstep.steps` makes one step at a time")
    own = fs.Sequential([keras.Input((5,)), layers.Dense(1)])
    own.compile("sgd", "mse")
    own.train_on_batch(X[:4], Y[:4])
    assert str(fs.explain(own)).startswith("programs: 1 compiled in ")


def test_big_batches_are_limited_by_memory():
    """Batches of 8 MiB and a bit: three in an execution, and their size."""
    model = keras.Sequential([keras.Input((2**14,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.zeros((128 * 5, 2**14), "float32")
    steps, reason = chosen(model, x, x[:, :1], batch_size=128)
    assert (steps, reason) == (3, "more batches of 8.0 MiB exceed 32 MiB")
    assert steps * (x.nbytes / 5) <= _runner.MOST_BYTES


def test_causes_of_later_programs():
    """Another batch, a frozen layer, an attribute that changed: each by its name."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(2), layers.Dense(1)])
    model.compile("sgd", "mse")
    options = {"batch_size": 64, "verbose": 0, "steps_per_execution": 1}

    def cause():
        fs.fit(model, X, Y, **options)
        return fs.explain(model).programs[-1].cause

    assert cause() == "the first"
    model.layers[0].activation = keras.activations.tanh
    assert cause() == "changed on the model: `activation`"
    model.layers[0].trainable = False
    assert cause() == "changed on the model: `trainable`"
    options["donate"] = False
    assert cause() == "changed: `donate`"
    options["batch_size"] = 16
    assert cause() == "another batch"
    count = len(fs.explain(model).programs)
    options |= {"donate": True, "batch_size": 64}
    cause()
    assert len(fs.explain(model).programs) == count


def dense():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(2), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model, X, Y


def of_dicts():
    inputs = {name: keras.Input((5,), name=name) for name in ("left", "middle", "right")}
    joined = layers.Dense(1)(layers.concatenate(list(inputs.values())))
    model = keras.Model(inputs, {"value": joined, "other": layers.Dense(1, name="other")(joined)})
    model.compile("sgd", {"value": "mse", "other": "mse"})
    return model, dict.fromkeys(inputs, X), {"value": Y, "other": Y}


@pytest.mark.parametrize("make", [dense, of_dicts])
def test_what_is_printed_fits_100_columns(make):
    """Also where a batch has many arrays or a cause many words."""
    model, x, y = make()
    for donate in (True, False):
        fs.fit(model, x, y, batch_size=60, verbose=0, donate=donate, callbacks=[Listener()])
    model.layers[-1].trainable = False
    fs.fit(model, x, y, batch_size=60, verbose=0)
    fs.predict(model, x, verbose=0)
    text = str(fs.explain(model))
    assert max(map(len, text.splitlines())) <= 100
    for one in fs.explain(model).programs:
        assert " ".join(f"{one.cause}: {one.batch}".split()) in " ".join(text.split())


def test_it_never_changes_the_model():
    """Not a bit of it, not an attribute, before and after a run."""
    model = build()
    for _ in range(2):
        before, names = twins.everything_of(model), dict(vars(model))
        print(fs.explain(model))
        twins.assert_unchanged(before)
        assert vars(model) == names
        fs.fit(model, X, Y, verbose=0)
