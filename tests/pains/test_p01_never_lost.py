"""A model that fails, wherever it fails, is whole afterwards: weights, optimizer and metrics."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import types
import warnings

import jax
import keras
import numpy as np
import pytest
from jax import numpy as jnp

import fitstep as fs
from tests.pains.twins import (
    CountSteps,
    FailAt,
    all_variables,
    assert_alive,
    assert_close,
    assert_same,
    assert_unchanged,
    batches,
    copy_values,
    count_of,
    counting_mlp,
    everything_of,
    trace_of,
    twin_of,
    values_of,
)

# Three batches of 70 rows: 32, 32 and 6.
FIT = {"batch_size": 32, "epochs": 3, "verbose": 0, "shuffle": False}
# Two batches of one shape: a single program.
EVEN = {"batch_size": 35, "epochs": 3, "verbose": 0, "shuffle": False}


def assert_trains_like(model, twin, x, y, size=35):
    """The model goes on exactly as an untouched stock model with the same values does."""
    assert_alive(model)
    copy_values(model, twin)
    history = fs.fit(model, x, y, batch_size=size, epochs=2, verbose=0, shuffle=False).history
    expected = twin.fit(x, y, batch_size=size, epochs=2, verbose=0, shuffle=False).history
    assert_close(values_of(model), values_of(twin))
    for key in expected:
        np.testing.assert_allclose(history[key], expected[key], rtol=1e-4)
    assert np.isfinite(history["loss"]).all()


# --- while tracing -----------------------------------------------------------------------------


class Typo(keras.Sequential):
    """A model of the guide whose step has a typo."""

    def train_step(self, state, data):
        tv, ntv, ov, mv = state
        x, y = data[:2]
        return self.no_such_thing(tv, ntv, ov, mv, x, y)


def good_step(self, state, data):
    """The step of the public guide."""
    tv, ntv, ov, mv = state
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

    def objective(tv):
        y_pred, new_ntv = self.stateless_call(tv, ntv, x, training=True)
        return self.compute_loss(x, y, y_pred), (y_pred, new_ntv)

    (loss, (y_pred, ntv)), grads = jax.value_and_grad(objective, has_aux=True)(tv)
    tv, ov = self.optimizer.stateless_apply(ov, grads, tv)
    logs, new_mv = {}, []
    for metric in self.metrics:
        own = mv[len(new_mv) : len(new_mv) + len(metric.variables)]
        if metric.name == "loss":
            own = metric.stateless_update_state(own, loss, sample_weight=len(x))
        else:
            own = metric.stateless_update_state(own, y, y_pred)
        logs[metric.name] = metric.stateless_result(own)
        new_mv += own
    return logs, (tv, ntv, ov, new_mv)


def typo_model():
    model = Typo(
        [
            keras.Input((5,)),
            CountSteps(),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("where", ["instance", "class"])
@pytest.mark.parametrize("kwargs", [{}, {"donate": False}, {"snapshot": False}])
def test_typo_in_train_step_leaves_all_as_before_and_can_be_fixed_in_place(rows, where, kwargs):
    """A typo raises the user's AttributeError, changes nothing, and the mended model trains as stock."""
    x, y = rows
    own_class = type("OwnTypo", (Typo,), {})
    model = typo_model()
    model.__class__ = own_class
    model.optimizer.build(model.trainable_variables)
    before = everything_of(model)
    with pytest.raises(AttributeError, match="no_such_thing") as caught:
        fs.fit(model, x, y, **FIT, **kwargs)
    assert any(entry.name == "train_step" for entry in caught.traceback)
    assert_alive(model)
    assert_unchanged(before)
    if where == "instance":
        model.train_step = types.MethodType(good_step, model)
    else:
        own_class.train_step = good_step
    assert_trains_like(model, counting_mlp(), x, y)


def test_typo_after_a_good_fit_keeps_what_that_fit_learned(rows):
    """A step broken after a first fit raises its own error and leaves the first fit's values."""
    x, y = rows
    model = counting_mlp()
    fs.fit(model, x, y, **FIT)
    before = values_of(model)

    def broken(self, state, data):
        raise KeyError("mine")

    model.train_step = types.MethodType(broken, model)
    with pytest.raises(KeyError, match="mine"):
        fs.fit(model, x, y, **FIT)
    assert_same(values_of(model), before)
    del model.train_step
    assert_trains_like(model, counting_mlp(), x, y)


