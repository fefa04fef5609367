"""The compilation cache: on by itself, in a safe folder that stays whole and small, never in the way."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import keras
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import fitstep as fs
from fitstep import _cache, _cache_folder

LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes}, {bytes}))
"""
PROGRAM = """
import json, os, sys
{before}
import fitstep as fs
import jax
after_import = jax.config.jax_compilation_cache_dir
events = dict(hits=0, misses=0)
def count(event, **_):
    for name in events:
        events[name] += event == "/jax/compilation_cache/cache_" + name
jax.monitoring.register_event_listener(count)
import keras, numpy as np
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = fs.fit(model, x, x.sum(axis=1), epochs=2, verbose=0)
print(json.dumps(dict(
    events, after_import=after_import, directory=jax.config.jax_compilation_cache_dir,
    loss=history.history["loss"], weights=[w.tobytes().hex() for w in model.get_weights()])))
"""


def started(caches: Path, before: str = "", **environment: str) -> subprocess.Popen:
    env = {name: value for name, value in os.environ.items() if name != "FITSTEP_CACHE"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    env |= {"XDG_CACHE_HOME": str(caches), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ended(process: subprocess.Popen) -> dict:
    """What the process said; its model trained, whatever became of the cache."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    said = json.loads(out)
    said["warned"] = "persistent compilation cache" in err
    return said


def ran(caches: Path, before: str = "", **environment: str) -> dict:
    return ended(started(caches, before, **environment))


def folder_in(caches: Path) -> Path:
    return caches / "fitstep" / f"jax-{jax.__version__}-cpu"


def entries(caches: Path) -> dict[str, int]:
    """The files of JAX's in our folder, with their sizes."""
    return {path.name: path.stat().st_size for path in folder_in(caches).glob("*-cache")}


# --- in processes of their own ------------------------------------------------------------------


def test_it_is_on_at_the_first_compile_and_spares_the_next_process_all_of_ours(tmp_path):
    """Nothing at import; a folder of mode 0700 by the end; then no miss, the same bits, no new file."""
    cold = ran(tmp_path)
    assert cold["after_import"] is None
    assert cold["directory"] == str(folder_in(tmp_path))
    assert cold["misses"] == len(entries(tmp_path)) > 0
    for path in (folder_in(tmp_path), folder_in(tmp_path).parent):
        assert path.stat().st_mode & 0o7777 == 0o700
    before = entries(tmp_path)
    warm = ran(tmp_path)
    assert warm["misses"] == 0
    assert warm["hits"] == cold["misses"]
    assert (warm["loss"], warm["weights"]) == (cold["loss"], cold["weights"])
    assert entries(tmp_path) == before
    assert not (cold["warned"] or warm["warned"])


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"JAX_COMPILATION_CACHE_DIR": "{theirs}"}, "{theirs}"),
        ({"JAX_ENABLE_COMPILATION_CACHE": "0"}, None),
        ({"FITSTEP_CACHE": "0"}, None),
        ({"JAX_COMPILATION_CACHE_MAX_SIZE": "1000"}, None),
    ],
)
def test_the_users_environment_wins(tmp_path, environment, directory):
    """A folder of theirs, or none: fitstep sets nothing and creates nothing."""
    caches, theirs = tmp_path / "caches", str(tmp_path / "theirs")
    caches.mkdir()
    filled = {name: value.format(theirs=theirs) for name, value in environment.items()}
    said = ran(caches, **filled)
    assert said["directory"] == (directory and directory.format(theirs=theirs))
    assert not (caches / "fitstep").exists()


def test_entries_cut_short_are_made_again_without_a_warning(tmp_path):
    """JAX's own writing is cut at 4 kB, as by a full disk or a kill; the next run mends it."""
    ran(tmp_path)
    large = {name for name, size in entries(tmp_path).items() if size > 4096}
    shutil.rmtree(folder_in(tmp_path).parent)
    cut = ran(tmp_path, LIMITED.format(bytes=4096))
    torn = {name for name, size in entries(tmp_path).items() if name in large and size <= 4096}
    assert cut["warned"]
    assert torn  # otherwise this shows nothing
    mended = ran(tmp_path)
    assert not mended["warned"]
    assert mended["misses"] >= len(torn)
    assert {name for name, size in entries(tmp_path).items() if size > 4096} == large
    warm = ran(tmp_path)
    assert (warm["misses"], warm["warned"]) == (0, False)
    assert mended["weights"] == warm["weights"] == cut["weights"]


