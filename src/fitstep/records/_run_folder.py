"""The run folder: claimed before training starts, filled once there is something to keep.

    runs/credit-20250131T120000Z/
      config.json        the experiment, its file's digest, every field of its Config
      environment.json   versions, platform, devices
      history.jsonl      one line per epoch: {"epoch": 1, "seconds": 0.8, "logs": {...}}
      model.keras        the trained model (a checkpoint of it while the run lasts)
      curves.png         loss and metrics by epoch
      summary.json       "status", epochs, seconds, last logs, test figures, the report

With several runs, the last four stand in a subfolder for each run, and a `summary.json` above them
tells how they went. A status is "running", "finished", "interrupted" (Ctrl-C, SIGTERM) or
"failed"; "running" in the folder of a process that is gone means that it was killed.

Until the first epoch of training is over, the folder is claimed but empty: a mistake in the model
or the data leaves nothing behind. From then on nothing is removed. Every file is replaced in one
move; only `history.jsonl` is appended to, so after a kill its last line may be torn.
Numbers that JSON lacks are the strings "NaN", "Infinity" and "-Infinity".
"""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from fitstep._errors import FitstepError
from fitstep.records import _curves
from fitstep.records._json import encoded, line, write_json, write_whole

CLAIM = ".fitstep-claimed"
CLAIM_BYTES = 1 << 16  # enough to fail on a disk, or a quota, that is full
SPARE_BYTES = 1 << 20  # beside the models: histories, curves, summaries


class RunFolderError(FitstepError, OSError):
    """The run folder cannot be made or has no room; found before training."""