def test_broken_layer_mended_on_the_same_object_trains(rows):
    """A layer whose `call` fails leaves all as before; with `call` mended in place fit trains."""
    x, y = rows

    class Layer(keras.layers.Layer):
        broken = False

        def call(self, inputs):
            if self.broken:
                raise ZeroDivisionError("in call")
            return 2.0 * inputs

    layer = Layer()
    model = counting_mlp(layer)
    model.optimizer.build(model.trainable_variables)
    before = everything_of(model)
    layer.broken = True
    with pytest.raises(ZeroDivisionError, match="in call"):
        fs.fit(model, x, y, **FIT)
    assert_unchanged(before)
    layer.broken = False
    assert_trains_like(model, counting_mlp(Layer()), x, y)


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": False}])
def test_typo_under_other_ways_to_compile_leaves_all_as_before(rows, options):
    """`run_eagerly` and `jit_compile=False` keep the model just as the compiled step does."""
    x, y = rows
    model = typo_model()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    model.optimizer.build(model.trainable_variables)
    before = everything_of(model)
    with pytest.raises(AttributeError, match="no_such_thing"):
        fs.fit(model, x, y, **FIT)
    assert_unchanged(before)
    model.train_step = types.MethodType(good_step, model)
    assert_trains_like(model, counting_mlp(compile_kwargs=options), x, y)


def test_loss_and_metric_that_raise_leave_all_as_before(rows):
    """A loss function or a metric that raises while traced leaves the model as it was."""
    x, y = rows

    def bad(y_true, y_pred):
        raise OverflowError("mine")

    for options in ({"loss": bad}, {"loss": "mse", "metrics": [bad]}):
        model = counting_mlp(compile_kwargs=options)
        model.optimizer.build(model.trainable_variables)
        before = values_of(model)
        with pytest.raises(OverflowError, match="mine"):
            fs.fit(model, x, y, **FIT)
        assert_same(values_of(model), before)
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        assert_trains_like(model, counting_mlp(), x, y)


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch"])
def test_methods_of_fs_model_leave_all_as_before(rows, verb):
    """Every method of `fs.Model` whose trace fails leaves the model as before, and works when mended."""
    x, y = rows

    class Net(fs.Model):
        broken = False

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            if self.broken:
                raise ZeroDivisionError("in call")
            return self.dense(inputs)

    model = Net()
    model.compile("adam", "mse", metrics=["mae"])
    model(x[:1])
    model.optimizer.build(model.trainable_variables)
    before = values_of(model)
    model.broken = True
    arguments = (x,) if verb == "predict" else (x, y)
    with pytest.raises((ZeroDivisionError, RuntimeError), match="in call"):
        getattr(model, verb)(*arguments)
    assert_alive(model)
    assert_same(values_of(model), before)
    model.broken = False
    getattr(model, verb)(*arguments)
    assert_alive(model)
    trained = verb in {"fit", "train_on_batch"}
    assert (int(model.optimizer.iterations.value) > 0) == trained


@pytest.mark.parametrize("verb", [fs.evaluate, fs.predict])
def test_evaluate_and_predict_that_fail_change_nothing(rows, verb):
    """`evaluate` and `predict` that fail in a trace or a later execution leave every weight."""
    x, y = rows
    arguments = (x,) if verb is fs.predict else (x, y)
    layer = FailAt()
    model = counting_mlp(layer)
    fs.fit(model, x, y, **FIT)
    before = values_of(model)
    for at in (1, 2, 3, 4):
        layer.calls, layer.at = 0, at
        with pytest.raises(Exception, match="boom at run time"):
            verb(model, *arguments, batch_size=16, verbose=0)
        assert_alive(model)
        assert_same(values_of(model), before)
    layer.at = None
    expected = model.predict(x, verbose=0)
    got = verb(model, *arguments, batch_size=16, verbose=0)
    if verb is fs.predict:
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    else:
        assert got[0] == pytest.approx(float(np.mean((expected - y) ** 2)), rel=1e-5)


# --- while compiling ---------------------------------------------------------------------------


def test_failure_while_compiling_leaves_all_as_before(rows):
    """A step that traces but can't be lowered raises, and leaves the model as it was."""
    x, y = rows
    primitive = jax.extend.core.Primitive("no_lowering")
    primitive.def_abstract_eval(lambda a: a)

    class Layer(keras.layers.Layer):
        broken = False

        def call(self, inputs):
            if not self.broken:
                return inputs
            return inputs + jax.lax.stop_gradient(primitive.bind(jax.lax.stop_gradient(inputs)))

    layer = Layer()
    model = counting_mlp(layer)
    model.optimizer.build(model.trainable_variables)
    before = everything_of(model)
    layer.broken = True
    with pytest.raises(NotImplementedError, match="no_lowering"):
        fs.fit(model, x, y, **FIT)
    assert_alive(model)
    assert_unchanged(before)
    layer.broken = False
    assert_trains_like(model, counting_mlp(Layer()), x, y)


def test_failure_while_compiling_a_second_program_leaves_the_last_step(rows):
    """A program for another shape that can't be made leaves what was trained before it, whole."""
    x, y = rows

    class Layer(keras.layers.Layer):
        def call(self, inputs):
            if inputs.shape[0] == 6:
                raise ZeroDivisionError("six rows")
            return inputs

    model = counting_mlp(Layer())
    twin = twin_of(model, lambda: counting_mlp())
    trace = trace_of(twin, x[:64], y[:64], 32, 1)
    with pytest.raises(ZeroDivisionError, match="six rows"):
        fs.fit(model, x, y, **FIT)
    assert_alive(model)
    updates = count_of(model)
    assert updates == 2
    assert_close(values_of(model), trace[updates])
    assert_trains_like(model, counting_mlp(), x[:64], y[:64])


