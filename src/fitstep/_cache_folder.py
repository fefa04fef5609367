"""The folder of compiled programs: safe, because they are executed, and kept whole and small."""

import importlib
import os
import re
import shutil
import stat
import sys
import tempfile
import time
import zlib
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

LIMIT = 2**30  # bytes
MOST = 10_000  # entries
ROOM = 2**26  # bytes that must be free on the disk
KEPT = 7 * 24 * 3600  # seconds for which another environment's folder stays after its last use

_MARKER = ".checked"  # entries that are older than this file are known to be whole
_SLACK = 2  # seconds: how coarse and uneven the clocks of file systems are
_ENTRY, _USED = "-cache", "-atime"  # how JAX's files end: an entry, and when it was last used
_ZSTD = b"\x28\xb5\x2f\xfd"
_NO_CACHE = "FITSTEP_CACHE=0"


class UnusableError(Exception):
    """Our folder cannot or must not be used; `remedy` is the line that mends it."""

    def __init__(self, why: str, remedy: str):
        super().__init__(why)
        self.remedy = remedy


# --- a safe place -------------------------------------------------------------------------------


def root(system: str = sys.platform) -> Path:
    """The folder above all that fitstep keeps compiled, where this user's caches are.

    Raises:
        UnusableError: if the user has no such place.
    """
    if system == "win32":
        candidates = [os.environ.get("LOCALAPPDATA", "")]
    elif system == "darwin":
        candidates = ["~/Library/Caches"]
    else:
        candidates = [os.environ.get("XDG_CACHE_HOME", ""), "~/.cache"]
    for candidate in candidates:
        path = Path(os.path.expanduser(candidate))  # noqa: PTH111 - Path's raises without a home
        if candidate and path.is_absolute():
            return path / "fitstep"
    raise UnusableError("this user has no home folder", f"set {_NO_CACHE}")


def usable(folder: Path) -> Path:
    """Create our folder, or check the one that is there.

    Raises:
        UnusableError: if it must not be used.
        OSError: if it cannot be.
    """
    check(folder)
    folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
        _check_own(path)  # whoever was quicker
        if os.name == "posix":
            path.chmod(0o700)
    return folder


def check(folder: Path) -> None:
    """Refuse a folder that somebody else could fill: its files are programs that are executed."""
    try:
        os.fspath(folder).encode()
    except UnicodeEncodeError:  # XLA takes no other names
        raise UnusableError(f"{os.fspath(folder)!a} is not UTF-8", _elsewhere()) from None
    caches = folder.parent.parent
    try:
        _check_own(folder.parent)
        _check_own(folder)
        nearest = next((path for path in (caches, *caches.parents) if path.exists()), None)
        if nearest is None:  # a drive that is not there
            raise UnusableError(f"{caches} is not there", _elsewhere())
        about = nearest.stat()
        lowest = next(path for path in (folder, folder.parent, nearest) if path.exists())
        free = shutil.disk_usage(lowest).free
    except OSError as error:
        raise UnusableError(f"{folder}: {error.strerror}", _elsewhere()) from error
    if os.name == "posix" and not about.st_mode & stat.S_ISVTX:
        if about.st_uid != os.geteuid():
            raise UnusableError(f"{nearest} belongs to another user", _elsewhere())
        if about.st_mode & stat.S_IWOTH:
            raise UnusableError(f"every user may write into {nearest}", f"chmod o-w {nearest}")
    if not (lowest.is_dir() and os.access(lowest, os.W_OK | os.X_OK)):
        raise UnusableError(f"{lowest} is not a folder that can be written to", _elsewhere())
    if free < ROOM:
        raise UnusableError(f"the disk of {lowest} is full", _elsewhere())


