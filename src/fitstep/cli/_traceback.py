"""A user's exception, told as their own program would tell it."""

import sysconfig
import traceback
from pathlib import Path

import fitstep
from fitstep._errors import FitstepError

PACKAGE = Path(fitstep.__file__).parent
LIBRARIES = [Path(path) for path in {*sysconfig.get_paths().values()} if path]


def own_traceback(error: BaseException, experiment: Path | None) -> str:
    """The exception as Python prints it, from the first frame in the user's code on.

    The frames before it, fitstep's command line and engine, Keras and JAX, are how the call got
    there and none of the user's business. Where no frame is the user's, only fitstep's own at the
    top go; of a `FitstepError` or a `SyntaxError`, whose message says where, the message is left.
    """
    told = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = told
    while part is not None:
        part.stack = _from_own_frame(part.stack, experiment)
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    speaks = isinstance(error, FitstepError | SyntaxError)
    if speaks and not any(_is_own(Path(frame.filename), experiment) for frame in told.stack):
        return "".join(told.format_exception_only())
    return "".join(told.format())


def _from_own_frame(
    stack: traceback.StackSummary, experiment: Path | None
) -> traceback.StackSummary:
    frames = list(stack)
    for number, frame in enumerate(frames):
        if _is_own(Path(frame.filename), experiment):
            return traceback.StackSummary.from_list(frames[number:])
    while len(frames) > 1 and PACKAGE in Path(frames[0].filename).parents:
        frames.pop(0)
    return traceback.StackSummary.from_list(frames)


def _is_own(file: Path, experiment: Path | None) -> bool:
    """Whether a file is the experiment, or one beside it that is in no library."""
    if experiment is None:
        return False
    if file == experiment:
        return True
    if PACKAGE in file.parents or "site-packages" in file.parts:
        return False
    return experiment.parent in file.parents and not any(
        library in file.parents for library in LIBRARIES if library != experiment.parent
    )