# --- while running -----------------------------------------------------------------------------


def run_to_failure(model, x, y, **kwargs):
    with pytest.raises(Exception, match="boom at run time") as caught:
        fs.fit(model, x, y, **kwargs)
    assert_alive(model)
    assert int(model.optimizer.iterations.value) == count_of(model)
    return "\n".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("kwargs", [{}, {"donate": False}, {"snapshot": False}])
def test_first_execution_that_fails_leaves_all_as_before(rows, kwargs):
    """The first execution of the first program is safe however the memory is handled."""
    x, y = rows
    layer = FailAt(at=1)
    model = counting_mlp(layer)
    model.optimizer.build(model.trainable_variables)
    before = everything_of(model)
    run_to_failure(model, x, y, **EVEN, **kwargs)
    assert_unchanged(before)
    layer.at = None
    assert_trains_like(model, counting_mlp(FailAt()), x, y, 35)


@pytest.mark.parametrize(("at", "kept", "back"), [(2, 0, 1), (4, 2, 1), (6, 4, 1)])
def test_later_execution_that_fails_goes_back_to_the_epochs_start(rows, at, kept, back):
    """Weights, optimizer and counter are those of the epoch's start, and the error says how far back."""
    x, y = rows
    layer = FailAt(at=at)
    model = counting_mlp(layer)
    trace = trace_of(twin_of(model, lambda: counting_mlp(FailAt())), x, y, 35, 3)
    note = run_to_failure(model, x, y, **EVEN)
    assert count_of(model) == kept
    assert_close(values_of(model), trace[kept])
    assert str(back) in note
    layer.at = None
    assert_trains_like(model, counting_mlp(FailAt()), x, y, 35)


def test_updates_taken_back_are_counted(rows):
    """The error's note counts the updates since the epoch began: four of the seven before the failure."""
    x, y = rows
    layer = FailAt(at=5 + 4 + 1)
    model = counting_mlp(layer)
    note = run_to_failure(model, x, y, batch_size=14, epochs=3, verbose=0, shuffle=False)
    assert count_of(model) == 5
    assert "4 update" in note


@pytest.mark.parametrize("at", [2, 3, 5, 6])
def test_without_donation_every_step_is_kept(rows, at):
    """`donate=False` leaves exactly the updates before the one that failed."""
    x, y = rows
    layer = FailAt(at=at)
    model = counting_mlp(layer)
    trace = trace_of(twin_of(model, lambda: counting_mlp(FailAt())), x, y, 35, 3)
    note = run_to_failure(model, x, y, **EVEN, donate=False)
    assert count_of(model) == at - 1
    assert_close(values_of(model), trace[at - 1])
    assert "taken back" not in note or "0 update" in note


def test_later_failure_takes_the_metrics_back_with_the_weights(rows):
    """After a failure in an epoch its metrics are those of its start, reset and not half full."""
    x, y = rows
    model = counting_mlp(FailAt(at=4))
    run_to_failure(model, x, y, batch_size=14, epochs=3, verbose=0, shuffle=False)
    assert count_of(model) == 0
    for variable in model.metrics_variables:
        np.testing.assert_array_equal(np.asarray(variable.value), 0.0)


def test_failing_steps_again_and_again_never_lose_the_model(rows):
    """Five failing fits on one object, at different steps, leave it whole each time."""
    x, y = rows
    layer = FailAt()
    model = counting_mlp(layer)
    seen = 0
    for at in (1, 3, 6, 2, 7):
        layer.calls, layer.at = 0, at
        run_to_failure(model, x, y, batch_size=14, epochs=3, verbose=0, shuffle=False)
        seen += (at - 1) // 5 * 5
        assert count_of(model) == seen
    layer.at = None
    assert_trains_like(model, counting_mlp(FailAt()), x, y, 14)


def test_step_failing_in_a_model_method_train_on_batch(rows):
    """`train_on_batch` of `fs.Model` that fails at its third call keeps whole, consistent values."""
    x, y = rows
    layer = FailAt(at=3)
    inputs = keras.Input((5,))
    model = fs.Model(inputs, keras.layers.Dense(1)(CountSteps()(layer(inputs))))
    model.compile("adam", "mse")
    for batch in batches(x, y, 35):
        model.train_on_batch(*batch)
    with pytest.raises(Exception, match="boom at run time"):
        model.train_on_batch(x[:35], y[:35])
    assert_alive(model)
    assert int(model.optimizer.iterations.value) == count_of(model) <= 2
    model.train_on_batch(x[:35], y[:35])
    assert_alive(model)


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": False}])
def test_running_step_that_fails_under_other_ways_to_compile(rows, options):
    """Eager and un-jitted steps that fail in mid-epoch leave a whole, consistent state."""
    x, y = rows
    layer = FailAt(at=4)
    model = counting_mlp(layer, compile_kwargs=options)
    trace = trace_of(twin_of(model, lambda: counting_mlp(FailAt())), x, y, 35, 3)
    layer.calls = 0
    run_to_failure(model, x, y, **EVEN)
    assert count_of(model) in {2, 3}
    assert_close(values_of(model), trace[count_of(model)])
    layer.at = None
    assert_trains_like(model, counting_mlp(FailAt()), x, y, 35)