def test_two_processes_at_once(tmp_path):
    """Both train, with the same bits, and leave a cache in which a third finds everything."""
    first, second = started(tmp_path), started(tmp_path)
    first, second = ended(first), ended(second)
    assert first["weights"] == second["weights"]
    third = ran(tmp_path)
    assert (third["misses"], third["warned"]) == (0, False)


def test_a_disk_that_takes_nothing_is_not_noticed(tmp_path):
    """Where not one byte can be written, a fit goes on without the cache and without a warning."""
    said = ran(tmp_path, LIMITED.format(bytes=0))
    assert (said["directory"], said["warned"]) == (None, False)


# --- in this process ----------------------------------------------------------------------------


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """A process that has not compiled yet, and a user with an empty folder for caches."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setattr(_cache, "_session", _cache._Session())
    monkeypatch.delenv("FITSTEP_CACHE", raising=False)
    path = tmp_path / "caches"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    yield path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def fit_something() -> float:
    """A fit that compiles; returns its loss."""
    x = np.ones((4, 2), "float32")
    model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    return fs.fit(model, x, x.sum(axis=1), verbose=0).history["loss"][0]


def set_in_config(path):
    jax.config.update("jax_compilation_cache_dir", path)


@pytest.mark.parametrize("choose", [set_in_config, compilation_cache.set_cache_dir])
def test_a_folder_set_in_the_program_wins_also_when_it_is_set_late(caches, tmp_path, choose):
    """Set before, ours is never made; set after a fit, the next one goes to the user's folder."""
    theirs = tmp_path / "theirs"
    choose(str(theirs))
    fit_something()
    assert jax.config.jax_compilation_cache_dir == str(theirs)
    assert not (caches / "fitstep").exists()
    choose(None)
    fit_something()
    assert entries(caches)
    choose(str(theirs))
    before = entries(caches)
    fit_something()
    assert jax.config.jax_compilation_cache_dir == str(theirs)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1.0
    assert entries(caches) == before


def test_turning_the_cache_off_in_the_program_wins(caches):
    """`jax_enable_compilation_cache=False` leaves no folder and no setting."""
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        fit_something()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not (caches / "fitstep").exists()
    assert jax.config.jax_compilation_cache_dir is None


def test_the_users_least_time_stays(caches):
    """Who set how long a compile must take to be kept keeps that; only JAX's default is changed."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 100.0)
    fit_something()
    assert jax.config.jax_compilation_cache_dir == str(folder_in(caches))
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 100.0
    assert entries(caches) == {}


def foreign(path: Path, monkeypatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


def elsewhere(path: Path, monkeypatch) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


def a_file(path: Path, monkeypatch) -> None:
    path.rmdir()
    path.touch()


def for_all(path: Path, monkeypatch) -> None:
    path.chmod(0o777)


def for_the_group(path: Path, monkeypatch) -> None:
    path.chmod(0o770)


@pytest.mark.parametrize("level", ["fitstep", "version"])
@pytest.mark.parametrize("spoil", [foreign, elsewhere, a_file, for_all, for_the_group])
def test_a_folder_that_others_could_fill_is_not_used(caches, monkeypatch, spoil, level):
    """Entries are programs: not from a folder of somebody else, behind a link, or open to others."""
    folder = folder_in(caches)
    spoiled = folder if level == "version" else folder.parent
    spoiled.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    spoil(spoiled, monkeypatch)
    before = sorted(caches.rglob("*"))
    status = _cache.status()
    assert not status.on
    assert str(spoiled if spoil is not foreign else "another user") in status.why
    assert status.remedy
    assert fit_something() == 0
    assert jax.config.jax_compilation_cache_dir is None
    assert sorted(caches.rglob("*")) == before


def under_a_file(caches, monkeypatch):
    (caches / "file").touch()
    return str(caches / "file" / "below")


def that_cannot_be_made(caches, monkeypatch):
    return "/proc/fitstep-test"


def open_to_all(caches, monkeypatch):
    caches.chmod(0o777)
    return str(caches)


def with_an_odd_name(caches, monkeypatch):
    return str(caches / "\udcff")  # a byte that is no UTF-8


def on_a_full_disk(caches, monkeypatch):
    full = shutil.disk_usage(caches)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    return str(caches)


def that_takes_no_marker(caches, monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_cache_folder.tempfile, "mkstemp", refuse)
    return str(caches)


@pytest.mark.parametrize(
    "place",
    [
        under_a_file,
        that_cannot_be_made,
        open_to_all,
        with_an_odd_name,
        on_a_full_disk,
        that_takes_no_marker,
    ],
)
def test_a_place_that_cannot_be_used_fails_no_training(caches, monkeypatch, recwarn, place):
    """No such folder, no rights, no room: training goes on without the cache and without a word."""
    monkeypatch.setenv("XDG_CACHE_HOME", place(caches, monkeypatch))
    assert fit_something() == 0
    assert jax.config.jax_compilation_cache_dir is None
    assert [str(w.message) for w in recwarn] == []


def test_a_user_without_a_home_trains(caches, monkeypatch, recwarn):
    """No HOME, no XDG_CACHE_HOME and no entry among the users: no cache, no error."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it does for such users
    assert not _cache.status().on
    assert "home" in _cache.status().why
    assert fit_something() == 0
    assert jax.config.jax_compilation_cache_dir is None
    assert [str(w.message) for w in recwarn] == []


