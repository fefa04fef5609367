"""Who gets a loan? A training step that prices its mistakes in the bank's own money.

German Credit comes with a cost matrix: granting credit to a bad risk costs 5, refusing a good one
costs 1. With p the network's probability that an applicant is a bad risk, granting is expected to
cost 5 p and refusing 1 - p, so the cheaper decision is to refuse from p = 1/6 on. A network can't
learn from a decision that jumps there, so the step lets it decide softly: it refuses with
probability

    r(p) = 5 p / (5 p + (1 - p)),        r(1/6) = 1/2,

and the loss prices that decision, mixed with the cross-entropy that keeps p a probability:

    cost(y, p) = 5 y (1 - r(p)) + (1 - y) r(p)          y = 1: a bad risk, y = 0: a good one
    loss(y, p) = (1 - mix) cost(y, p) + mix cross_entropy(y, p)

(Elkan 2001, "The Foundations of Cost-Sensitive Learning", has the matrix and the threshold.)

Five folds; in each, the step above, the same network with Keras's own step and plain
cross-entropy, and a logistic regression see the same rows. The settings are not tuned.
Run it: `fitstep train credit`.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false
# (because Keras's annotations name what all backends could return)

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pandas as pd
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, train_test_split
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import fitstep as fs

DATA = Path(__file__).parent / "data" / "german_credit.csv.gz"
GRANTED_BAD = 5.0  # the cost matrix of the data set: credit given to a bad risk ...
REFUSED_GOOD = 1.0  # ... and credit refused to a good one
BREAK_EVEN = REFUSED_GOOD / (REFUSED_GOOD + GRANTED_BAD)  # 1/6: both decisions cost the same
NETWORKS = ("cost-priced", "cross-entropy")


@dataclass(frozen=True)
class Config:
    """What `fitstep train credit` takes as flags."""

    seed: int = field(default=0, metadata={"help": "of the folds, the weights and the shuffling"})
    folds: int = field(default=5, metadata={"help": "parts of the data, each the test rows once"})
    epochs: int = field(default=100, metadata={"help": "passes over the training rows, at most"})
    patience: int = field(default=10, metadata={"help": "epochs without a better validation loss"})
    batch_size: int = field(default=32, metadata={"help": "rows per training step"})
    learning_rate: float = field(default=1e-3, metadata={"help": "of Adam"})
    units: int = field(default=32, metadata={"help": "width of the hidden layer"})
    dropout: float = field(default=0.3, metadata={"help": "share of hidden units left out"})
    mix: float = field(default=0.5, metadata={"help": "share of cross-entropy in the loss"})


# --- the networks -----------------------------------------------------------------------------


@keras.saving.register_keras_serializable("fitstep.credit")
class CreditNetwork(keras.Model):
    """One hidden layer; its output is the probability that an applicant is a bad risk."""

    def __init__(self, units: int, dropout: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(units, activation="relu")
        self.dropout = keras.layers.Dropout(dropout)
        self.head = keras.layers.Dense(1, activation="sigmoid")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.dropout(self.hidden(x), training=training))

    def get_config(self) -> dict[str, Any]:  # lets Keras load a saved model
        own = {"units": self.hidden.units, "dropout": self.dropout.rate}
        return super().get_config() | own


def soft_cost(y: Any, p: Any) -> Any:
    """The expected cost of refusing with probability r(p), for each applicant."""
    refuse = GRANTED_BAD * p / (GRANTED_BAD * p + REFUSED_GOOD * (1 - p))
    return GRANTED_BAD * y * (1 - refuse) + REFUSED_GOOD * (1 - y) * refuse


@keras.saving.register_keras_serializable("fitstep.credit")
class CostPricedNetwork(CreditNetwork):
    """The same network with its own step, written to Keras's public contract for JAX."""

    def __init__(self, units: int, dropout: float, mix: float, **kwargs: Any) -> None:
        super().__init__(units, dropout, **kwargs)
        self.mix = mix
        self.expected_cost = keras.metrics.Mean(
            name="expected_cost"
        )  # beside Keras's own mean of the loss

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"mix": self.mix}

    def compute_loss_and_updates(self, trainable, non_trainable, x, y, training=False):
        p, non_trainable = self.stateless_call(trainable, non_trainable, x, training=training)
        cost = jnp.mean(soft_cost(y, p))
        cross_entropy = jnp.mean(keras.losses.binary_crossentropy(y, p))
        loss = (1 - self.mix) * cost + self.mix * cross_entropy
        return loss, (cost, non_trainable)

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y = data
        priced = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, aux), gradients = priced(trainable, non_trainable, x, y, training=True)
        cost, non_trainable = aux
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        logs, metrics = self.update_metrics(metrics, loss, cost, rows=y.shape[0])
        return logs, (trainable, non_trainable, optimizer, metrics)

    def test_step(self, state, data):
        trainable, non_trainable, metrics = state
        x, y = data
        loss, (cost, non_trainable) = self.compute_loss_and_updates(trainable, non_trainable, x, y)
        logs, metrics = self.update_metrics(metrics, loss, cost, rows=y.shape[0])
        return logs, (trainable, non_trainable, metrics)

    def update_metrics(self, variables, loss, cost, rows):
        logs, updated = {}, []
        for metric in self.metrics:
            own = variables[len(updated) : len(updated) + len(metric.variables)]
            value = {"loss": loss, "expected_cost": cost}[metric.name]
            # Weighted by its rows, so that a short last batch counts for what it holds.
            own = metric.stateless_update_state(own, value, sample_weight=rows)
            logs[metric.name] = metric.stateless_result(own)
            updated += own
        return logs, updated


