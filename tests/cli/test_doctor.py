"""`fitstep doctor`: what it says of a machine, an installation and the cache, and of what is wrong."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import keras
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fitstep import _cache
from fitstep.cli import _accelerators, _examination, main
from fitstep.cli._accelerators import Accelerator

ROOT = Path(__file__).parents[2]
KEPT = ("PATH", "LD_LIBRARY_PATH", "TMPDIR", "FITSTEP_CACHE")


def ran(home: Path, *arguments: str, path: str = "", **environment: str):
    """Run `fitstep doctor` in a process of its own, with the user's environment given."""
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env["PYTHONPATH"] = os.pathsep.join([*filter(None, [path]), *filter(None, sys.path)])
    env |= {"HOME": str(home), **environment}
    return subprocess.run(
        [sys.executable, "-m", "fitstep", "doctor", *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def report(home: Path, **options: str) -> dict:
    """The report of a process of its own; the exit code agrees with it, and nothing crashed."""
    done = ran(home, "--json", **options)
    assert "Traceback" not in done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == (1 if found["problems"] else 0)
    return found


def remedies(found: dict) -> list[str]:
    return [problem["remedy"] for problem in found["problems"]]


@pytest.fixture
def here(monkeypatch, tmp_path):
    """In this process: a machine without accelerators, and a user with an empty cache."""
    monkeypatch.setattr(_accelerators, "found", list)
    monkeypatch.setattr(_cache, "_session", _cache._Session())
    monkeypatch.delenv("FITSTEP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    tmp_path.chmod(0o700)
    return tmp_path


def said(capsys, *arguments: str) -> tuple[int, str]:
    """What the command printed: within 100 columns, but for a path or a line to be copied."""
    code = main(["doctor", *arguments])
    out = capsys.readouterr().out
    if "--json" not in arguments:
        for line in out.splitlines():
            assert len(line) <= 100 or len(max(line.split(), key=len)) > 60
    return code, out


# --- the whole ----------------------------------------------------------------------------------


def test_a_sound_machine(here, capsys):
    """Versions, backend, devices and cache are named; nothing is wrong, and the exit code is 0."""
    code, out = said(capsys)
    assert (code, out.splitlines()[-1]) == (0, "Nothing is wrong.")
    rows = {line[:15].strip(): line[15:] for line in out.splitlines()}
    assert rows["Keras"] == keras.__version__
    assert rows["JAX"] == jax.__version__
    assert rows["JAX backend"] == "cpu"
    assert rows["devices"].startswith(f"{len(jax.devices())} x cpu")
    assert rows["cache"].startswith("on; 0 entries, 0 B, in")


def test_the_json_says_the_same_and_nothing_else(here, capsys):
    """One JSON object on stdout."""
    code, out = said(capsys, "--json")
    found = json.loads(out)
    assert (code, found["problems"]) == (0, [])
    assert found["versions"]["keras"] == keras.__version__
    assert found["jax"]["backend"] == "cpu"
    assert len(found["jax"]["devices"]) == len(jax.devices())


def test_a_mistyped_flag_is_refused(capsys):
    """In one line, with what was meant, and exit code 2."""
    assert main(["doctor", "--clear-cach"]) == 2
    assert "Did you mean --clear-cache?" in capsys.readouterr().err


def test_help(capsys):
    """`--help` names both flags."""
    code, out = said(capsys, "--help")
    assert code == 0
    assert "--clear-cache" in out
    assert "--json" in out


def test_the_oldest_versions_are_those_of_the_package():
    """What the doctor calls too old is what pyproject.toml requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package, oldest in _examination.OLDEST.items():
        assert f"{package}>={oldest}" in project["dependencies"]


# --- an installation that is broken -------------------------------------------------------------


def package(folder: Path, name: str, code: str, version: str | None = None) -> str:
    """A package that stands before the real one; returns the entry for the path."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    if version:
        about = folder / f"{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    return str(folder)


@pytest.mark.parametrize(
    ("code", "version", "what", "remedy"),
    [
        ("1 / 0", None, "ZeroDivisionError", 'pip install --force-reinstall "keras>=3.15"'),
        ("def", None, "SyntaxError", 'pip install --force-reinstall "keras>=3.15"'),
        ("import not_there", None, "No module named 'not_there'", "pip install not_there"),
        ("", None, "cannot be imported", 'pip install --force-reinstall "keras>=3.15"'),
        ("1 / 0", "3.9.2", "Keras 3.9.2 is too old", 'pip install -U "keras>=3.15"'),
        ("1 / 0", "2.15.0", "Keras 2.15.0 is too old", 'pip install -U "keras>=3.15"'),
    ],
    ids=["raises", "syntax", "dependency", "empty", "old", "keras 2"],
)
def test_a_keras_that_cannot_be_used(tmp_path, code, version, what, remedy):
    """It is said why and how to mend it; JAX is looked at all the same."""
    path = package(tmp_path / "first", "keras", code, version)
    found = report(tmp_path, path=path, JAX_PLATFORMS="cpu")
    assert any(what in problem["what"] for problem in found["problems"])
    assert remedy in remedies(found)
    assert found["jax"]["backend"] == "cpu"


@pytest.mark.parametrize("code", ["raise RuntimeError('jaxlib is too old')", "1 / 0", "def"])
def test_a_jax_that_cannot_be_imported(tmp_path, code):
    """It is said of JAX, and whatever depends on it does not crash."""
    found = report(tmp_path, path=package(tmp_path / "first", "jax", code))
    assert "pip install -U jax jaxlib" in remedies(found)
    assert found["jax"]["backend"] is None
    assert not found["cache"]["on"]


@pytest.mark.parametrize(("name", "title"), [("keras", "Keras"), ("jax", "JAX")])
def test_a_package_that_is_not_installed(here, capsys, monkeypatch, name, title):
    """It is said, with the line that installs it."""
    real = _examination.importlib.util.find_spec
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        _examination.importlib.util, "find_spec", lambda n: None if n == name else real(n)
    )
    code, out = said(capsys)
    assert code == 1
    assert f"{title} is not installed - pip install" in out


def test_a_jax_that_does_not_start(tmp_path):
    """A platform that is not there: JAX's own reason and the line; Keras is looked at all the same."""
    found = report(tmp_path, JAX_PLATFORMS="rocm", KERAS_BACKEND="jax")
    problem = next(each for each in found["problems"] if "JAX does not start" in each["what"])
    assert "'rocm'" in problem["what"]
    assert problem["remedy"] == "unset JAX_PLATFORMS"
    assert found["keras"]["live"] == "jax"


def test_a_broken_file_of_kerass(tmp_path):
    """A setting in keras.json that Keras refuses: the file is named."""
    (tmp_path / ".keras").mkdir()
    (tmp_path / ".keras" / "keras.json").write_text('{"floatx": "float31"}')
    found = report(tmp_path, JAX_PLATFORMS="cpu")
    assert remedies(found) == [f"mend or delete {tmp_path / '.keras' / 'keras.json'}"]
    assert "float31" in found["problems"][0]["what"]


@pytest.mark.parametrize("content", ["{", "[1]", '"torch"', '{"backend": 1}', ""])
def test_a_file_that_says_nothing_is_no_problem(here, content):
    """Keras passes over such a file, and so does the doctor."""
    (here / "keras").mkdir()
    (here / "keras" / "keras.json").write_text(content)
    os.environ.pop("KERAS_BACKEND")
    try:
        assert _examination.examine()["keras"]["asked"] is None
    finally:
        os.environ["KERAS_BACKEND"] = "jax"


# --- accelerators -------------------------------------------------------------------------------


def files(root: Path, *paths: str, text: str = "") -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def tool(folder: Path, code: str) -> str:
    """A fake nvidia-smi; returns the folder that it is in."""
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{code}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return str(folder)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No tool on the PATH, no variable that speaks of a device, a system without devices."""
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("TPU_NAME", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "COLAB_TPU_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("paths", "platform"),
    [
        (["dev/nvidia0"], "cuda"),
        (["dev/nvidia7"], "cuda"),
        (["proc/driver/nvidia/gpus/0000:01:00.0/information"], "cuda"),
        (["dev/kfd"], "rocm"),
        (["dev/accel0"], "tpu"),
        (["dev/null", "dev/nvidiactl", "dev/accel/accel0", "dev/vfio/vfio"], None),
        ([], None),
    ],
)
def test_what_the_system_shows_of_an_accelerator(bare, paths, platform):
    """Device nodes and the driver's folder; those of other devices, or of a driver alone, are none."""
    there = _accelerators.found(files(bare, *paths))
    assert [accelerator.platform for accelerator in there] == ([platform] if platform else [])


def test_a_tpu_behind_vfio_and_one_that_is_named(bare, monkeypatch):
    """Google's vendor number beside a vfio group; or the variables of a TPU machine."""
    files(bare, "dev/vfio/0")
    assert _accelerators.found(bare) == []
    files(bare, "sys/bus/pci/devices/0000:00:04.0/vendor", text="0x1ae0\n")
    assert [each.platform for each in _accelerators.found(bare)] == ["tpu"]
    monkeypatch.setenv("TPU_NAME", "local")
    assert [each.platform for each in _accelerators.found(bare / "none")] == ["tpu"]


def test_a_processor_among_amds_nodes_is_no_gpu(bare):
    """The kernel lists processors too; they have the number 0."""
    node = "sys/class/kfd/kfd/topology/nodes/{}/gpu_id"
    files(bare, "dev/kfd")
    files(bare, node.format(0), text="0\n")
    assert _accelerators.found(bare) == []
    files(bare, node.format(1), text="51187\n")
    assert [each.platform for each in _accelerators.found(bare)] == ["rocm"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("echo 'NVIDIA H200, 580.65.06'", ("an NVIDIA GPU (NVIDIA H200)", 580)),
        ("echo 'Tesla T4, 535.1'; echo 'Tesla T4, 535.1'", ("an NVIDIA GPU (Tesla T4)", 535)),
        ("exit 0", ("an NVIDIA GPU", None)),
        ("echo 'No devices were found'; exit 6", None),
        ("echo failed >&2; exit 9", None),
    ],
)
def test_what_nvidias_tool_says(bare, monkeypatch, code, expected):
    """Its answer names the GPU and the driver; where it finds none, there is none."""
    monkeypatch.setenv("PATH", tool(bare / "bin", code))
    there = [(each.name, each.driver) for each in _accelerators.found(bare)]
    assert there == ([expected] if expected else [])


def test_a_tool_that_cannot_be_run(bare, monkeypatch):
    """A file of that name that is no program: no GPU, and no crash."""
    folder = tool(bare / "bin", "")
    (bare / "bin" / "nvidia-smi").write_bytes(b"\x7fELF")
    monkeypatch.setenv("PATH", folder)
    assert _accelerators.found(bare) == []


CUDA, ROCM, TPU = Accelerator("cuda", "a GPU"), Accelerator("rocm", "a GPU"), Accelerator("tpu", "")


@pytest.mark.parametrize(
    ("accelerator", "line"),
    [
        (CUDA, 'pip install "jax[cuda13]"'),
        (Accelerator("cuda", "a GPU", 580), 'pip install "jax[cuda13]"'),
        (Accelerator("cuda", "a GPU", 535), 'pip install "jax[cuda12]"'),
        (ROCM, 'pip install "jax[rocm7-local]"'),
        (TPU, 'pip install "jax[tpu]"'),
    ],
)
def test_without_its_plugin_the_line_that_installs_it_is_given(bare, accelerator, line):
    """An extra that this JAX has, and that the driver can run."""
    problem = _accelerators.unused(accelerator, "", lambda _: "")
    assert problem.remedy == line
    extra = line.partition("[")[2].partition("]")[0]
    assert extra in _accelerators.importlib.metadata.metadata("jax").get_all("Provides-Extra")


@pytest.mark.parametrize("variable", ["JAX_PLATFORMS", "JAX_PLATFORM_NAME"])
def test_told_to_use_the_cpu_the_line_takes_that_back(bare, monkeypatch, variable):
    """Nothing needs to be installed: the variable is named."""
    for each in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(variable, "cpu")
    problem = _accelerators.unused(CUDA, "cpu", lambda _: "")
    assert problem.remedy == f"unset {variable}"
    monkeypatch.delenv(variable)
    assert "take that setting out" in _accelerators.unused(CUDA, "cpu", lambda _: "").remedy


@pytest.mark.parametrize(
    ("accelerator", "variable", "value"),
    [
        (CUDA, "CUDA_VISIBLE_DEVICES", ""),
        (CUDA, "CUDA_VISIBLE_DEVICES", "-1"),
        (ROCM, "HIP_VISIBLE_DEVICES", "-1"),
        (ROCM, "ROCR_VISIBLE_DEVICES", ""),
    ],
)
def test_a_variable_that_hides_it_is_named(bare, monkeypatch, accelerator, variable, value):
    """Hidden from every program: that variable, and no installation."""
    monkeypatch.setenv(variable, value)
    assert _accelerators.unused(accelerator, "", lambda _: "").remedy == f"unset {variable}"


def test_a_plugin_of_another_version_or_one_that_fails(bare, monkeypatch):
    """One that is not for this JAX is named; for one that is, JAX's own reason is given."""
    for version, expected in [("0.4.30", "0.4.30 is not for JAX"), (jax.__version__, "no driver")]:
        folder = bare / version
        package(folder, "jax_cuda13_plugin", "", version)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder))
            problem = _accelerators.unused(CUDA, "", lambda platform: f"{platform}: no driver")
        assert expected in problem.what