@pytest.mark.parametrize(
    ("system", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/fitstep"),
        ("linux", {"XDG_CACHE_HOME": ""}, "/home/me/.cache/fitstep"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/fitstep"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/me/Library/Caches/fitstep"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/fitstep"),
    ],
)
def test_where_a_users_caches_are(monkeypatch, system, variables, expected):
    """Each system has its own place; a relative XDG_CACHE_HOME is to be ignored, says XDG."""
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _cache_folder.root(system) == Path(expected)


def test_a_folder_removed_while_training_is_made_again(caches, recwarn):
    """Someone empties ~/.cache between two fits: the next one keeps its programs again."""
    fit_something()
    shutil.rmtree(caches / "fitstep")
    fit_something()
    assert entries(caches)
    assert folder_in(caches).stat().st_mode & 0o7777 == 0o700
    assert [str(w.message) for w in recwarn] == []


def test_a_folder_that_becomes_unsafe_is_left(caches):
    """Opened to others between two fits, it is not read again."""
    fit_something()
    folder_in(caches).chmod(0o777)
    fit_something()
    assert jax.config.jax_compilation_cache_dir is None


def test_an_entry_cut_short_in_between_is_found_by_the_same_process(caches, recwarn):
    """An interrupt cut an entry that another process was writing: the next compile deletes it."""
    fit_something()
    torn = folder_in(caches) / "jit_other-0123-cache"
    torn.write_bytes(zlib.compress(bytes(1000))[:-5])
    fit_something()
    assert not torn.exists()


# --- the folder ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """An empty folder of ours."""
    return _cache_folder.usable(tmp_path / "fitstep" / "jax-1.2.3-cpu")


def with_zlib(data):
    return zlib.compress(data)


def with_zstd(data):
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


@pytest.mark.parametrize("compress", [with_zlib, with_zstd])
@pytest.mark.parametrize("what", ["noise", "zeros"])
def test_every_truncation_is_recognised_and_no_whole_entry(folder, compress, what):
    """Cut anywhere, zeroed by a crash, empty: deleted. Whole, also where 4 MB come out of 4 kB: kept."""
    generator = random.Random(0)
    data = generator.randbytes(5000) if what == "noise" else bytes(2**22)
    entry = compress(data)
    (folder / "whole-cache").write_bytes(entry)
    for length in {*range(12), len(entry) // 2, *range(len(entry) - 12, len(entry))}:
        (folder / f"{length}-cache").write_bytes(entry[:length])
    (folder / "zeros-cache").write_bytes(bytes(len(entry)))
    _cache_folder.tidy(folder)
    assert [path.name for path in folder.glob("*-cache")] == ["whole-cache"]


def test_what_is_no_entry_or_of_an_unknown_format_is_left_alone(folder):
    """Another compression that a later JAX may choose, files of XLA's, folders."""
    (folder / "new-cache").write_bytes(b"LZ4\x01" + bytes(100))
    (folder / "notes.txt").write_bytes(b"")
    (folder / "xla_gpu_per_fusion_autotune_cache_dir").mkdir()
    (folder / "folder-cache").mkdir()
    before = sorted(folder.iterdir())
    _cache_folder.tidy(folder)
    assert sorted(folder.iterdir()) == sorted([*before, folder / ".checked"])


def test_only_what_has_changed_since_is_read(folder, monkeypatch):
    """The second check reads the new entry and none of those that it has seen."""
    old = time.time() - 60
    for name in "ab":
        (folder / f"{name}-cache").write_bytes(zlib.compress(b"program"))
        os.utime(folder / f"{name}-cache", (old, old))
    _cache_folder.tidy(folder)
    (folder / "c-cache").write_bytes(zlib.compress(b"program"))
    read = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or real(path))
    _cache_folder.tidy(folder)
    assert read == ["c-cache"]


@pytest.mark.parametrize("by", ["limit", "most"])
def test_the_entries_that_were_not_used_for_longest_go_first(folder, by):
    """Beyond the limit by last use: JAX's `-atime` file, else the time the file was read or written."""
    now = time.time()
    data = random.Random(0).randbytes(1000)
    for age, name in enumerate("abcde"):
        path = folder / f"{name}-cache"
        path.write_bytes(zlib.compress(data))
        os.utime(path, (now - 1000 - age, now - 1000 - age))
    (folder / "e-atime").write_bytes(b"")  # the oldest, but used just now
    os.utime(folder / "d-cache", (now, now - 5000))
    size = (folder / "a-cache").stat().st_size
    _cache_folder.tidy(folder, **{by: 3 * size if by == "limit" else 3})
    assert sorted(path.name for path in folder.glob("*-cache")) == ["a-cache", "d-cache", "e-cache"]
    _cache_folder.tidy(folder, **{by: 0})
    assert not list(folder.glob("*-cache"))


def test_folders_of_other_versions_go_when_nobody_uses_them(folder):
    """An old version's goes; another device's stays, and that of an environment used this week."""
    names = {"jax-1.2.2-cpu", "jax-1.2.2-gpu", "jax-1.2.3-gpu", "jax-1.2.3.dev1-cpu", "jax-9-cpu"}
    above = folder.parent
    for name in names:
        (above / name).mkdir()
        (above / name / "x-cache").write_bytes(b"")
    (above / "jax-9-cpu" / ".checked").write_bytes(b"")
    marker = above / "jax-1.2.2-gpu" / ".checked"
    marker.write_bytes(b"")
    os.utime(marker, (time.time() - 8 * 86400,) * 2)
    (above / "notes").mkdir()
    (above / "jax-1.2.1-cpu").symlink_to(above / "notes")
    _cache_folder.tidy(folder)
    left = {"jax-1.2.3-cpu", "jax-1.2.3-gpu", "jax-9-cpu", "jax-1.2.1-cpu", "notes"}
    assert {path.name for path in above.iterdir()} == left


def test_files_may_vanish_under_a_check(folder, monkeypatch):
    """Another process deletes what is just being read, listed or deleted: nothing is raised."""
    for name in "abc":
        (folder / f"{name}-cache").write_bytes(b"")
    real = os.scandir

    def scandir(path):
        files = list(real(path))
        (folder / "a-cache").unlink(missing_ok=True)

        class Found:
            def __enter__(self):
                return iter(files)

            def __exit__(self, *_):
                pass

        return Found()

    def read_bytes(path):
        path.unlink()
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    _cache_folder.tidy(folder, limit=0)


def test_clearing_stays_within_our_folders(folder, tmp_path, monkeypatch):
    """Only `jax-*` under fitstep's own folder is emptied; links are removed, not followed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "kept").write_bytes(b"kept")
    (folder.parent / "jax-8-cpu").symlink_to(theirs)
    (folder.parent / "notes").mkdir()
    (folder.parent / "notes" / "kept-cache").write_bytes(b"kept")
    (folder / "link").symlink_to(theirs)
    (folder / "a-cache").write_bytes(bytes(1000))
    (folder / "xla").mkdir()
    (folder / "xla" / "tuned").write_bytes(bytes(500))
    freed = _cache_folder.clear()
    assert freed.entries == 1
    assert 1500 <= freed.bytes < 1700  # the link itself is a few bytes long
    assert list(folder.iterdir()) == []
    assert (theirs / "kept").read_bytes() == b"kept"
    assert (folder.parent / "notes" / "kept-cache").exists()


def test_clearing_a_folder_that_is_a_link_is_refused(folder, tmp_path, monkeypatch):
    """Our folder replaced by a link elsewhere: nothing is deleted there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    (folder / "a-cache").write_bytes(b"program")
    (tmp_path / "caches").mkdir()
    (tmp_path / "caches" / "fitstep").symlink_to(folder.parent)
    with pytest.raises(_cache_folder.UnusableError, match="is a link or a file"):
        _cache_folder.clear()
    assert (folder / "a-cache").exists()