def test_failing_validation_keeps_the_epoch(rows):
    """A validation pass that fails while running leaves what its epoch trained."""
    x, y = rows
    layer = FailAt(at=2 + 2)  # two steps of training, then the second batch of validation
    model = counting_mlp(layer)
    trace = trace_of(twin_of(model, lambda: counting_mlp(FailAt())), x, y, 35, 1)
    run_to_failure(model, x, y, validation_data=(x, y), **EVEN)
    assert count_of(model) == 2
    assert_close(values_of(model), trace[2])
    layer.at = None
    assert_trains_like(model, counting_mlp(FailAt()), x, y, 35)


def test_validation_that_cannot_be_traced_keeps_the_epoch(rows):
    """A `test_step` with a typo raises its own error after an epoch whose updates stay."""
    x, y = rows

    def broken(self, state, data):
        return self.no_such_thing(state)

    model = counting_mlp()
    trace = trace_of(twin_of(model, counting_mlp), x, y, 32, 1)
    model.test_step = types.MethodType(broken, model)
    with pytest.raises(AttributeError, match="no_such_thing"):
        fs.fit(model, x, y, validation_data=(x, y), **FIT)
    assert count_of(model) == 3
    assert_close(values_of(model), trace[3])
    del model.test_step
    assert_trains_like(model, counting_mlp(), x, y)


OUT_OF_MEMORY = """
    import os, resource, time
    os.environ["KERAS_BACKEND"] = "jax"; os.environ["JAX_PLATFORMS"] = "cpu"
    import fitstep as fs, jax, keras, jax.numpy as jnp, numpy as np
    from tests.pains.twins import *

    class Big(keras.layers.Layer):
        def call(self, inputs):  # 256 MB that no program can do without
            long = jnp.tile(jax.lax.stop_gradient(inputs[:2, :1]), (1, 8192)) + jnp.arange(8192.0)
            return inputs + 0.0 * jnp.tanh(jnp.max(long.T @ long))

    def pages_after(seconds):
        time.sleep(seconds)
        return int(open("/proc/self/statm").read().split()[0])

    class Squeeze(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                # The last step may still be running, with its 256 MB.
                jax.block_until_ready([variable.value for variable in all_variables(self.model)])
                pages = min(pages_after(0.05) for _ in range(10))
                limit = pages * resource.getpagesize() + 2**26
                resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    keras.utils.set_random_seed(7)
    x = np.random.default_rng(0).normal(size=(70, 5)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
"""


def run_script(script):
    """Run `script` after OUT_OF_MEMORY in a process of its own, which memory errors may harm."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OUT_OF_MEMORY + script)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},  # noqa: PTH109
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_memory_beyond_any_machine_leaves_all_as_before():
    """A step that asks for a petabyte raises out of memory and leaves the model as it was."""
    out = run_script("""
    class Huge(keras.layers.Layer):
        huge = False

        def call(self, inputs):
            if not self.huge:
                return inputs
            wide = jnp.broadcast_to(inputs[:1, :1], (2**24, 2**24)) + jnp.arange(2.0**24)
            return inputs + 0.0 * jnp.sort(jnp.sin(wide), axis=0).sum()

    layer = Huge()
    model = counting_mlp(layer)
    model.optimizer.build(model.trainable_variables)
    before = everything_of(model)
    layer.huge = True
    try:
        fs.fit(model, x, y, batch_size=35, epochs=3, verbose=0)
    except Exception as error:
        print("RAISED", "memory" in str(error).lower())
    assert_alive(model)
    assert_unchanged(before)
    layer.huge = False
    fs.fit(model, x, y, batch_size=35, verbose=0)
    print("AGAIN", count_of(model))
    """)
    assert "RAISED True" in out
    assert "AGAIN 2" in out


def test_out_of_memory_in_a_later_step_goes_back_to_the_epochs_start():
    """A real RESOURCE_EXHAUSTED in the second epoch leaves the first epoch's two updates, whole."""
    out = run_script("""
    model = counting_mlp(Big())
    try:
        fs.fit(model, x, y, batch_size=35, epochs=3, verbose=0, shuffle=False, callbacks=[Squeeze()])
    except Exception as error:
        print("RAISED", "memory" in str(error).lower())
        print("NOTE", *error.__notes__)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print("COUNT", count_of(model), int(model.optimizer.iterations.value), flush=True)
    assert_alive(model)
    fs.fit(model, x, y, batch_size=35, verbose=0)
    print("AGAIN", count_of(model))
    """)
    assert "RAISED True" in out
    assert "update(s) were taken back" in out
    assert "COUNT 2 2" in out
    assert "AGAIN 4" in out


