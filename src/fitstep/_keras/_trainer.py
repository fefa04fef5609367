"""What a training run needs of Keras's trainer beyond its public methods."""

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
from keras.src.backend.config import max_epochs
from keras.src.utils.python_utils import pythonify_logs

from fitstep._backend import refuse_nnx
from fitstep._errors import OptimizerError, StateError
from fitstep._warn import warn


def _stock_trainer() -> type:
    """Keras's trainer for JAX: `JAXTrainer` in 3.15, `Trainer` after it."""
    module = "keras.src.backend.jax.trainer"
    return next(cls for cls in keras.Model.__mro__ if cls.__module__ == module)


StockTrainer: type = _stock_trainer()


class Parts(NamedTuple):
    """The variables of a model in Keras's order; one may stand in several places."""

    trainable: list[Any]
    non_trainable: list[Any]
    optimizer: list[Any]
    metrics: list[Any]


def parts(model: Any) -> Parts:
    """The variables that a step of this model is about."""
    optimizer = getattr(model, "optimizer", None)
    return Parts(
        list(model.trainable_variables),
        list(model.non_trainable_variables),
        list(optimizer.variables) if optimizer is not None else [],
        list(model.metrics_variables),
    )


def is_stock(model: Any, method: str) -> bool:
    """Whether a method of a model is Keras's own."""
    return method not in vars(model) and getattr(type(model), method) in _stock_methods(method)


def _stock_methods(method: str) -> list[Any]:
    classes = StockTrainer.__mro__
    return [vars(cls)[method] for cls in classes if method in vars(cls)]


def layers(model: Any) -> list[Any]:
    """The model and all layers in it."""
    return list(model._flatten_layers())


@functools.cache
def own_attributes() -> frozenset[str]:
    """The private attributes that Keras itself keeps on a model: none of the user's business."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    names = {*vars(model), *vars(model.layers[0]), "_jax_state", "_eval_epoch_iterator"}
    return frozenset(name for name in names if name.startswith("_"))


def needs_batch(model: Any, *, for_prediction: bool = False) -> bool:
    """Whether a batch has to be looked at to build layers, and but for prediction metrics, losses."""
    if _built_without_call(model):
        return False
    compiled = [] if for_prediction else [model._compile_metrics, model._compile_loss]
    return not all(thing.built for thing in [*layers(model), *compiled] if thing is not None)


def needs_slots(model: Any) -> bool:
    """Whether the optimizer of a built model has no variables yet."""
    optimizer = getattr(model, "optimizer", None)
    return optimizer is not None and not optimizer.built and model.built


def has_unbuilt_metrics(model: Any) -> bool:
    """Whether metrics that `compile` was given are still to get their variables."""
    return model._compile_metrics is not None and not model._compile_metrics.built


def build(model: Any, batch: Any) -> None:
    """Build what is not built yet: layers, metrics, losses and the optimizer.

    Args:
        batch: what to build on; only used where `needs_batch`.
    """
    if needs_batch(model):
        _build_symbolically(model, batch)
    build_optimizer(model)


def build_optimizer(model: Any) -> None:
    """Give the optimizer of a built model its variables."""
    if needs_slots(model):
        model.optimizer.build(model.trainable_variables)
        model._post_build()


def _build_symbolically(model: Any, batch: Any) -> None:
    """Let Keras build the model on a batch; an error of the user's code comes as it was raised."""
    try:
        model._symbolic_build(data_batch=batch)
    except RuntimeError as error:
        if error.__context__ is None or not str(error).startswith("Unable to automatically build"):
            raise
        error.__context__.add_note("fitstep: this came when the model was built on a first batch.")
        raise error.__context__ from None
    except (TypeError, ValueError) as error:
        note_missing_targets(model, batch, error)
        raise


def note_missing_targets(model: Any, batch: Any, error: BaseException) -> None:
    """Say so where a loss failed for want of `y`."""
    _, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    if y is None and model._compile_loss is not None and "None" in str(error):
        error.add_note(
            "fitstep: the data has no `y`, which the loss given to `compile` needs. Give `y`, or "
            "`(x, y)` where data is given as one argument."
        )


