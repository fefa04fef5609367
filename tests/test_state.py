"""The state: by name, in Keras's order, checked when a step returns it."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import fitstep as fs
from fitstep._returned import merge
from fitstep._state import ITERATED, Layout, State


def _state(mode="train"):
    layout = Layout(("b", "a"), ("m",), ("o",), ("t",), iterated=ITERATED[mode])
    return State(
        np.int32(3),
        np.uint32(5),
        {"b": jnp.zeros((4, 3)), "a": jnp.zeros((2,))},
        {"m": jnp.ones((3,))},
        {"o": jnp.zeros((), "int32")},
        {"t": jnp.zeros(())},
        layout=layout,
    )


def test_a_state_unpacks_in_keras_order_also_after_jit():
    """JAX sorts the keys of dicts; the order of a state is Keras's, before and after a jit."""
    state = jax.jit(lambda state: state)(_state())
    trainable, non_trainable, optimizer, metrics = state
    assert [a.shape for a in trainable] == [(4, 3), (2,)]
    assert [len(part) for part in (trainable, non_trainable, optimizer, metrics)] == [2, 1, 1, 1]
    assert list(state.trainable) == ["b", "a"]


@pytest.mark.parametrize(("mode", "parts"), [("train", 4), ("test", 3), ("predict", 2)])
def test_a_state_yields_the_parts_of_its_mode(mode, parts):
    """Four parts in training, three in testing, two in prediction."""
    assert len(list(_state(mode))) == len(_state(mode)) == parts


def test_replace_takes_names_and_lists():
    """A mapping replaces the names in it; a list replaces the part in Keras's order."""
    state = _state()
    assert state.replace(trainable={"a": 1}).trainable["a"] == 1
    assert state.replace(trainable={"a": 1}).trainable["b"].shape == (4, 3)
    assert state.replace(trainable=[1, 2]).part("trainable") == [1, 2]
    with pytest.raises(fs.StateError, match="no trainable variable 'c'"):
        state.replace(trainable={"c": 1})
    with pytest.raises(fs.StateError, match=r"expects 2 arrays\. Received: 1"):
        state.replace(trainable=[1])


def test_keys_differ_by_name_and_step_and_repeat_otherwise():
    """Another key for each name and step, the same again for the same."""
    state = _state()
    draw = lambda s, name: float(jax.random.uniform(s.key(name)))  # noqa: E731
    values = [draw(state, "a"), draw(state, "b"), draw(state.replace(step=np.int32(4)), "a")]
    assert len(set(values)) == 3
    assert draw(state, "a") == values[0]
    assert float(jax.jit(lambda s: jax.random.uniform(s.key("a")))(state)) == values[0]


ZERO = jnp.zeros
WRONG = {
    "not a tuple": ({}, r"must return its state in 4 parts"),
    "three parts": (([ZERO((4, 3)), ZERO((2,))], [], []), "Received: 3 parts"),
    "no list": (([ZERO((4, 3)), ZERO((2,))], ZERO(3), [], []), "`non_trainable`.*must be a list"),
    "swapped parts": (
        ([ZERO((3,))], [ZERO((4, 3)), ZERO((2,))], [ZERO((), "int32")], [ZERO(())]),
        "wrong order.*Received: non_trainable, trainable, optimizer, metrics",
    ),
    "too short": (
        ([ZERO((4, 3))], [ZERO((3,))], [ZERO((), "int32")], [ZERO(())]),
        r"`trainable`.*wrong length. Expected 2 arrays \(b, a\). Received: 1",
    ),
    "shape": (
        ([ZERO((3, 4)), ZERO((2,))], [ZERO((3,))], [ZERO((), "int32")], [ZERO(())]),
        r"trainable variable `b`.*Expected float32\[4,3\]. Received: an? ?.*float32\[3,4\]",
    ),
    "dtype": (
        ([ZERO((4, 3)), ZERO((2,))], [ZERO((3,), "bfloat16")], [ZERO((), "int32")], [ZERO(())]),
        r"non_trainable variable `m`.*Expected float32\[3\]. Received: bfloat16\[3\]",
    ),
    "integer to float": (
        ([ZERO((4, 3)), ZERO((2,))], [ZERO((3,))], [ZERO(())], [ZERO(())]),
        r"optimizer variable `o`.*Expected int32\[\]. Received: float32\[\]",
    ),
    "none": (
        ([ZERO((4, 3)), None], [ZERO((3,))], [ZERO((), "int32")], [ZERO(())]),
        "trainable variable `a` came back as None",
    ),
}


