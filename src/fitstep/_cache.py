"""JAX's persistent compilation cache: what was compiled once is not compiled again by the next process.

JAX has the cache, but leaves it off, lets it grow, and never mends an entry that was cut short when
a process was killed: it warns in every later run. fitstep turns it on where the user has not said
anything else, in a folder of its own, and keeps that folder safe, whole and small.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fitstep._cache_folder import UnusableError, check, entries, remove_torn, root, tidy, usable

VARIABLE = "FITSTEP_CACHE"

_DIRECTORY, _SECONDS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
_SECONDS_BY_DEFAULT = 1.0  # with which nothing small is kept


class Status(NamedTuple):
    """Whether compiled programs are kept, and where.

    Attributes:
        on: whether they are.
        folder: where they are, or would be; `None` where there is no place.
        why: the reason, where it is not fitstep's own cache that is on.
        remedy: the line that mends it, where something is wrong.
    """

    on: bool
    folder: str | None
    why: str = ""
    remedy: str = ""


class _Session:
    """What this process has done: JAX's cache is one for the whole process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tried = False
        self.folder: Path | None = None
        self._seen: set[str] = set()
        self._settings: dict[str, Any] = {}

    def start(self, folder: Path) -> None:
        """Clean the folder, and have JAX use it."""
        import jax

        tidy(folder)
        self._seen = {entry.path.name for entry in entries(folder)}
        self._settings = {_DIRECTORY: str(folder)}
        by_default = getattr(jax.config, _SECONDS, None) == _SECONDS_BY_DEFAULT
        if by_default and _SECONDS.upper() not in os.environ:
            self._settings[_SECONDS] = 0.0
        # The least size of an entry needs no change: by default there is none.
        for name, value in self._settings.items():
            jax.config.update(name, value)
        _reset()  # a folder that was set, used and taken away again would stay
        self.folder = folder

    def look_again(self) -> None:
        """Delete what was cut short since; give way where the user has set a folder by now."""
        import jax

        assert self.folder is not None
        if getattr(jax.config, _DIRECTORY, None) != self._settings[_DIRECTORY]:
            self._stop()
            return
        try:
            usable(self.folder)  # it may have been removed, and the disk be full by now
            new = list(entries(self.folder, known=self._seen))
            self._seen |= {entry.path.name for entry in new} - remove_torn(new)
        except (UnusableError, OSError):
            jax.config.update(_DIRECTORY, None)
            self._stop()

    def _stop(self) -> None:
        import jax

        if _SECONDS in self._settings and getattr(jax.config, _SECONDS) == 0:
            jax.config.update(_SECONDS, _SECONDS_BY_DEFAULT)
        _reset()
        self.folder = None


_session = _Session()


def ensure() -> None:
    """Turn the cache on at the first compile, and look after the folder at each later one.

    Never fails, and never goes against the user: where they chose a folder or turned the cache
    off, or where our folder cannot be used, nothing happens.
    """
    with _session.lock:
        if _session.folder is not None:
            _session.look_again()
        elif not _session.tried and users_choice() is None:
            _session.tried = True
            with suppress(UnusableError, OSError):
                _session.start(usable(own_folder()))


def status() -> Status:
    """What `ensure` does in this process. Changes nothing, but starts JAX's devices."""
    if (chosen := users_choice()) is not None:
        return chosen
    folder = None
    try:
        folder = own_folder()
        check(folder)
    except UnusableError as error:
        return Status(False, folder and str(folder), str(error), error.remedy)
    return Status(True, str(folder))


def users_choice() -> Status | None:
    """What the user has set, or `None` where fitstep is free to choose."""
    import jax

    if (switch := os.environ.get(VARIABLE, "").strip()).lower() in ("0", "false", "no", "off"):
        return Status(False, None, f"{VARIABLE}={switch}")
    if not getattr(jax.config, "jax_enable_compilation_cache", True):
        return Status(False, None, "jax_enable_compilation_cache is off")
    if not hasattr(jax.config, _DIRECTORY):
        return Status(False, None, f"this JAX has no {_DIRECTORY}")
    directory = getattr(jax.config, _DIRECTORY)
    if directory is not None and directory != str(_session.folder):
        why = f"your own folder, from {_DIRECTORY}" if directory else f"{_DIRECTORY} is empty"
        return Status(bool(directory), directory or None, why)
    # With a limit JAX needs the package `filelock`, and fails on entries that it wrote without one.
    if getattr(jax.config, "jax_compilation_cache_max_size", -1) != -1:
        return Status(False, None, f"jax_compilation_cache_max_size is set, {_DIRECTORY} is not")
    return None


def _reset() -> None:
    """Have JAX read its settings anew: it opens a folder once, and then keeps to it."""
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


def own_folder() -> Path:
    """The folder for this version of JAX and the devices it runs on.

    Raises:
        UnusableError: if the user has no place for it.
    """
    import jax

    return root() / f"jax-{jax.__version__}-{jax.default_backend()}"
