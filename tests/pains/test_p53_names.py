"""Pain 53: names of variables hold across rebuilding, cloning and reloading, and none is there twice.

The example: `variable.path` of a model built a second time differs.
"""

import keras
import numpy as np
import pytest
from keras import layers

import fitstep as fs


def sequential():
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(4),
            layers.BatchNormalization(),
            layers.Dense(3),
            layers.Dense(1),
        ]
    )


def functional():
    inputs = keras.Input((5,))
    trunk = keras.Sequential([keras.Input((5,)), layers.Dense(4)])(inputs)
    outputs = {"a": layers.Dense(1, name="a")(trunk), "b": layers.Dense(1, name="b")(trunk)}
    return keras.Model(inputs, outputs, name="two_headed")


@keras.saving.register_keras_serializable(package="fitstep_tests_p53")
class Subclass(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [layers.Dense(4), layers.Dense(4)]
        self.drop = layers.Dropout(0.3)
        self.head = layers.Dense(1, name="head")

    def call(self, x, training=False):
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x, training=training))

    def build(self, input_shape):
        for block, width in zip(self.blocks, (input_shape[-1], 4), strict=True):
            block.build((None, width))
        self.head.build((None, 4))
        super().build(input_shape)


def subclass():
    model = Subclass()
    model(np.zeros((1, 5), "float32"))
    return model


def our_subclass():
    class Ours(fs.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(4)
            self.head = layers.Dense(1)

        def call(self, x):
            return self.head(self.dense(x))

    model = Ours()
    model(np.zeros((1, 5), "float32"))
    return model


KINDS = [sequential, functional, subclass, our_subclass]


def compiled(model, optimizer=keras.optimizers.Adam):
    metrics = {"a": ["mae"], "b": ["mae"]} if model.name == "two_headed" else ["mae"]
    model.compile(optimizer(0.01), "mse", metrics=metrics)
    return model


def names(state):
    return {
        part: set(getattr(state, part))
        for part in ("trainable", "non_trainable", "optimizer", "metrics")
    }


def trained(model, x, y):
    x, y = x[:32], y[:32]
    target = {"a": y, "b": 2 * y} if model.name == "two_headed" else y
    fs.fit(model, x, target, verbose=0)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_model_built_twice_has_the_same_names(rows, kind):
    """Names of all four parts, after a step, are those of the second model built in the process."""
    first = trained(compiled(kind()), *rows)
    second = trained(compiled(kind()), *rows)
    assert names(fs.capture(first)) == names(fs.capture(second))
    assert len(names(fs.capture(first))["trainable"]) == len(first.trainable_variables)
    assert len(names(fs.capture(first))["non_trainable"]) == len(first.non_trainable_variables)
    assert len(names(fs.capture(first))["optimizer"]) == len(first.optimizer.variables)
    assert len(names(fs.capture(first))["metrics"]) == len(first.metrics_variables)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_reloaded_model_has_the_same_names_and_values(rows, kind, tmp_path):
    """What is captured of the model can be restored into the one that was saved and loaded."""
    model = trained(compiled(kind()), *rows)
    model.save(tmp_path / "model.keras")
    loaded = trained(keras.models.load_model(tmp_path / "model.keras"), *rows)
    assert names(fs.capture(loaded)) == names(fs.capture(model))
    state = fs.capture(model)
    fs.restore(loaded, state)
    for got, want in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_clone_has_the_same_names(rows, kind):
    """`clone_model` makes other objects of the same names."""
    model = trained(compiled(kind()), *rows)
    clone = keras.models.clone_model(model)
    if not clone.built:
        clone.build((None, 5))
    clone = trained(compiled(clone), *rows)
    assert names(fs.capture(clone)) == names(fs.capture(model))


def test_a_model_built_lazily_by_the_first_batch_has_the_same_names(rows):
    """Built by `fit` or by hand before it: the same names."""
    lazy = keras.Sequential([layers.Dense(4), layers.Dense(1)])
    ready = keras.Sequential([keras.Input((5,)), layers.Dense(4), layers.Dense(1)])
    assert names(fs.capture(trained(compiled(lazy), *rows))) == names(
        fs.capture(trained(compiled(ready), *rows))
    )


def test_adafactor_and_metrics_of_several_outputs_repeat_no_name(rows):
    """Where Keras repeats paths, every variable still has a name of its own."""
    model = trained(compiled(functional(), keras.optimizers.Adafactor), *rows)
    paths = [variable.path for variable in (*model.optimizer.variables, *model.metrics_variables)]
    assert len(set(paths)) < len(paths)  # the fault of the example is there
    state = fs.capture(model)
    assert len(state.optimizer) == len(model.optimizer.variables)
    assert len(state.metrics) == len(model.metrics_variables)


def test_names_say_where_a_variable_hangs_and_not_what_the_model_is_called(rows):
    """A layer that was named is found by its name; the root's name is no part; counters are no part."""
    first, second = subclass(), Subclass(name="other")
    second(np.zeros((1, 5), "float32"))
    state = fs.capture(trained(compiled(first), *rows))
    assert "head/kernel" in state.trainable
    assert set(fs.capture(trained(compiled(second), *rows)).trainable) == set(state.trainable)
    np.testing.assert_array_equal(state.trainable["head/kernel"], first.head.kernel.value)


def test_a_captured_state_survives_training_and_is_restored_as_often_as_wanted(rows):
    """The arrays of a state are not given up by later fits: restoring twice gives the same run twice."""
    x, y = rows
    model = trained(compiled(sequential()), x, y)
    state = fs.capture(model)
    weights = []
    for _ in range(2):
        fs.restore(model, state)
        fs.fit(model, x[:32], y[:32], shuffle=False, epochs=2, verbose=0)
        weights.append(model.get_weights())
        assert all(np.all(np.isfinite(array)) for array in state.trainable.values())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_state_of_another_model_is_refused_by_name(rows):
    """Nothing is written where a name is missing, and the error says which."""
    model = trained(compiled(sequential()), *rows)
    before = model.get_weights()
    with pytest.raises(fs.StateError, match="head"):
        fs.restore(model, fs.capture(trained(compiled(subclass()), *rows)))
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