# --- outside the program -----------------------------------------------------------------------

HOOKS = {
    # hook: (its n-th call, the updates that are complete then); three steps an epoch
    "on_train_begin": (1, 0),
    "on_epoch_begin": (2, 3),
    "on_train_batch_begin": (5, 4),
    "on_train_batch_end": (5, 5),
    "on_epoch_end": (1, 3),
    "on_test_begin": (2, 6),
    "on_test_batch_begin": (2, 3),
    "on_test_batch_end": (4, 6),
    "on_test_end": (1, 3),
    "on_train_end": (1, 9),
}


def failing_callback(hook, nth, error):
    calls = []

    def fail(self, *args, **kwargs):
        calls.append(hook)
        if len(calls) == nth:
            raise error

    return type("Failing", (keras.callbacks.Callback,), {hook: fail})()


@pytest.mark.parametrize("hook", HOOKS)
def test_failing_callback_leaves_the_last_step(rows, hook):
    """A callback that raises in any hook leaves exactly the updates that were complete."""
    x, y = rows
    nth, updates = HOOKS[hook]
    model = counting_mlp()
    trace = trace_of(twin_of(model, counting_mlp), x, y, 32, 3)
    error = LookupError("from the callback")
    with pytest.raises(LookupError) as caught:
        fs.fit(
            model,
            x,
            y,
            validation_data=(x, y),
            callbacks=[failing_callback(hook, nth, error)],
            **FIT,
        )
    assert caught.value is error
    assert_alive(model)
    assert count_of(model) == int(model.optimizer.iterations.value) == updates
    assert_close(values_of(model), trace[updates])
    assert_trains_like(model, counting_mlp(), x, y)


@pytest.mark.parametrize("hook", ["on_test_batch_end", "on_predict_batch_begin", "on_predict_end"])
def test_failing_callback_of_evaluate_and_predict_changes_no_weight(rows, hook):
    """A callback that raises in `evaluate` or `predict` leaves every weight."""
    x, y = rows
    model = counting_mlp()
    fs.fit(model, x, y, **FIT)
    before = values_of(model)
    callback = failing_callback(hook, 1, LookupError("from the callback"))
    with pytest.raises(LookupError, match="from the callback"):
        if hook.startswith("on_test"):
            fs.evaluate(model, x, y, verbose=0, callbacks=[callback])
        else:
            fs.predict(model, x, verbose=0, callbacks=[callback])
    assert_alive(model)
    assert_same(values_of(model), before)
    assert_trains_like(model, counting_mlp(), x, y)


def failing_generator(x, y, size, at):
    for index in range(100):
        if index == at:
            raise OSError("disk gone")
        start = index * size % len(x)
        yield x[start : start + size], y[start : start + size]


class FailingData(keras.utils.PyDataset):
    """Random access whose batch number `at` can't be read."""

    def __init__(self, x, y, size, at):
        super().__init__()
        self.x, self.y, self.size, self.at = x, y, size, at

    def __len__(self):
        return len(self.x) // self.size

    def __getitem__(self, index):
        if index == self.at:
            raise OSError("disk gone")
        part = slice(index * self.size, (index + 1) * self.size)
        return self.x[part], self.y[part]


@pytest.mark.parametrize("at", [0, 1, 3, 4])
@pytest.mark.parametrize("kind", ["generator", "dataset"])
def test_failing_data_leaves_the_last_step(rows, kind, at):
    """A data source that raises leaves the batches before it trained, and raises its own error."""
    x, y = rows
    model = counting_mlp()
    trace = trace_of(twin_of(model, counting_mlp), x, y, 14, 1)
    before = values_of(model)
    if kind == "generator":
        data, kwargs = failing_generator(x, y, 14, at), {"steps_per_epoch": 5, "shuffle": False}
    else:
        data, kwargs = FailingData(x, y, 14, at), {"shuffle": False}
    with pytest.raises(OSError, match="disk gone"):
        fs.fit(model, data, epochs=2, verbose=0, **kwargs)
    assert_alive(model)
    updates = count_of(model)
    assert updates == at
    if updates:
        assert int(model.optimizer.iterations.value) == updates
        assert_close(values_of(model), trace[updates])
    else:
        assert_same(values_of(model)[: len(model.variables)], before[: len(model.variables)])
    assert_trains_like(model, counting_mlp(), x, y)


def test_failing_validation_data_keeps_the_epoch(rows):
    """A validation source that raises leaves what its epoch trained."""
    x, y = rows
    model = counting_mlp()
    trace = trace_of(twin_of(model, counting_mlp), x, y, 32, 1)
    with pytest.raises(OSError, match="disk gone"):
        fs.fit(model, x, y, validation_data=FailingData(x, y, 14, 2), **FIT)
    assert count_of(model) == 3
    assert_close(values_of(model), trace[3])
    assert_trains_like(model, counting_mlp(), x, y)