@dataclass
class RunFolder:
    """A claimed folder; `keep` makes it last, `discard` takes it away if nothing was kept.

    Args:
        path: the folder.
        made: the folders that were made for it, outermost first.
        kept: whether it holds files by now.
    """

    path: Path
    made: tuple[Path, ...] = ()
    kept: bool = False

    def keep(self, config: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        """Write what the whole folder is about, once."""
        if not self.kept:
            write_json(self.path / "config.json", config)
            write_json(self.path / "environment.json", environment)
            self.kept = True
            (self.path / CLAIM).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the claim, and every folder that was made for it and is empty."""
        if self.kept:
            return
        (self.path / CLAIM).unlink(missing_ok=True)
        _remove_empty(self.made)

    def require_room(self, model_bytes: int) -> None:
        """Check that models of this size in all will fit.

        Raises:
            RunFolderError: if the disk has less room.
        """
        needed = model_bytes + SPARE_BYTES
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise RunFolderError(
                f"no room for the trained models in {shown(self.path)}: about {_megabytes(needed)} "
                f"needed, {_megabytes(free)} free. Make room, or give another folder with --out"
            )


def claim(out: str | Path | None, experiment: str, now: datetime) -> RunFolder:
    """Make the run folder, empty but for a claim, so that no two runs share one.

    Args:
        out: the folder asked for, or `None` for `runs/<experiment>-<UTC time>`, numbered where
            another run has that name already.
        experiment: the experiment's name.
        now: the time, in UTC.

    Raises:
        RunFolderError: if the folder is not empty, or cannot be made or written to.
    """
    wanted = Path("runs", f"{experiment}-{now:%Y%m%dT%H%M%SZ}") if out is None else Path(out)
    wanted = wanted.absolute()  # whatever folder the experiment changes to
    path, made = wanted, []
    try:
        for number in itertools.count(2):
            _make(path, made)
            if out is not None or path in made:
                break
            path = wanted.with_name(f"{wanted.name}-{number}")
        _refuse_content(path)
        _write_claim(path / CLAIM)
    except OSError as error:
        _remove_empty(made)
        if isinstance(error, RunFolderError):
            raise
        raise RunFolderError(
            f"cannot write to the run folder {shown(path)}: {error.strerror}. Give another with --out"
        ) from error
    return RunFolder(path, tuple(made))


def shown(path: Path) -> str:
    """A path as a user names it: from the present folder where it lies within."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _make(path: Path, made: list[Path]) -> None:
    """Make a folder and the parents it lacks, and add to `made` those that this call made."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        try:
            folder.mkdir()
            made.append(folder)
        except FileExistsError:  # another run was quicker
            pass


def _refuse_content(path: Path) -> None:
    found = sorted(entry.name for entry in path.iterdir())
    if found == [CLAIM]:
        raise RunFolderError(
            f"another run has claimed {shown(path)}, or was killed before its first epoch was over. "
            "Give another folder with --out, or remove this one"
        )
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise RunFolderError(
            f"the run folder must be new or empty. Received: --out={shown(path)}, which holds "
            f"{found[0]}{more}"
        )


def _write_claim(path: Path) -> None:
    # Exclusive, so that of two runs which find the same folder empty only one gets it.
    with path.open("xb") as file:
        try:
            file.write(bytes(CLAIM_BYTES))
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()
            raise


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except OSError:  # somebody else has put something there: it stays, and so do its parents
            return


def _try_room(path: Path, size: int) -> None:
    """Write as many bytes as are to be written, and take them away again."""
    try:
        with path.open("wb") as file:
            for written in range(0, size + SPARE_BYTES, SPARE_BYTES):
                file.write(bytes(min(SPARE_BYTES, size + SPARE_BYTES - written)))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


@dataclass
class RunFiles:
    """The files of one run: the run folder itself, or a subfolder of it.

    Nothing here raises for want of room once training has begun, because the training is worth
    more than its record: a line that could not be written is tried again with the next one, and
    `note` hears about it once.

    Args:
        path: the folder.
        note: called with a sentence for the user.
        unwritten: lines of the history that wait for room.
        noted: the files that `note` has heard about.
        missing: the files whose last writing failed.
    """

    path: Path
    note: Callable[[str], None]
    unwritten: list[str] = field(default_factory=list)
    noted: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)

    def append_epoch(self, entry: Mapping[str, Any]) -> None:
        """Add one line to `history.jsonl`; it is on the disk's way when this returns."""
        self.unwritten.append(line(entry))
        with self._unless_it_fails("history.jsonl"):
            self.path.mkdir(exist_ok=True)
            with (self.path / "history.jsonl").open("ab") as file:
                file.write(b"".join(map(encoded, self.unwritten)))
            self.unwritten.clear()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace `summary.json`."""
        with self._unless_it_fails("summary.json"):
            self.path.mkdir(exist_ok=True)
            write_json(self.path / "summary.json", summary)

    def save_model(self, model: Any) -> None:
        """Replace `model.keras`; a model that Keras cannot save keeps at least its weights."""
        try:
            write_whole(self.path / "model.keras", model.save)
        # Keras raises nearly anything for a model that it cannot save.
        except Exception as error:  # noqa: BLE001
            self._save_weights(model, _one_line(str(error).partition("Example:")[0]))
        else:
            self.missing.discard("model.weights.h5")

    def _save_weights(self, model: Any, reason: str) -> None:
        with self._unless_it_fails("model.weights.h5"):
            # HDF5 can end the whole process where a disk is full, so the room is tried first.
            _try_room(self.path / ".room", sum(v.value.nbytes for v in model.variables))
            write_whole(self.path / "model.weights.h5", model.save_weights)
            whole = self.path / "model.keras"
            self._note_once(
                whole.name, f"{shown(whole)} is not written, model.weights.h5 is: {reason}"
            )

    def draw_curves(self, history: Mapping[str, Sequence[Any]], title: str) -> None:
        """Replace `curves.png`."""
        with self._unless_it_fails("curves.png"):
            write_whole(
                self.path / "curves.png", lambda target: _curves.draw(history, title, target)
            )

    @contextmanager
    def _unless_it_fails(self, name: str) -> Iterator[None]:
        """Turn an error into a note: training goes on, and so does whatever stopped it."""
        try:
            yield
            self.missing.discard(name)
        except ModuleNotFoundError as error:
            self._note_once(name, f"{name} is skipped: {error.name} is not installed")
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends no training
            self.missing.add(name)
            self._note_once(
                name, f"{shown(self.path / name)} is not written: {_one_line(str(error))}"
            )

    def _note_once(self, name: str, text: str) -> None:
        if name not in self.noted:
            self.noted.add(name)
            self.note(text)
