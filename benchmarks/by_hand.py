"""The loops that one writes by hand: Keras's own step, jitted, over shuffled rows of arrays.

An epoch draws a NumPy permutation, gathers each batch and donates the state, and ends when the
device is done. `check` holds what they compute against stock `fit`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from fitstep.cli._cases import Case

K = 16  # steps in one program of the scanned loop, as in `fs.fit`
# Other programs sum float32 in another order, and hundreds of updates carry that on.
TOLERANCE = 1e-3
Epoch = Callable[..., float]  # (shuffle=True) -> the mean loss of the epoch


def jitted(model: keras.Model, case: Case) -> Epoch:
    """One step, one program."""
    step = jax.jit(model.train_step, donate_argnums=0)

    def epoch(state: Any, order: np.ndarray) -> Any:
        logs = {}
        for start in range(0, len(order), case.batch_size):
            rows = order[start : start + case.batch_size]
            logs, state = step(state, (np.take(case.x, rows, 0), np.take(case.y, rows, 0)))
        return logs, state

    return _over_epochs(model, case, epoch)


def scanned(model: keras.Model, case: Case) -> Epoch:
    """K steps in one program, by `lax.scan` over a stack of batches."""

    def step(state: Any, batch: Any) -> Any:
        logs, state = model.train_step(state, batch)
        return state, logs

    scan = jax.jit(
        lambda state, batches: jax.lax.scan(step, state, batches), donate_argnums=0
    )  # a stack of another height is compiled once more
    size = case.batch_size

    def stack(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.take(array, rows, 0).reshape(-1, size, *array.shape[1:])

    def epoch(state: Any, order: np.ndarray) -> Any:
        assert len(order) % size == 0, "a short last batch does not fit into a stack"
        logs = {}
        for start in range(0, len(order), K * size):
            rows = order[start : start + K * size]
            state, logs = scan(state, (stack(case.x, rows), stack(case.y, rows)))
        return jax.tree.map(lambda each: each[-1], logs), state

    return _over_epochs(model, case, epoch)


def _over_epochs(model: keras.Model, case: Case, epoch: Callable[[Any, np.ndarray], Any]) -> Epoch:
    generator = np.random.default_rng(0)
    # Copies, in a list to be taken out of it: what is donated must have no other owner.
    held = [jax.tree.map(jnp.copy, state_of(model))]
    metrics = jax.tree.map(jnp.copy, held[0][3])

    def run(shuffle: bool = True) -> float:
        trainable, non_trainable, optimizer, _ = held.pop()
        # Metrics start anew in each epoch, as they do in `fit`.
        state = (trainable, non_trainable, optimizer, [jnp.copy(each) for each in metrics])
        rows = np.arange(len(case.x))
        logs, state = epoch(state, generator.permutation(rows) if shuffle else rows)
        jax.block_until_ready((logs, state))
        held.append(state)
        return float(logs["loss"])

    return run


def state_of(model: keras.Model) -> tuple[list[Any], ...]:
    """The state in the order of Keras's guide; the model is built."""
    model.optimizer.build(model.trainable_variables)
    parts = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    return tuple([variable.value for variable in part] for part in parts)


def check(case: Case, epochs: dict[str, Epoch]) -> None:
    """Make a first, unshuffled epoch with each, and compare its loss with stock `fit`'s."""
    options = {"batch_size": case.batch_size, "shuffle": False, "verbose": 0}
    expected = case.build().fit(case.x, case.y, **options).history["loss"][-1]
    for name, epoch in epochs.items():
        loss = epoch(shuffle=False)
        assert abs(loss - expected) <= TOLERANCE * expected, (
            f"{case.name}: the loop {name!r} ends with the loss {loss}, stock fit with {expected}"
        )
