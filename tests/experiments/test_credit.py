"""The built-in experiment: its data, its loss, its step, its decisions, and a short run of it."""

import hashlib
import json
from typing import Any

import jax
import keras
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold

import fitstep as fs
from fitstep import experiments
from fitstep.cli import main
from fitstep.experiments import credit

SHA256 = "19d2248496574722e85ff237133470344da25e8b4b309cb3d0143c909fb35deb"


# --- the data ---------------------------------------------------------------------------------


def test_names_and_summaries_come_without_an_import():
    """The built-in experiments are found in their folder, each with its first line."""
    assert experiments.names() == ("credit",)
    assert experiments.summary("credit") == (credit.__doc__ or "").partition("\n")[0]


def test_the_data_file_is_the_published_one():
    """The file has its hash, 1,000 rows, 7 numeric and 13 categorical attributes, 300 bad risks."""
    assert hashlib.sha256(credit.DATA.read_bytes()).hexdigest() == SHA256
    assert SHA256 in credit.DATA.with_name("README.md").read_text()
    table, bad = credit.applications()
    assert table.shape == (1000, 20)
    assert len(table.select_dtypes("number").columns) == 7
    assert not table.isna().any().any()
    assert (bad.sum(), len(bad)) == (300, 1000)


def test_folds_are_stratified_and_encoded_by_their_training_rows():
    """Each fold has 640, 160 and 200 rows with 30 % bad risks; only its training rows scale it."""
    for fold in credit.stratified_folds(5, seed=0):
        for (x, bad), rows in zip(fold, (640, 160, 200), strict=True):
            assert (len(x), bad.shape, bad.sum()) == (rows, (rows, 1), 0.3 * rows)
            assert x.dtype == np.float32
        # float32 sums of 640 standardised values: their mean is zero to a few units in 1e-7.
        np.testing.assert_allclose(fold.train[0][:, :7].mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(fold.train[0][:, :7].std(axis=0), 1, atol=1e-5)
        assert np.abs(fold.test[0][:, :7].mean(axis=0)).max() > 1e-3
        assert set(np.unique(fold.train[0][:, 7:])) == {0, 1}


def test_a_logistic_regression_reaches_the_published_auc():
    """One-hot and standardised, five folds, seed 0: AUC 0.787 with a deviation of 0.015."""
    table, bad = credit.applications()
    scores = []
    for train, test in StratifiedKFold(5, shuffle=True, random_state=0).split(table, bad):
        encode = credit.encoder().fit(table.iloc[train]).transform
        model = LogisticRegression(max_iter=1000).fit(encode(table.iloc[train]), bad[train])
        scores.append(roc_auc_score(bad[test], model.predict_proba(encode(table.iloc[test]))[:, 1]))
    # The published figures have three digits.
    assert np.mean(scores) == pytest.approx(0.787, abs=5e-4)
    assert np.std(scores) == pytest.approx(0.015, abs=5e-4)


# --- the loss ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "bad", "good"),
    [
        (0.0, 5.0, 0.0),  # certainly granted
        (1.0, 0.0, 1.0),  # certainly refused
        (1 / 6, 2.5, 0.5),  # r = 1/2: both by even chance
        (0.5, 5 / 6, 5 / 6),  # r = 2.5 / 3 = 5/6
        (0.1, 5 * 9 / 14, 5 / 14),  # r = 0.5 / 1.4 = 5/14
    ],
)
def test_soft_cost_by_hand(p, bad, good):
    """The soft cost is 5 (1 - r) for a bad risk and r for a good one."""
    assert credit.soft_cost(1.0, p) == pytest.approx(bad)
    assert credit.soft_cost(0.0, p) == pytest.approx(good)


@pytest.mark.parametrize("y", [0.0, 1.0])
def test_soft_cost_gradient(y):
    """The gradient of the soft cost agrees with central differences in float64."""
    p = np.linspace(0.02, 0.98, 25)
    step = 1e-6
    differences = (credit.soft_cost(y, p + step) - credit.soft_cost(y, p - step)) / (2 * step)
    gradient = jax.vmap(jax.grad(lambda p: credit.soft_cost(y, p)))(p.astype("float32"))
    # float32 against float64: about eight roundings of 6e-8 each.
    np.testing.assert_allclose(gradient, differences, rtol=2e-6)


# --- the step ---------------------------------------------------------------------------------


