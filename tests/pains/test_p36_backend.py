"""Pain 36: a backend that was chosen wrongly or too late is told at once, with the line that mends it.

The example: `KERAS_BACKEND=tensorflow` in the environment, and nothing happens until much later.
"""

import json
import os
import subprocess
import sys

import pytest

# What a user's shell has; the rest of this process's environment chose JAX already.
KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR")


def ran(code, home, **environment):
    """Run code in a fresh interpreter whose home folder is `home`; returns what it printed."""
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    # `pythonpath` of pytest is no variable: the child finds this checkout's package by itself.
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    env |= {"HOME": str(home), "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CAUGHT = """
import os
{before}
try:
    import fitstep
except Exception as error:
    kinds = [cls.__name__ for cls in type(error).__mro__]
    print("BackendError" in kinds, "FitstepError" in kinds, isinstance(error, RuntimeError))
    print(error)
else:
    import keras
    print("live:", keras.backend.backend(), os.environ.get("KERAS_BACKEND"))
{after}
"""


def caught(home, before="", after="", **environment):
    return ran(CAUGHT.format(before=before, after=after), home, **environment)


def keras_config(home, backend):
    folder = home / ".keras"
    folder.mkdir()
    (folder / "keras.json").write_text(json.dumps({"backend": backend, "floatx": "float32"}))
    return folder / "keras.json"


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_another_backend_asked_for_by_the_variable_is_refused(tmp_path, backend):
    """The error names the backend, the variable and the line; installed or not makes no difference."""
    said = caught(tmp_path, KERAS_BACKEND=backend)
    assert said.startswith("True True True\n")
    assert backend in said
    assert "KERAS_BACKEND" in said
    assert "KERAS_BACKEND=jax" in said.replace('"', "").replace("'", "").replace(" ", "").replace(
        "os.environ[KERAS_BACKEND]", "KERAS_BACKEND"
    )


def test_keras_imported_before_on_another_backend_is_refused(tmp_path):
    """Another live backend, chosen by the variable, is named, with where it came from."""
    said = caught(tmp_path, before="import keras", KERAS_BACKEND="numpy")
    assert said.startswith("True True True\n")
    assert "numpy" in said
    assert "KERAS_BACKEND" in said
    assert "jax" in said


def test_a_variable_set_after_keras_was_imported_comes_too_late(tmp_path):
    """`KERAS_BACKEND=jax` set after `import keras` doesn't hide that another backend is live."""
    before = "import keras; os.environ['KERAS_BACKEND'] = 'jax'"
    said = caught(tmp_path, before=before, KERAS_BACKEND="numpy")
    assert said.startswith("True True True\n")
    assert "numpy" in said
    assert "import" in said  # that Keras was imported before is the reason


def test_a_live_backend_from_keras_s_own_file_is_traced_to_it(tmp_path):
    """Keras imported first, with a configuration file: the error says that it comes from there."""
    keras_config(tmp_path, "numpy")
    said = caught(tmp_path, before="import keras")
    assert said.startswith("True True True\n")
    assert "numpy" in said
    assert "configuration file" in said


@pytest.mark.parametrize("environment", [{}, {"KERAS_BACKEND": ""}], ids=["unset", "empty"])
def test_nothing_asked_for_means_jax_whatever_keras_s_own_file_says(tmp_path, environment):
    """A file that says tensorflow, which Keras writes by itself, isn't asking; nor is an empty variable."""
    keras_config(tmp_path, "tensorflow")
    assert caught(tmp_path, **environment) == "live: jax jax\n"


def test_keras_imported_before_on_jax_is_fine(tmp_path):
    """The order of the imports makes no difference when the backend is right."""
    assert caught(tmp_path, before="import keras", KERAS_BACKEND="jax") == "live: jax jax\n"


def test_after_the_error_the_variable_can_be_mended_in_the_same_process(tmp_path):
    """Doing what the error says, and importing again, works: nothing half-imported is left."""
    after = """
os.environ["KERAS_BACKEND"] = "jax"
import fitstep, keras
print("live:", keras.backend.backend(), callable(fitstep.fit))
"""
    said = caught(tmp_path, after=after, KERAS_BACKEND="torch")
    assert said.startswith("True True True\n")
    assert said.endswith("live: jax True\n")


def test_a_backend_that_does_not_exist_is_named(tmp_path):
    """A misspelt variable is another backend asked for: the same error, not one from inside Keras."""
    said = caught(tmp_path, KERAS_BACKEND="jaxx")
    assert said.startswith("True True True\n")
    assert "jaxx" in said


# --- `fitstep doctor` ---------------------------------------------------------------------------


def doctor(home, **environment):
    """What the doctor says in a user's shell, and its exit code."""
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    env |= {"HOME": str(home), **environment}
    command = [sys.executable, "-m", "fitstep", "doctor"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 100 + len(str(home))
    return done.returncode, done.stdout


@pytest.mark.parametrize("backend", ["torch", "tensorflow", "numpy", "jaxx"])
def test_the_doctor_names_another_backend_and_the_line_that_mends_it(tmp_path, backend):
    """Installed or not, it does not crash: it says what asks for it, and what to do."""
    code, said = doctor(tmp_path, KERAS_BACKEND=backend, JAX_PLATFORMS="cpu")
    assert code == 1
    last = said.splitlines()[-1]
    assert f"KERAS_BACKEND={backend}" in last
    assert last.endswith("export KERAS_BACKEND=jax")
    assert "JAX backend    cpu" in said


def test_the_doctor_says_what_keras_s_own_file_means_for_whom(tmp_path):
    """It is no problem for fitstep, which is told; Keras imported first takes what stands there."""
    file = keras_config(tmp_path, "tensorflow")
    code, said = doctor(tmp_path, JAX_PLATFORMS="cpu")
    said = " ".join(said.split())
    assert code == 0
    assert f"otherwise tensorflow, from {file}" in said
    assert "export KERAS_BACKEND=jax" in said


def with_nvidia_smi(folder):
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200, 580.65.06'\n")
    (folder / "nvidia-smi").chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"]])


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({}, 'pip install "jax[cuda13]"'),
        ({"JAX_PLATFORMS": "cpu"}, "unset JAX_PLATFORMS"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "unset CUDA_VISIBLE_DEVICES"),
        ({"JAX_PLATFORMS": "cuda"}, 'pip install "jax[cuda13]"'),
    ],
    ids=["no plugin", "told to", "hidden", "does not start"],
)
def test_the_doctor_finds_a_gpu_that_is_not_used(tmp_path, environment, line):
    """A GPU that JAX does not run on is a problem, and each cause of it has its own line."""
    code, said = doctor(tmp_path, PATH=with_nvidia_smi(tmp_path), **environment)
    assert code == 1
    assert said.splitlines()[-1].endswith(line)
    assert "NVIDIA H200" in said