# --- the runs: two networks in each fold ------------------------------------------------------


class Fold(NamedTuple):
    """One fold's rows as (features, target): to train on, to choose by, and to test on."""

    train: tuple[np.ndarray, np.ndarray]
    inner: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def applications() -> tuple[pd.DataFrame, np.ndarray]:
    """The 1,000 applications, and 1 where the risk turned out bad."""
    table = pd.read_csv(DATA, keep_default_na=False)
    bad = (table.pop("risk") == "bad").to_numpy("float32")
    return table, bad


def encoder() -> Any:
    """Standardised numbers and one-hot categories."""
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    return make_column_transformer(
        (StandardScaler(), make_column_selector(dtype_include="number")),
        (one_hot, make_column_selector(dtype_exclude="number")),
    )


def stratified_folds(count: int, seed: int) -> Iterator[Fold]:
    """Split into folds, and each fold's training rows once more, 4 to 1, for all choices."""
    table, bad = applications()
    splitter = StratifiedKFold(count, shuffle=True, random_state=seed)
    for rows, test in splitter.split(table, bad):
        train, inner = train_test_split(rows, test_size=0.2, random_state=seed, stratify=bad[rows])
        # Fitted on the training rows alone: nothing of the others may leak into their features.
        encode = encoder().fit(table.iloc[train]).transform
        parts = (train, inner, test)
        yield Fold(*((encode(table.iloc[p]).astype("float32"), bad[p, None]) for p in parts))


def compiled(name: str, config: Config) -> keras.Model:
    optimizer = keras.optimizers.Adam(config.learning_rate)
    if name == "cost-priced":
        model = CostPricedNetwork(config.units, config.dropout, config.mix)
        model.compile(optimizer)  # its step knows the loss
    else:
        model = CreditNetwork(config.units, config.dropout)
        model.compile(optimizer, loss="binary_crossentropy")
    return model


def best_of_inner_rows(model: keras.Model, patience: int) -> list[keras.callbacks.Callback]:
    """Stop when the loss on the inner rows stalls, and end with the weights of its best epoch."""
    folder = tempfile.TemporaryDirectory(prefix="fitstep-credit-")
    best = Path(folder.name, "best.weights.h5")

    def put_back(logs: Any = None) -> None:
        model.load_weights(best)
        folder.cleanup()

    return [
        keras.callbacks.EarlyStopping("val_loss", patience=patience),
        keras.callbacks.ModelCheckpoint(best, save_best_only=True, save_weights_only=True),
        keras.callbacks.LambdaCallback(on_train_end=put_back),
    ]