@pytest.mark.parametrize(("returned", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_state_is_named(returned, message):
    """The error says which part or variable, what was expected and what came back."""
    with pytest.raises(fs.StateError, match=message.replace("Received: an? ?.*", "Received: ")):
        merge(_state(), returned, "train_step")


def test_weak_types_are_made_strong():
    """A Python number in the place of a float32 is no error, and no other program either."""
    returned = ([ZERO((4, 3)), ZERO((2,))], [ZERO((3,))], [ZERO((), "int32")], [0.0])
    merged = merge(_state(), returned, "train_step")
    assert merged.metrics["t"].dtype == "float32" and not merged.metrics["t"].weak_type


def test_two_variables_of_one_shape_that_were_exchanged_are_found():
    """Shapes cannot tell them apart, but untouched arrays are known by identity."""
    layout = Layout(("a", "b"), iterated=("trainable",))
    a, b = jnp.zeros(2), jnp.ones(2)
    before = State(0, 0, {"a": a, "b": b}, layout=layout)
    with pytest.raises(
        fs.StateError, match="variable `a` and the trainable variable `b` were exchanged"
    ):
        merge(before, ([b, a],), "test_step")
    c = jnp.full(2, 2.0)
    shifted = merge(before, ([c, a],), "train_step")  # a queue moves its entries on
    assert shifted.trainable["b"] is a
    copied = merge(before, ([b, b],), "train_step")  # a target network takes a copy
    assert copied.trainable["a"] is b


def test_two_parts_of_one_signature_that_were_exchanged_are_found():
    """A network and its frozen twin have the same shapes; their places are known all the same."""
    layout = Layout(("a",), ("b",), iterated=("trainable", "non_trainable"))
    a, b = jnp.zeros(2), jnp.ones(2)
    before = State(0, 0, {"a": a}, {"b": b}, layout=layout)
    with pytest.raises(fs.StateError, match="variable `a` and the non_trainable variable `b`"):
        merge(before, ([b], [a]), "test_step")


def _model():
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    return model


def test_capture_and_restore_give_the_same_run_again(rows):
    """Training on from a restored state repeats the run bit for bit, dropout included."""
    x, y = rows
    model = _model()
    fs.fit(model, x, y, shuffle=False, verbose=0)
    state = fs.capture(model)
    assert int(state.step) == 3
    first = fs.fit(model, x, y, shuffle=False, verbose=0, epochs=2).history
    after_first = [v.numpy() for v in model.variables]
    fs.restore(model, state)
    again = fs.fit(model, x, y, shuffle=False, verbose=0, epochs=2).history
    assert first == again
    for one, variable in zip(after_first, model.variables, strict=True):
        np.testing.assert_array_equal(one, variable.numpy())


def test_restore_into_a_model_built_anew(rows):
    """Names do not depend on how often Keras has counted, so another build takes the state."""
    x, y = rows
    model, other = _model(), _model()
    fs.fit(model, x, y, verbose=0)
    fs.fit(other, x, y, verbose=0)
    fs.restore(other, fs.capture(model))
    np.testing.assert_array_equal(model.predict(x, verbose=0), other.predict(x, verbose=0))


def test_restore_names_everything_that_does_not_fit(rows):
    """Nothing is written, and the error lists each missing, unknown and changed variable."""
    x, y = rows
    model = _model()
    fs.fit(model, x, y, verbose=0)
    other = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    other.compile("sgd", "mse")
    other.train_on_batch(x, y)
    before = [v.numpy() for v in other.variables]
    with pytest.raises(fs.StateError) as error:
        fs.restore(other, fs.capture(model))
    assert "`dense/kernel`: expected float32[5, 3], received float32[5, 4]" in str(error.value)
    assert "unknown optimizer" in str(error.value)
    for one, variable in zip(before, other.variables, strict=True):
        np.testing.assert_array_equal(one, variable.numpy())


def test_a_captured_state_survives_training(rows):
    """The copy is not given up to the steps that follow."""
    x, y = rows
    model = _model()
    fs.fit(model, x, y, verbose=0)
    state = fs.capture(model)
    kernel = np.asarray(state.trainable["dense/kernel"])
    fs.fit(model, x, y, verbose=0)
    np.testing.assert_array_equal(np.asarray(state.trainable["dense/kernel"]), kernel)
    assert not np.array_equal(model.layers[0].kernel.numpy(), kernel)


def test_a_state_captured_before_the_first_fit_is_restored_after_it(rows):
    """The optimizer is built by `capture`; metrics, which a first batch builds, start anew."""
    x, y = rows
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    start = fs.capture(model)
    first = fs.fit(model, x, y, shuffle=False, verbose=0).history
    fs.restore(model, start)
    assert int(model.optimizer.iterations.value) == 0
    assert all(not np.any(variable.numpy()) for variable in model.metrics_variables)
    assert fs.fit(model, x, y, shuffle=False, verbose=0).history == first


def test_restore_into_a_model_that_has_seen_no_batch_yet(rows):
    """A fresh build with metrics takes the state, and trains on as the first model does."""
    x, y = rows

    def build():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
        return model

    model, other = build(), build()
    fs.fit(model, x, y, shuffle=False, verbose=0)
    fs.restore(other, fs.capture(model))
    expected = fs.fit(model, x, y, shuffle=False, verbose=0).history
    assert fs.fit(other, x, y, shuffle=False, verbose=0).history == expected


def test_capture_and_restore_say_what_they_take():
    """A model that is not built, what is no model and what is no state are errors that say so."""
    with pytest.raises(fs.StateError, match="is not built"):
        fs.capture(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(TypeError, match=r"`fitstep.capture` takes a `keras.Model`"):
        fs.capture("model")
    with pytest.raises(TypeError, match=r"`fitstep.restore` takes a state"):
        fs.restore(_model(), {})


class Selecting(keras.Model):
    """A model whose step keeps the old state where the loss is not finite, by way of a tree map."""

    def __init__(self, select):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.select = select

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        logs, new = super().train_step(state, data)
        return logs, self.select(logs["loss"], new, state)


def _keep_finite(loss, new, old):
    return jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(loss), a, b), new, old)


def test_a_tree_map_over_the_state_works_with_a_tuple_and_says_so_without(rows):
    """`tuple(state)` is what Keras passes; where JAX meets a State beside a tuple, a note says it."""
    x, y = rows
    model = Selecting(lambda loss, new, old: _keep_finite(loss, new, tuple(old)))
    model.compile("sgd", "mse")
    fs.fit(model, x, y, verbose=0)
    assert int(model.optimizer.iterations.value) == 3
    model = Selecting(_keep_finite)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError) as caught:
        fs.fit(model, x, y, verbose=0)
    assert "`tuple(state)`" in "".join(caught.value.__notes__)


def test_a_state_that_went_through_a_transformation_is_taken(rows):
    """`jit` and tree maps make new `step` and `seed`; only numbers put in their place are refused."""
    x, y = rows

    def through(loss, new, old):
        return jax.jit(lambda state: state)(old.replace(trainable=new[0], optimizer=new[2]))

    model = Selecting(through)
    model.compile("sgd", "mse")
    fs.fit(model, x, y, verbose=0)
    assert int(model.optimizer.iterations.value) == 3
    model = Selecting(lambda loss, new, old: old.replace(step=0))
    model.compile("sgd", "mse")
    with pytest.raises(fs.StateError, match="changed `step` or `seed`"):
        fs.fit(model, x, y, verbose=0)


def test_a_state_is_compared_and_hashed_by_identity():
    """Arrays have no truth value, so neither has their comparison."""
    one, other = State(0, 0, {"a": jnp.zeros(2)}), State(0, 0, {"a": jnp.zeros(2)})
    assert one == one  # noqa: PLR0124
    assert one != other
    assert len({one, other}) == 2