def test_an_accelerator_that_is_used_is_no_problem(here, monkeypatch, capsys):
    """Where JAX runs on it, it is named and nothing is wrong."""
    monkeypatch.setattr(_accelerators, "found", lambda: [CUDA])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    code, out = said(capsys)
    assert code == 0
    assert "a GPU" in out


# --- settings, distribution, cache --------------------------------------------------------------


@pytest.fixture
def setting():
    """Change a setting of JAX for one test."""
    before = {}

    def change(name, value):
        before.setdefault(name, getattr(jax.config, name))
        jax.config.update(name, value)

    yield change
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_enable_x64", True),
        ("jax_debug_nans", True),
        ("jax_debug_infs", True),
        ("jax_disable_jit", True),
        ("jax_default_matmul_precision", "highest"),
    ],
)
def test_settings_that_are_on_are_shown(here, capsys, setting, name, value):
    """What changes numbers or speed stands in the report, and is not called wrong."""
    assert name not in said(capsys)[1]
    setting(name, value)
    code, out = said(capsys)
    assert code == 0
    assert f"{name}={value}" in out


def test_strict_promotion_is_a_problem(here, capsys, setting):
    """With it Keras itself fails."""
    setting("jax_numpy_dtype_promotion", "strict")
    assert said(capsys)[0] == 1