def _check_own(path: Path) -> None:
    """Refuse what stands at a path, if it is not a folder that is ours alone."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(about.st_mode) or getattr(about, "st_reparse_tag", 0):
        raise UnusableError(f"{path} is a link or a file", f"rm {path}")
    if os.name != "posix":
        return
    if about.st_uid != os.geteuid():
        raise UnusableError(f"{path} belongs to another user", _elsewhere())
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnusableError(f"other users may write into {path}", f"rm -r {path}")


def _elsewhere() -> str:
    name = {"win32": "LOCALAPPDATA", "darwin": ""}.get(sys.platform, "XDG_CACHE_HOME")
    return f"set {name} to a folder of yours, or {_NO_CACHE}" if name else f"set {_NO_CACHE}"


# --- whole and small ----------------------------------------------------------------------------


class Entry(NamedTuple):
    """One compiled program: its file, its bytes, and when it was written and last used."""

    path: Path
    size: int
    changed: float
    used: float


def tidy(folder: Path, limit: int = LIMIT, most: int = MOST) -> None:
    """Delete entries that were cut short, the oldest ones beyond the limit, and old versions.

    Args:
        folder: where they are. Other processes may be writing and deleting there.
        limit: bytes.
        most: entries, each of which costs every process some 30 us to look at.

    Raises:
        OSError: if the folder cannot be written to.
    """
    since = _changed(folder / _MARKER) - _SLACK
    # Its time is the beginning of this check, by the clock of the file system.
    handle, name = tempfile.mkstemp(prefix=f"{_MARKER}-", dir=folder)
    marker = Path(name)
    try:
        with open(handle, "wb") as file:  # noqa: PTH123 - it is open already
            file.write(b"Entries that are older than this file were found to be whole.\n")
        found = list(entries(folder))
        torn = remove_torn(entry for entry in found if entry.changed >= since)
        left = [entry for entry in found if entry.path.name not in torn]
        size, count = sum(entry.size for entry in left), len(left)
        for entry in sorted(left, key=lambda entry: entry.used):
            if size <= limit and count <= most:
                break
            size, count = size - entry.size, count - 1
            _remove(entry.path)
        _remove_leftovers(folder)
        marker.replace(folder / _MARKER)
    finally:
        _remove(marker)


def entries(folder: Path, known: Collection[str] = ()) -> Iterable[Entry]:
    """The entries in a folder, but for those that are known."""
    with os.scandir(folder) as files:
        there = {file.name: file for file in files}
    for name, file in there.items():
        if not name.endswith(_ENTRY) or name in known:
            continue
        with suppress(FileNotFoundError):  # deleted by another process
            about = file.stat(follow_symlinks=False)
            if stat.S_ISREG(about.st_mode):
                used = max(about.st_atime, about.st_mtime)
                if (used_name := name.removesuffix(_ENTRY) + _USED) in there:
                    used = max(used, _changed(folder / used_name))
                yield Entry(Path(file.path), about.st_size, about.st_mtime, used)


def remove_torn(entries: Iterable[Entry]) -> set[str]:
    """Delete those that are not whole; returns their names."""
    torn = set()
    for entry in entries:
        with suppress(FileNotFoundError):
            if _is_torn(entry.path.read_bytes()):
                _remove(entry.path)
                torn.add(entry.path.name)
    return torn


def _is_torn(data: bytes) -> bool:
    """Whether the bytes are a part of a compressed entry; what is neither is left alone."""
    if len(data) <= 4 or not any(data[:4]):  # 4 bytes: the time that it took to compile
        return True
    if data.startswith(_ZSTD):
        codec = _zstd()
        return codec is not None and not _opens(codec, data)
    if data[0] & 15 == 8 and int.from_bytes(data[:2], "big") % 31 == 0:  # RFC 1950
        return not _inflates(data)
    return False


def _inflates(data: bytes) -> bool:
    inflater = zlib.decompressobj()
    try:
        while not inflater.eof:
            made = inflater.decompress(data, 2**20)
            data = inflater.unconsumed_tail
            if not (made or data):
                break
    except zlib.error:
        return False
    return inflater.eof


def _opens(codec: Any, data: bytes) -> bool:
    stream = codec.ZstdDecompressor()
    if codec.__name__ == "zstandard":
        stream = stream.decompressobj()
    try:
        stream.decompress(data)
    except codec.ZstdError:
        return False
    return stream.eof


def _zstd() -> Any:
    """The module that JAX takes for it, or `None`: then JAX reads no such entry either."""
    for name in ("compression.zstd", "zstandard"):
        with suppress(ImportError):
            return importlib.import_module(name)
    return None


def _remove_leftovers(folder: Path) -> None:
    """Delete folders of other versions that no environment has in use, and markers half made."""
    for path in folder.glob(f"{_MARKER}-*"):
        if time.time() - _changed(path) > KEPT:
            _remove(path)
    version = folder.name.rpartition("-")[0]
    for other in _version_folders(folder.parent):
        in_use = time.time() - _changed(other / _MARKER) < KEPT
        if other.name.rpartition("-")[0] != version and not in_use:
            shutil.rmtree(other, ignore_errors=True)


def _version_folders(root: Path) -> list[Path]:
    with os.scandir(root) as files:
        return [
            Path(file.path)
            for file in files
            if re.fullmatch(r"jax-.+-\w+", file.name) and file.is_dir(follow_symlinks=False)
        ]


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return float("-inf")


def _remove(path: Path) -> None:
    with suppress(OSError):  # gone already, or, on Windows, being read
        path.unlink()


# --- for `fitstep doctor` -----------------------------------------------------------------------


class Contents(NamedTuple):
    """What a folder holds: how many entries, and the bytes of all its files."""

    entries: int
    bytes: int


def contents(folder: Path) -> Contents:
    """What is in a folder and below it; links are not followed."""
    count = size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += (Path(parent) / name).lstat().st_size
                count += name.endswith(_ENTRY)
    return Contents(count, size)


def clear() -> Contents:
    """Empty fitstep's own folders, of every version; returns what was deleted.

    Raises:
        UnusableError: if a folder is not ours alone.
        OSError: if something could not be deleted.
    """
    above = root()
    _check_own(above)
    if not above.exists():
        return Contents(0, 0)
    folders = _version_folders(above)
    for folder in folders:
        _check_own(folder)
    before = contents(above)
    for folder in folders:  # which stay: a process that is running writes into its own
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    after = contents(above)
    return Contents(before.entries - after.entries, before.bytes - after.bytes)