@pytest.fixture
def applicants():
    """70 rows, so that batches of 32 leave a short one, with few bad risks."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=(70, 4)).astype("float32")
    y = (x[:, :1] + generator.normal(size=(70, 1)) > 1).astype("float32")
    return x, y


def cost_priced(mix: float, dropout: float = 0.0) -> credit.CostPricedNetwork:
    """A small network with the priced step, the same each time."""
    keras.utils.set_random_seed(0)
    model = credit.CostPricedNetwork(units=6, dropout=dropout, mix=mix)
    model.compile(keras.optimizers.SGD(0.5))
    return model


def test_one_step_against_backpropagation_by_hand(applicants):
    """One SGD step on the cost alone moves every weight as the chain rule in NumPy says."""
    x, y = applicants
    model = cost_priced(mix=0.0)
    model(x)  # builds it
    w1, b1, w2, b2 = before = [w.astype("float64") for w in model.get_weights()]
    history = fs.fit(model, x, y, batch_size=70, epochs=1, shuffle=False, verbose=0)

    hidden = x @ w1 + b1
    active = np.maximum(hidden, 0)
    p = 1 / (1 + np.exp(-(active @ w2 + b2)))
    r = 5 * p / (1 + 4 * p)
    slope = (1 - y - 5 * y) * 5 / (1 + 4 * p) ** 2 * p * (1 - p) / len(x)  # d cost / d logit
    back = (slope @ w2.T) * (hidden > 0)
    gradients = [x.T @ back, back.sum(0), active.T @ slope, slope.sum(0)]

    loss = np.mean(5 * y * (1 - r) + (1 - y) * r)
    assert history.history["loss"] == pytest.approx([loss], rel=1e-6)
    assert history.history["expected_cost"] == pytest.approx([loss], rel=1e-6)
    for new, old, gradient in zip(model.get_weights(), before, gradients, strict=True):
        # float32 weights and sums over 70 rows.
        np.testing.assert_allclose(new, old - 0.5 * gradient, rtol=1e-5, atol=1e-6)


def test_cross_entropy_alone_is_the_default_step(applicants):
    """With `mix=1` the step trains and evaluates as Keras's own with binary cross-entropy."""
    x, y = applicants
    own, plain = cost_priced(mix=1.0), credit.CreditNetwork(units=6, dropout=0.0)
    plain.compile(keras.optimizers.SGD(0.5), loss="binary_crossentropy")
    for model in (own, plain):
        model(x)  # builds it
    plain.set_weights(own.get_weights())
    settings = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0}
    history = fs.fit(own, x, y, validation_data=(x, y), **settings).history
    expected = plain.fit(x, y, validation_data=(x, y), **settings).history
    for name in ("loss", "val_loss"):
        # Two programs of XLA for one formula, three epochs long.
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5)
    for new, old in zip(own.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-6)


def test_evaluation_weighs_rows_and_leaves_dropout_off(applicants):
    """`evaluate` gives the mean over the rows, the short last batch included, without dropout."""
    x, y = applicants
    model = cost_priced(mix=0.3, dropout=0.9)
    p = np.asarray(model(x), "float64")
    cost = np.mean(credit.soft_cost(y, p))
    cross_entropy = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
    logs = fs.evaluate(model, x, y, batch_size=32, verbose=0, return_dict=True)
    assert logs["expected_cost"] == pytest.approx(cost, rel=1e-5)
    assert logs["loss"] == pytest.approx(0.7 * cost + 0.3 * cross_entropy, rel=1e-5)


def test_training_has_dropout_on(applicants):
    """The loss of a training step is that of the network with hidden units left out."""
    x, y = applicants
    model = cost_priced(mix=0.3, dropout=0.9)
    without = fs.evaluate(model, x, y, batch_size=70, verbose=0, return_dict=True)["loss"]
    trained_on = fs.fit(model, x, y, batch_size=70, verbose=0).history["loss"][0]
    assert abs(trained_on - without) > 0.01


def test_the_networks_survive_saving(applicants, tmp_path):
    """A saved network is loaded with its settings and predicts the same."""
    model = cost_priced(mix=0.25, dropout=0.5)
    expected = fs.predict(model, applicants[0], verbose=0)
    model.save(tmp_path / "model.keras")
    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    assert (loaded.mix, loaded.dropout.rate) == (0.25, 0.5)
    np.testing.assert_array_equal(fs.predict(loaded, applicants[0], verbose=0), expected)


# --- decisions --------------------------------------------------------------------------------


def test_trivial_policies_cost_what_the_matrix_says():
    """Refusing all costs 0.70 per application, granting all 1.50, knowing all nothing."""
    _, bad = credit.applications()
    assert credit.decision_cost(bad, np.ones(1000, bool)) == pytest.approx(0.7)
    assert credit.decision_cost(bad, np.zeros(1000, bool)) == pytest.approx(1.5)
    assert credit.decision_cost(bad, bad == 1) == 0