def test_batch_of_wrong_width_keeps_the_steps_before_it(rows):
    """A generator whose third batch has too few columns raises; the two updates before it stay."""
    x, y = rows

    def data():
        for index in range(10):
            yield (x[:14, :4] if index == 2 else x[:14]), y[:14]

    model = counting_mlp()
    twin = twin_of(model, counting_mlp)
    for _ in range(2):
        twin.train_on_batch(x[:14], y[:14])
    with pytest.raises(ValueError):
        fs.fit(model, data(), steps_per_epoch=10, verbose=0, shuffle=False)
    assert_alive(model)
    assert count_of(model) == 2
    assert_close(values_of(model), values_of(twin))
    assert_trains_like(model, counting_mlp(), x, y)


def test_fit_off_the_main_thread_keeps_the_model(rows):
    """In a worker thread a failing step leaves the same state as in the main thread."""
    x, y = rows
    layer = FailAt(at=4)
    model = counting_mlp(layer)
    trace = trace_of(twin_of(model, lambda: counting_mlp(FailAt())), x, y, 35, 1)
    caught = []

    def work():
        try:
            fs.fit(model, x, y, **EVEN)
        except Exception as error:  # noqa: BLE001 - handed to the main thread
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert "boom at run time" in str(caught[0])
    assert_alive(model)
    assert count_of(model) == int(model.optimizer.iterations.value) == 2
    assert_close(values_of(model), trace[2])
    layer.at = None
    assert_trains_like(model, counting_mlp(FailAt()), x, y, 35)


# --- numbers that go wrong ---------------------------------------------------------------------


@pytest.fixture
def debug_nans():
    """JAX's own check, and back."""
    before = jax.config.jax_debug_nans
    jax.config.update("jax_debug_nans", True)
    yield
    jax.config.update("jax_debug_nans", before)