def compilation(model: Any) -> tuple[Any, ...]:
    """What `compile` sets; others once it was called again."""
    return model.optimizer, model._compile_loss, model._compile_metrics


def build_for_prediction(model: Any, batch: Any) -> None:
    """Build the layers of a model that is only to predict."""
    if needs_batch(model, for_prediction=True):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with keras.StatelessScope():
            model(x)


def build_optimizer_without_call(model: Any) -> None:
    """After loading: give the optimizer of a model without `call` its slots, which Keras omits."""
    unbuilt_parts = [layer for layer in layers(model) if layer is not model and not layer.built]
    if getattr(model, "optimizer", None) is None or model.optimizer.built or unbuilt_parts:
        return
    if _built_without_call(model):
        model.optimizer.build(model.trainable_variables)


def _built_without_call(model: Any) -> bool:
    """Whether this is a model whose own steps make a `call` superfluous; its parts are built.

    Raises:
        StateError: names the parts that are not.
    """
    if type(model).call is not keras.Model.call or not (model.layers or model.variables):
        return False
    if unbuilt := [layer.name for layer in layers(model) if layer is not model and not layer.built]:
        raise StateError(
            f"`{type(model).__name__}` has no `call` from which it could be built, so its parts "
            f"must be built before. Not built: {', '.join(unbuilt)}. Call each on some data, or "
            f"its `build` with an input shape."
        )
    model.built = True
    return True


def check_model(model: Any, function: str) -> None:
    """Raise for what is no Keras model, or in a mode of Keras that is not supported."""
    if not isinstance(model, StockTrainer):
        raise TypeError(
            f"`fitstep.{function}` takes a `keras.Model` as its first argument. "
            f"Received: {model!r:.80} of type {type(model).__name__}."
        )
    refuse_nnx()


def check_compiled(model: Any, method: str) -> None:
    """Raise Keras's own error for a model that is not compiled."""
    model._assert_compile_called(method)


def is_compiled_by_xla(model: Any) -> bool:
    return bool(model.jit_compile) and not model.run_eagerly


def limited_epochs(epochs: int) -> int:
    """`epochs`, or the lower limit that Keras takes from its environment for debugging."""
    limit = max_epochs()
    if limit and limit < epochs:
        warn(f"Limiting epochs to {limit}")
        return limit
    return epochs


def first_epoch(model: Any, initial_epoch: int) -> int:
    """The epoch to start with, which a callback may have set at the beginning of training."""
    return model._initial_epoch or initial_epoch


def is_validation_epoch(model: Any, epoch: int, frequency: Any) -> bool:
    return model._should_eval(epoch, frequency)


def results_or_logs(model: Any, logs: dict[str, Any]) -> dict[str, Any]:
    """The results of the metrics if the logs have just their names, else the logs."""
    return dict(model._get_metrics_result_or_logs(logs))


def as_numbers(logs: dict[str, Any]) -> dict[str, Any]:
    """Logs as Python numbers, sorted and flattened as Keras gives them to callbacks."""
    return pythonify_logs(logs)


def as_list(model: Any, logs: dict[str, Any]) -> Any:
    """Logs in the order of the metrics, a single one bare."""
    return model._flatten_metrics_in_order(logs)


def forget_losses(model: Any) -> None:
    """Drop losses that a failed trace left behind; Keras clears them only when all goes well."""
    for layer in layers(model):
        if vars(layer).get("_losses_override"):
            layer._losses_override.clear()
        layer._clear_losses()


def finalize(model: Any) -> None:
    """Let the optimizer set the final values, such as averages, of what is trainable."""
    if not isinstance(model.optimizer, keras.optimizers.Optimizer):
        return
    # Keras pairs by position, with the variables that the optimizer was built with.
    own = getattr(model.optimizer, "_trainable_variables", model.trainable_weights)
    today = set(map(id, model.trainable_weights))
    frozen = [(variable, variable._value) for variable in own if id(variable) not in today]
    model.optimizer.finalize_variable_values(own)
    for variable, array in frozen:
        variable._value = array


def mark_nested(model: Any) -> Any:
    """Leave a mark that a nested `evaluate` or `fit` of Keras's own removes."""
    mark: dict[str, Any] = {}
    # Falsy, so that Keras's own synchronisation has nothing to do.
    vars(model)["_jax_state"] = mark
    return mark