def test_a_limit_on_every_fit_is_shown(here, capsys, monkeypatch):
    """Keras's variables that end each fit early are easily forgotten."""
    monkeypatch.setenv("KERAS_MAX_EPOCHS", "1")
    assert "KERAS_MAX_EPOCHS=1" in said(capsys)[1]


def test_the_distribution_is_shown(here, capsys):
    """The one that is set, by its kind."""
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    assert "DataParallel" in said(capsys)[1]


def test_the_nnx_mode_is_a_problem(here, capsys, monkeypatch):
    """It is refused by fitstep, so it is told with the variable to unset."""
    monkeypatch.setattr(keras.config, "is_nnx_enabled", lambda: True)
    monkeypatch.setenv("KERAS_NNX_ENABLED", "1")
    code, out = said(capsys)
    assert code == 1
    assert "unset KERAS_NNX_ENABLED" in out


@pytest.mark.parametrize("folder", ["cache", "other version"])
def test_the_cache_is_counted_and_cleared(here, capsys, folder):
    """Entries and bytes are those on the disk; clearing says what it freed, and leaves nothing."""
    name = f"jax-{jax.__version__}-cpu" if folder == "cache" else "jax-0.1-cpu"
    entry = here / "fitstep" / name / "jit_step-0-cache"
    entry.parent.mkdir(parents=True, mode=0o700)
    entry.parent.parent.chmod(0o700)
    entry.write_bytes(bytes(3 * 2**20))
    if folder == "cache":
        assert "on; 1 entry, 3.0 MiB, in" in " ".join(said(capsys)[1].split())
    code, out = said(capsys, "--clear-cache")
    assert code == 0
    assert out.startswith("Freed 3.0 MiB in ")
    assert not entry.exists()
    found = json.loads(said(capsys, "--clear-cache", "--json")[1])
    assert found["freed"] == {"entries": 0, "bytes": 0}