def check_debug_nans(fitted):
    """What the test below checks, in a process of its own."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(70, 5)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    keras.utils.set_random_seed(7)
    model = counting_mlp()
    if fitted:  # programs made before the flag was set must not be used under it
        fs.fit(model, x, y, batch_size=14, verbose=0, shuffle=False)
    model.optimizer.build(model.trainable_variables)
    start = count_of(model)
    trace = trace_of(twin_of(model, counting_mlp), x, y, 14, 1)
    bad = x.copy()
    bad[14 * 3] = np.nan
    before = jax.config.jax_debug_nans
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(FloatingPointError):
            fs.fit(model, bad, y, batch_size=14, epochs=2, verbose=0, shuffle=False)
    finally:
        jax.config.update("jax_debug_nans", before)
    assert_alive(model)
    assert count_of(model) == int(model.optimizer.iterations.value) == start + 3
    assert_close(values_of(model), trace[3])
    assert_trains_like(model, counting_mlp(), x, y)


@pytest.mark.parametrize("fitted", [False, True])
def test_debug_nans_keeps_every_step(fitted):
    """Under `jax_debug_nans` a bad batch raises FloatingPointError and the steps before it stay."""
    # In a process of its own: after programs that failed for memory JAX's flag can stay silent, for
    # stock `fit` as well.
    script = (
        f"from tests.pains.test_p01_never_lost import check_debug_nans; check_debug_nans({fitted})"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},  # noqa: PTH109
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_terminate_on_nan_stops_where_stock_stops(rows):
    """TerminateOnNaN stops right after the bad step, with the count of updates that stock has."""
    x, y = rows
    bad = x.copy()
    bad[14 * 2] = np.nan
    model, twin = counting_mlp(), counting_mlp()
    for each, fit in ((model, fs.fit), (twin, keras.Model.fit)):
        fit(
            each,
            bad,
            y,
            batch_size=14,
            epochs=3,
            verbose=0,
            shuffle=False,
            callbacks=[keras.callbacks.TerminateOnNaN()],
        )
    assert_alive(model)
    assert count_of(model) == count_of(twin) == 3
    assert int(model.optimizer.iterations.value) == 3
    for variable in all_variables(model):
        variable.assign(np.zeros(variable.shape, variable.dtype))
    assert_trains_like(model, counting_mlp(), x, y)


def linear(optimizer):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer, "mse")
    return model


def test_use_ema_and_fit_twice_equals_arithmetic(rows):
    """Two fits with `use_ema=True` give the averages that NumPy gives, and no buffer is donated twice."""
    x, y = rows
    rate, momentum = 0.05, 0.9
    model = linear(keras.optimizers.SGD(rate, use_ema=True, ema_momentum=momentum))
    weight = np.array(model.layers[0].kernel.value, "float64")
    average = weight.copy()
    first = True
    for _ in range(2):
        for _ in range(2):
            for xs, ys in batches(x.astype("float64"), y.astype("float64"), 35):
                weight = weight - rate * 2.0 / len(xs) * xs.T @ (xs @ weight - ys)
                # Keras starts the average at the first values it sees
                average = weight if first else momentum * average + (1 - momentum) * weight
                first = False
        fs.fit(model, x, y, batch_size=35, epochs=2, verbose=0, shuffle=False)
        weight = average.copy()  # the end of a fit puts the averages into the model
        np.testing.assert_allclose(np.asarray(model.layers[0].kernel.value), weight, rtol=1e-4)
    assert_alive(model)


def test_use_ema_with_a_failing_step_keeps_both(rows):
    """A step that fails in the second fit with averages leaves averages and weights alive."""
    x, y = rows
    layer = FailAt()
    options = {"optimizer": keras.optimizers.Adam(0.01, use_ema=True)}
    model = counting_mlp(layer, compile_kwargs=options)
    fs.fit(model, x, y, **EVEN)
    before = values_of(model)
    layer.calls, layer.at = 0, 2
    run_to_failure(model, x, y, **EVEN)
    assert_same(values_of(model), before)


def test_two_variables_that_share_one_array_train(rows):
    """Variables assigned one and the same array train as two equal ones do."""
    x, y = rows

    def make():
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(5), keras.layers.Dense(5), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    model = make()
    one, two = model.layers[:2]
    two.kernel.assign(one.kernel.value)
    two.kernel._value = one.kernel._value
    two.bias._value = one.bias._value
    twin = twin_of(model, make)

    class Tie(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            two.bias._value = one.bias._value

    class TieTwin(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 0:
                twin.layers[1].bias.assign(np.asarray(twin.layers[0].bias.value))

    fs.fit(model, x, y, batch_size=32, verbose=0, shuffle=False, callbacks=[Tie()])
    twin.fit(x, y, batch_size=32, verbose=0, shuffle=False, callbacks=[TieTwin()])
    assert_close(values_of(model), values_of(twin))
    fs.fit(model, x, y, batch_size=32, verbose=0, shuffle=False, callbacks=[Tie()])
    assert_alive(model)
    assert one.kernel._value is not two.kernel._value


def test_weights_in_several_variables_by_set_weights_of_device_arrays(rows):
    """`set_weights` with one device array for two layers and a second fit lose nothing."""
    x, y = rows
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(5), keras.layers.Dense(5)])
    model.compile("sgd", "mse")
    kernel, bias = jnp.eye(5), jnp.zeros(5)
    for _ in range(2):
        model.set_weights([kernel, bias, kernel, bias])
        fs.fit(model, x, np.tile(y, 5), verbose=0)
        assert_alive(model)
    assert not kernel.is_deleted()
    assert not bias.is_deleted()
    np.testing.assert_array_equal(kernel, np.eye(5))


def test_array_kept_by_the_user_is_never_deleted(rows):
    """An array the user assigned, or took out of a variable between fits, stays readable."""
    x, y = rows
    model = counting_mlp()
    mine = jnp.full((8, 1), 0.5)
    model.layers[-1].kernel.assign(mine)
    fs.fit(model, x, y, **FIT)
    assert not mine.is_deleted()
    np.testing.assert_array_equal(mine, np.full((8, 1), 0.5))


# --- nested ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fs.evaluate", "fs.predict", "evaluate", "predict"])
def test_failure_in_a_nested_pass_leaves_the_last_step(rows, how):
    """A pass nested in a callback that fails raises there and leaves the outer run's last step."""
    x, y = rows
    layer = FailAt()
    model = counting_mlp(layer)
    trace = trace_of(twin_of(model, lambda: counting_mlp(FailAt())), x, y, 35, 2)

    class Nested(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch != 1:
                return
            layer.calls, layer.at = 0, 2
            call = {
                "fs.evaluate": lambda: fs.evaluate(self.model, x, y, batch_size=35, verbose=0),
                "fs.predict": lambda: fs.predict(self.model, x, batch_size=35, verbose=0),
                "evaluate": lambda: self.model.evaluate(x, y, batch_size=35, verbose=0),
                "predict": lambda: self.model.predict(x, batch_size=35, verbose=0),
            }
            call[how]()

    with pytest.raises(Exception, match="boom at run time") as caught:
        fs.fit(model, x, y, callbacks=[Nested()], **EVEN)
    assert_alive(model)
    updates = count_of(model)
    # Keras's own passes give up the arrays that they were lent: only the snapshot is left then
    assert updates == 4 if how.startswith("fs.") else updates in {2, 4}
    assert int(model.optimizer.iterations.value) == updates
    assert_close(values_of(model), trace[updates])
    if updates == 2:
        assert "2 update" in "".join(caught.value.__notes__)
    layer.at = None
    assert_trains_like(model, counting_mlp(FailAt()), x, y, 35)


# --- signals that raise ------------------------------------------------------------------------


# Python drops what is raised within JAX's hook of the collector; the run notices and raises it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_alarm_handler_that_raises_leaves_a_whole_model(rows):
    """A SIGALRM handler that raises TimeoutError at odd moments leaves a whole, consistent model."""
    x, y = rows
    model = counting_mlp()
    fs.fit(model, x, y, **FIT)

    def raise_timeout(number, frame):
        raise TimeoutError("out of time")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    generator = np.random.default_rng(3)
    try:
        for _ in range(15):
            with pytest.raises(TimeoutError, match="out of time"):
                try:
                    signal.setitimer(signal.ITIMER_REAL, float(generator.uniform(0.002, 0.05)))
                    fs.fit(model, x, y, batch_size=7, epochs=300, verbose=0)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            assert_alive(model)
            assert int(model.optimizer.iterations.value) == count_of(model)
        assert signal.getsignal(signal.SIGALRM) is raise_timeout
    finally:
        signal.signal(signal.SIGALRM, before)
    assert_trains_like(model, counting_mlp(), x, y)


def test_stop_iteration_of_a_callback_is_not_taken_for_the_end_of_the_data(rows):
    """A callback whose own iterator runs dry raises; `fit` does not end as if the data had ended."""
    x, y = rows
    model = counting_mlp()
    own = iter([1, 2])

    class Draw(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            next(own)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the data ran out, which it did not
        with pytest.raises((StopIteration, RuntimeError)):
            fs.fit(model, x, y, callbacks=[Draw()], **FIT)
    assert_alive(model)
    assert count_of(model) == int(model.optimizer.iterations.value) == 3


# --- runs of Keras's own inside a callback -------------------------------------------------------


class Stop(keras.callbacks.Callback):
    """Raises in the second batch of an evaluation, as Ctrl-C or a failing callback would."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_test_batch_end(self, batch, logs=None):
        if batch == 1:
            raise self.error


@pytest.mark.parametrize("hook", ["on_epoch_end", "on_train_batch_end"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("mine")])
def test_a_stock_evaluation_that_fails_in_a_callback_loses_no_step(rows, hook, error):
    """Keras's own loop gives the arrays up; what it keeps of them is put back, no update is lost."""
    x, y = rows

    def evaluate(self, *args, **kwargs):
        self.model.evaluate(x, y, batch_size=14, verbose=0, callbacks=[Stop(error)])

    model = counting_mlp()
    steps = 2 if hook == "on_epoch_end" else 1
    trace = trace_of(twin_of(model, counting_mlp), x, y, 35, 1)
    callback = type("Nested", (keras.callbacks.Callback,), {hook: evaluate})()
    with pytest.raises(type(error)) as caught:
        fs.fit(model, x, y, callbacks=[callback], **EVEN)
    assert not getattr(caught.value, "__notes__", [])
    assert count_of(model) == int(model.optimizer.iterations.value) == steps
    assert_close(values_of(model), trace[steps])
    assert_trains_like(model, counting_mlp(), x, y, 35)


@pytest.mark.parametrize("hook", ["on_epoch_end", "on_train_batch_end"])
def test_a_callback_may_catch_what_fails_in_a_stock_evaluation(rows, hook):
    """The fit goes on as if there had been no evaluation."""
    x, y = rows

    def evaluate(self, *args, **kwargs):
        with contextlib.suppress(RuntimeError):
            self.model.evaluate(x, y, batch_size=14, verbose=0, callbacks=[Stop(RuntimeError())])

    model = counting_mlp()
    twin = twin_of(model, counting_mlp)
    callback = type("Nested", (keras.callbacks.Callback,), {hook: evaluate})()
    history = fs.fit(model, x, y, callbacks=[callback], **EVEN).history
    assert fs.fit(twin, x, y, **EVEN).history == history
    assert_same(values_of(model), values_of(twin))


# --- whose arrays they are -----------------------------------------------------------------------


@pytest.mark.parametrize("snapshot", [True, False])
def test_weights_assigned_from_another_model_stay_that_models(rows, snapshot):
    """Two models that hold the same arrays: training one leaves the other as it is."""
    x, y = rows
    giver, taker = counting_mlp(), counting_mlp()
    for _ in range(2):  # the second time the program is compiled and proven
        for one, other in zip(taker.variables, giver.variables, strict=True):
            one.assign(other.value)
        before = everything_of(giver)
        fs.fit(taker, x, y, snapshot=snapshot, **EVEN)
        assert_alive(giver)
        assert_unchanged(before)


def test_a_frozen_layer_keeps_its_weights_where_averages_are_put_in_place(rows):
    """Under `use_ema` a layer frozen after the optimizer was built stands still to the end of a fit."""
    x, y = rows
    optimizer = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)
    model = counting_mlp(compile_kwargs={"optimizer": optimizer})
    fs.fit(model, x, y, **EVEN)
    frozen, free = model.layers[-2:]
    frozen.trainable = False
    before = [np.array(layer.kernel.value) for layer in (frozen, free)]
    history = fs.fit(model, x, y, **EVEN)
    assert history.epoch == [0, 1, 2]
    np.testing.assert_array_equal(frozen.kernel.value, before[0])
    assert not np.array_equal(free.kernel.value, before[1])