@pytest.mark.parametrize("seed", range(5))
def test_threshold_against_brute_force(seed):
    """No threshold on a fine grid is cheaper than the chosen one, and no equal one is nearer."""
    generator = np.random.default_rng(seed)
    bad = (generator.random(40) < 0.3).astype("float32")
    p = np.round(np.clip(0.3 * bad + generator.random(40) * 0.6, 0, 1), 2).astype("float32")
    chosen = credit.choose_threshold(bad, p)
    grid = np.linspace(0, 1.005, 4021)
    costs = np.array(
        [np.sum(5 * bad[p < threshold]) + np.sum(1 - bad[p >= threshold]) for threshold in grid]
    )
    assert 40 * credit.decision_cost(bad, p >= chosen) == pytest.approx(costs.min())
    # Of the intervals of equal cost the nearest is taken, at its middle or at 1/6 itself: the
    # distance differs from the grid's by half a step between two probabilities, 0.005, and less.
    distance = np.abs(grid[costs == costs.min()] - credit.BREAK_EVEN).min()
    assert abs(chosen - credit.BREAK_EVEN) <= distance + np.diff(np.unique(p)).max() / 2 + 1e-3


def test_of_equal_thresholds_the_nearest_to_break_even_is_taken():
    """Where refusing a level costs as much as granting it, the threshold nearer to 1/6 stands."""
    p = np.array([0.02] * 10 + [0.06] * 6 + [0.10])
    bad = np.array([0.0] * 10 + [0, 0, 0, 0, 0, 1] + [1])
    # Refusing the six from 0.04 on costs 5, granting them up to 0.08 costs 5 too.
    assert credit.choose_threshold(bad, p) == pytest.approx(0.08)


def test_threshold_takes_break_even_where_all_cost_the_same():
    """Where the rows can't tell thresholds apart, 1/6 itself is chosen."""
    assert credit.choose_threshold(np.array([0.0, 1.0]), np.array([0.1, 0.9])) == credit.BREAK_EVEN


# --- the whole --------------------------------------------------------------------------------


def trained(config: credit.Config) -> tuple[fs.Run, dict[str, list[float]]]:
    """The first fold's plain network and its history."""
    run = credit.build(config)["cross-entropy-fold-1"]()
    settings = {"validation_data": run.validation_data, "callbacks": run.callbacks, "verbose": 0}
    history = fs.fit(run.model, run.x, run.y, epochs=run.epochs, **settings)
    return run, history.history


def test_a_run_ends_with_the_weights_of_its_best_epoch():
    """The trained network has the lowest validation loss of its history; no file is left over."""
    run, history = trained(credit.Config(epochs=8, patience=3, learning_rate=0.05))
    best = min(history["val_loss"])
    assert history["val_loss"][-1] > best  # else there was nothing to put back
    logs = fs.evaluate(run.model, *run.validation_data, verbose=0, return_dict=True)
    assert logs["loss"] == pytest.approx(best, rel=1e-6)


def test_a_seed_gives_the_same_run_twice():
    """Two builds of one seed give the same history, another seed another."""
    first, same, other = (trained(credit.Config(seed=seed, epochs=2))[1] for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_the_command_from_end_to_end(tmp_path, capsys):
    """`fitstep train credit --epochs 1` prints and stores a table with every way to decide."""
    out = tmp_path / "out"
    assert main(["train", "credit", "--epochs", "1", "--folds", "2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    rows = json.loads((out / "summary.json").read_text())["report"]
    methods = [(row["method"], row["threshold"]) for row in rows]
    networks = ("cost-priced", "cross-entropy", "logistic regression")
    assert methods == [
        *((name, threshold) for name in networks for threshold in ("chosen", "1/6")),
        ("always refuse", "none"),
        ("always grant", "none"),
    ]
    assert [row["cost"] for row in rows[-2:]] == pytest.approx([0.7, 1.5])
    assert [row["AUC"] for row in rows[-2:]] == [0.5, 0.5]
    for row in rows[:-2]:
        assert 0 < row["cost"] < 5
        assert f"{row['cost']:.4f}" in said
    # On half of the rows a logistic regression is a little below its 0.787 on four fifths.
    assert 0.7 < rows[4]["AUC"] < 0.85
    runs = sorted(path.name for path in out.iterdir() if path.is_dir())
    assert runs == [f"{name}-fold-{number}" for name in networks[:2] for number in (1, 2)]
