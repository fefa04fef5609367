"""Keras's functional models, and the names under which classes are saved."""

from typing import Any

import keras
from keras.src.models.functional import Functional
from keras.src.models.model import functional_init_arguments
from keras.src.utils.naming import auto_name

__all__ = ["Functional", "is_functional", "make_functional", "named", "registered"]


def registered(cls: type) -> type:
    """Register a class for saving under the package's name and its own."""
    return keras.saving.register_keras_serializable(package="fitstep", name=cls.__name__)(cls)


def is_functional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of a constructor are those of a functional model."""
    return functional_init_arguments(args, kwargs)


def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments with the name that Keras's own functional model would get."""
    if len(args) > 2 or kwargs.get("name") is not None:
        return kwargs
    return {**kwargs, "name": auto_name("functional")}


def make_functional(cls: type, plain: type, functional: type) -> None:
    """Exchange `plain` for `functional` among the bases of a user's class, and their bases."""
    if cls is plain or not issubclass(cls, plain) or issubclass(cls, functional):
        return
    for base in cls.__bases__:
        if base is not plain:
            make_functional(base, plain, functional)
    cls.__bases__ = tuple(functional if base is plain else base for base in cls.__bases__)