def test_clearing_needs_neither_keras_nor_jax(tmp_path):
    """It works where they are broken, which is when one wants it."""
    path = package(tmp_path / "first", "keras", "1 / 0")
    package(tmp_path / "first", "jax", "1 / 0")
    done = ran(tmp_path, "--clear-cache", path=path, KERAS_BACKEND="torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Freed 0 B")


def test_a_folder_that_is_not_ours_is_a_problem_and_is_not_cleared(here, capsys):
    """A link in the place of our folder: told, with the line that mends it, and left alone."""
    other = here / "other"
    (other / "jax-1-cpu").mkdir(parents=True)
    (other / "jax-1-cpu" / "theirs-cache").write_bytes(b"theirs")
    (here / "fitstep").symlink_to(other)
    code, out = said(capsys)
    assert code == 1
    assert f"rm {here / 'fitstep'}" in out
    assert main(["doctor", "--clear-cache"]) == 1
    assert f"rm {here / 'fitstep'}" in capsys.readouterr().out
    assert (other / "jax-1-cpu" / "theirs-cache").exists()


@pytest.mark.parametrize("value", ["0", "false", "OFF", " no "])
def test_a_cache_that_the_user_turned_off_is_no_problem(here, capsys, monkeypatch, value):
    """It is said why it is off."""
    monkeypatch.setenv("FITSTEP_CACHE", value)
    code, out = said(capsys)
    assert code == 0
    assert f"off (FITSTEP_CACHE={value.strip()}" in out


def test_a_cache_of_the_users_own_is_named(here, capsys, setting):
    """Their folder, on, and from where."""
    setting("jax_compilation_cache_dir", str(here / "theirs"))
    code, out = said(capsys)
    assert code == 0
    assert f"{here / 'theirs'}" in out
