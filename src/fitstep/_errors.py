"""One exception class per kind of fix; all of them are `FitstepError`.

An exception that the user's own code raises is never wrapped: it passes through with its own
traceback.
"""


class FitstepError(Exception):
    """Base class of everything that fitstep itself raises."""


class BackendError(FitstepError, RuntimeError):
    """Another Keras backend than JAX is live or asked for."""


class StateError(FitstepError, ValueError):
    """A state that a step returned, or that is to be restored, does not fit the model."""


class DataError(FitstepError, ValueError):
    """The data cannot feed a step: empty, of unequal lengths, or not numbers."""


class OptimizerError(FitstepError, ValueError):
    """The optimizer does not fit the variables it is asked to update."""


class AlgorithmError(FitstepError, ValueError):
    """A training algorithm does not fit the model or the step it is applied to."""


class CheckpointError(FitstepError, OSError):
    """A checkpoint cannot be written, read or trusted."""


class NonFiniteError(FitstepError, ArithmeticError):
    """A loss, a gradient or a variable is not finite."""


# Tracebacks name a class as users import it.
for _class in [FitstepError, *FitstepError.__subclasses__()]:
    _class.__module__ = "fitstep"