def fold_run(name: str, fold: Fold, config: Config) -> fs.Run:
    """One network on one fold, always from the same seed: folds don't depend on their order."""
    keras.utils.set_random_seed(config.seed)
    model = compiled(name, config)
    return fs.Run(
        model,
        *fold.train,
        validation_data=fold.inner,
        test_data=fold.test,
        batch_size=config.batch_size,
        epochs=config.epochs,
        callbacks=best_of_inner_rows(model, config.patience),
    )


def build(config: Config) -> dict[str, Callable[[], fs.Run]]:
    """The runs by name; each is built when its turn comes."""
    return {
        f"{name}-fold-{number}": partial(fold_run, name, fold, config)
        for number, fold in enumerate(stratified_folds(config.folds, config.seed), start=1)
        for name in NETWORKS
    }


# --- the report: what each way to decide costs the bank ---------------------------------------


def decision_cost(bad: np.ndarray, refuse: np.ndarray) -> float:
    """The cost per application of refusing these and granting the others."""
    return float(np.mean(np.where(refuse, REFUSED_GOOD * (1 - bad), GRANTED_BAD * bad)))


def choose_threshold(bad: np.ndarray, p: np.ndarray) -> float:
    """The threshold that costs least on these rows; of several, the nearest to break-even."""
    levels = np.unique(p.astype("float64"))
    between = (levels[1:] + levels[:-1]) / 2
    candidates = np.concatenate([[-np.inf, BREAK_EVEN], between, [np.inf]])
    costs = np.array([decision_cost(bad, p >= threshold) for threshold in candidates])
    cheapest = candidates[costs == costs.min()]
    return float(cheapest[np.argmin(np.abs(cheapest - BREAK_EVEN))])


def judge(run: fs.Run, predict: Callable[[np.ndarray], np.ndarray]) -> dict[str, tuple]:
    """Threshold -> (AUC, cost per application) on the test rows; the inner rows choose."""
    (x, bad), (inner_x, inner_bad) = run.test_data, run.validation_data
    p = predict(x)
    chosen = choose_threshold(inner_bad[:, 0], predict(inner_x))
    return {
        name: (roc_auc_score(bad, p), decision_cost(bad[:, 0], p >= threshold))
        for name, threshold in (("chosen", chosen), ("1/6", BREAK_EVEN))
    }


def report(config: Config, results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """AUC and cost per application, mean and deviation over the folds, for each way to decide."""
    folds: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def add(method: str, judged: dict[str, tuple[float, float]]) -> None:
        for threshold, scores in judged.items():
            folds.setdefault((method, threshold), []).append(scores)

    for number in range(1, config.folds + 1):
        for name in NETWORKS:
            run = results[f"{name}-fold-{number}"].run
            add(name, judge(run, lambda x, m=run.model: fs.predict(m, x, verbose=0)[:, 0]))
        # Both networks of a fold see the same rows; the others are judged on them too.
        logistic = LogisticRegression(max_iter=1000).fit(run.x, run.y[:, 0])
        add("logistic regression", judge(run, lambda x, m=logistic: m.predict_proba(x)[:, 1]))
        bad = run.test_data[1]
        add("always refuse", {"none": (0.5, decision_cost(bad, np.ones_like(bad, bool)))})
        add("always grant", {"none": (0.5, decision_cost(bad, np.zeros_like(bad, bool)))})

    rows = []
    for (method, threshold), scores in folds.items():
        (auc, cost), (auc_sd, cost_sd) = np.mean(scores, axis=0), np.std(scores, axis=0)
        figures = {"AUC": auc, "AUC sd": auc_sd, "cost": cost, "cost sd": cost_sd}
        rows.append({"method": method, "threshold": threshold} | figures)
    return rows
