"""Where arrays lie: on the devices of Keras's distribution, or on those that a model was built on.

Every array of one program must lie on the same devices, in the same order.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_EVERYWHERE = PartitionSpec()


class Devices(NamedTuple):
    """The devices of one run.

    Attributes:
        mesh: None for a model on one device.
        distribution: Keras's, which divides rows among the devices; None gives each all rows.
    """

    mesh: Mesh | None = None
    distribution: Any = None

    def everywhere(self) -> NamedSharding | None:
        """How an array lies that each device has whole; None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, _EVERYWHERE)

    def sharding(self, shape: tuple[int, ...], *, stacked: bool = False) -> NamedSharding | None:
        """How an array of a batch lies, or a stack of such arrays; None without a mesh.

        Args:
            shape: of one array, not of the stack.
        """
        if self.distribution is None:
            return self.everywhere()
        return _of_rows(self.distribution, shape, stacked)

    def joined(self, array: Any) -> Any:
        """An array of a variable on these devices, whole on each if it is on others."""
        if not _has_devices(array):
            return array
        if self.mesh is None:
            return jnp.asarray(np.asarray(array)) if is_on_mesh(array) else array
        if is_on_mesh(array) and _in_order(array.sharding.mesh) == _in_order(self.mesh):
            return array
        return jax.device_put(array, self.everywhere())

    def placed(self, leaves: Sequence[Any], *, stacked: bool = False) -> Sequence[Any]:
        """The arrays of a batch, or of a stack of batches, where the devices want them."""
        shapes = [leaf.shape[1:] if stacked else leaf.shape for leaf in leaves]
        shardings = [self.sharding(shape, stacked=stacked) for shape in shapes]
        return jax.device_put(list(leaves), shardings)

    def refusal(self, name: str, array: Any, *, more: int, is_weight: bool) -> str:
        """Say that a variable lies elsewhere.

        Args:
            more: how many others do.
            is_weight: whether it belongs to the model itself, not to its optimizer or metrics.
        """
        assert self.mesh is not None
        remedy = "call `compile` again, with a new optimizer and new metrics"
        if is_weight:
            remedy = (
                "make the model anew under it: `new = keras.models.clone_model(model)`, "
                "`new.set_weights(model.get_weights())`, `new.compile(...)`"
            )
        return (
            f"`{name}` lies on {_in_words(array)}{f' ({more} more do, too)' if more else ''}. "
            f"Expected: {_in_words(self.mesh)}, the devices of Keras's "
            f"{type(self.distribution).__name__}, in this order. The variable was made before this "
            f"distribution was set, or under another one. Call "
            f"`keras.distribution.set_distribution(...)` before you build, load or compile the "
            f"model, or {remedy}."
        )

    def key(self) -> Any:
        """What programs depend on, by value: equal distributions share their programs."""
        one = self.distribution
        if type(one) not in (keras.distribution.DataParallel, keras.distribution.ModelParallel):
            return self.mesh, one
        layouts = getattr(one, "_layout_map", {}).items()
        return self.mesh, one.batch_dim_name, tuple((path, lay.axes) for path, lay in layouts)


def placed(leaves: Sequence[Any], *, stacked: bool = False) -> Sequence[Any]:
    """The arrays of a batch, or of a stack of batches, where Keras's distribution wants them.

    Rows are divided among its devices; a batch that they do not divide is given to each whole.
    """
    distribution = keras.distribution.distribution()
    if distribution is not None:
        return _devices(distribution).placed(leaves, stacked=stacked)
    if jax.default_backend() == "cpu":
        return leaves
    return jax.device_put(list(leaves))


def found(arrays: Sequence[Any]) -> tuple[Devices, list[int]]:
    """The devices for a model that holds these arrays, and the places of those that lie elsewhere.

    They are the distribution's; without one, those that the model was built on.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return built_on(arrays), []
    devices = _devices(distribution)
    assert devices.mesh is not None
    wanted = _in_order(devices.mesh)
    return devices, [i for i, array in enumerate(arrays) if not _is_on(array, devices.mesh, wanted)]


def built_on(arrays: Sequence[Any]) -> Devices:
    """The devices that a model was built on, which have all rows each."""
    return Devices(next((array.sharding.mesh for array in arrays if is_on_mesh(array)), None))


def is_on_mesh(array: Any) -> bool:
    """Whether an array lies on a mesh of devices, be it of a single one."""
    return isinstance(getattr(array, "sharding", None), NamedSharding)


def is_set() -> bool:
    """Whether Keras has a distribution."""
    return keras.distribution.distribution() is not None


def like(array: Any, other: Any) -> Any:
    """The array on the devices of another one, and divided among them as that is."""
    own = getattr(array, "sharding", None)
    if own is not None and own.is_equivalent_to(other.sharding, other.ndim):
        return array
    if other.committed:
        return jax.device_put(array, other.sharding)
    # By way of the host: it would else be bound to one device, as `other` is not.
    return jnp.asarray(np.asarray(array))


def shardings(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """How arrays lie, to be compared by value."""
    return tuple(
        (array.sharding.mesh, _trimmed(array.sharding.spec)) if is_on_mesh(array) else None
        for array in arrays
    )


def _in_order(mesh: Mesh) -> tuple[Any, ...]:
    return tuple(mesh.devices.flat)


def _in_words(thing: Any) -> str:
    """The devices of a mesh or of an array; those of a mesh in its order."""
    mesh = thing.sharding.mesh if is_on_mesh(thing) else thing
    order = (
        _in_order(mesh) if isinstance(mesh, Mesh) else sorted(mesh.devices(), key=lambda d: d.id)
    )
    return ", ".join(f"{device.platform}:{device.id}" for device in order)


def _devices(distribution: Any) -> Devices:
    return Devices(distribution.device_mesh.backend_mesh, distribution)


@functools.lru_cache(maxsize=128)
def _of_rows(distribution: Any, shape: tuple[int, ...], stacked: bool) -> NamedSharding:
    layout = distribution.get_data_layout(shape or (1,)).backend_layout
    spec = layout.spec if shape else _EVERYWHERE
    try:
        layout.shard_shape(shape or (1,))
    except ValueError:  # the devices do not divide the rows
        spec = _EVERYWHERE
    return NamedSharding(layout.mesh, PartitionSpec(None, *spec) if stacked else spec)


def _has_devices(array: Any) -> bool:
    """Whether this is a whole array; what is none is refused, by its name, when it is read."""
    return isinstance(array, jax.Array) and not (isinstance(array, Tracer) or array.is_deleted())


def _is_on(array: Any, mesh: Mesh, wanted: tuple[Any, ...]) -> bool:
    if not _has_devices(array):
        return True
    if is_on_mesh(array):
        own = array.sharding.mesh
        return own is mesh or _in_order(own) == wanted
    return array.devices() == set(wanted)


def _trimmed(spec: PartitionSpec) -> tuple[Any, ...]:
    axes = list(spec)
    while axes and axes[-1] is None:
        axes.pop()
    return tuple(axes)