def ran_nested(model: Any, mark: Any) -> bool:
    """Whether a loop of Keras's own ran since `mark_nested`."""
    return getattr(model, "_jax_state", None) is not mark


def unmark_nested(model: Any) -> None:
    vars(model)["_jax_state"] = None


def arrays_of_nested(model: Any) -> dict[int, Any]:
    """By id of a variable, the array that a failed nested loop of Keras's own kept for it.

    Keras empties the variables for such a loop, or gives their arrays up to it.
    """
    kept = getattr(model, "_jax_state", None) or {}
    return {
        id(variable): array
        for part, variables in parts(model)._asdict().items()
        for variable, array in zip(variables, kept.get(f"{part}_variables") or (), strict=False)
    }


@contextlib.contextmanager
def cached_validation(model: Any, iterator: Any) -> Iterator[dict[str, bool]]:
    """Offer an iterator to a nested `evaluate`; yields the argument with which Keras does it."""
    model._eval_epoch_iterator = iterator
    try:
        yield {"_use_cached_eval_dataset": True}
    finally:
        del model._eval_epoch_iterator


def has_engine(model: Any) -> bool:
    """Whether the model's own methods are fitstep's, whatever a subclass adds to them."""
    return any(cls.__module__ == "fitstep._model" for cls in type(model).__mro__)


def validation_batches(model: Any) -> Any:
    """The iterator that a surrounding `fit` offers."""
    return getattr(model, "_eval_epoch_iterator", None)


@contextlib.contextmanager
def watched_updates(model: Any, trainable: Sequence[Any], names: Sequence[str]) -> Iterator[dict]:
    """For one step: let the optimizer take today's trainable variables, and learn who is who.

    Keras's optimizers insist on the variables they were built with. Where some of them are
    frozen now, they get no gradient and keep their values and moments.

    Yields:
        id of an updated array -> name of the variable it was computed for.
    """
    made: dict[int, str] = {}
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, keras.optimizers.Optimizer) or not optimizer.built:
        yield made
        return
    kept_alive: list[Any] = []
    named = {id(v): name for v, name in zip(trainable, names, strict=True)}

    def remember(variables: Sequence[Any], arrays: Sequence[Any]) -> None:
        for variable, array in zip(variables, arrays, strict=True):
            if id(variable) in named:
                made[id(array)] = named[id(variable)]
                kept_alive.append(array)

    stateless_apply = optimizer.stateless_apply

    def apply_to_todays(
        optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> tuple[Any, Any]:
        own = list(optimizer._trainable_variables)
        if len(trainable_variables) != len(trainable) or list(map(id, own)) == list(
            map(id, trainable)
        ):
            updated, state = stateless_apply(optimizer_variables, grads, trainable_variables)
            if len(updated) == len(trainable):
                remember(trainable, updated)
            return updated, state
        today = {id(v): i for i, v in enumerate(trainable)}
        unknown = [named[id(v)] for v in trainable if id(v) not in set(map(id, own))]
        if unknown:
            raise OptimizerError(
                f"The optimizer has no slots for {', '.join(map(repr, unknown))}, which "
                f"became trainable after it was built. Call `compile` with a new optimizer."
            )
        places = [today.get(id(v)) for v in own]
        full_grads = [None if i is None else grads[i] for i in places]
        full = [
            v._value if i is None else trainable_variables[i]
            for v, i in zip(own, places, strict=True)
        ]
        with warnings.catch_warnings():
            # Keras warns of missing gradients; here they are meant to be missing.
            warnings.filterwarnings("ignore", message="Gradients do not exist")
            updated, state = stateless_apply(optimizer_variables, full_grads, full)
        by_id = {id(v): array for v, array in zip(own, updated, strict=True)}
        result = [by_id[id(v)] for v in trainable]
        remember(trainable, result)
        return result, state

    namespace: dict[str, Any] = optimizer.__dict__
    own = namespace.get("stateless_apply")
    namespace["stateless_apply"] = apply_to_todays
    try:
        yield made
    finally:
        del namespace["stateless_apply"]
        if own is not None:
            namespace["stateless_apply"] = own
