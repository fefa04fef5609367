"""The accelerators of this machine as the system sees them, and why JAX does not use one."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from fitstep.records._environment import version_of

_NEWEST_CUDA_DRIVER = 580  # the first major version of NVIDIA's driver that runs CUDA 13
_HIDING = {  # the variables that hide devices from programs
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
}
_PLUGINS = {
    "cuda": re.compile(r"jax[-_]cuda(\d+)[-_]plugin"),
    "rocm": re.compile(r"jax[-_]rocm(\d+)[-_]plugin"),
    "tpu": re.compile(r"libtpu()"),
}


class Problem(NamedTuple):
    """What is wrong, and the one line that mends it."""

    what: str
    remedy: str


class Accelerator(NamedTuple):
    """A kind of accelerator that is there.

    Attributes:
        platform: JAX's name for it: "cuda", "rocm" or "tpu".
        name: what it is called in a sentence.
        driver: the major version of its driver, where that is known.
    """

    platform: str
    name: str
    driver: int | None = None


def found(root: Path = Path("/")) -> list[Accelerator]:
    """The accelerators of this machine, found without JAX.

    Args:
        root: where the system's folders `dev`, `proc` and `sys` are.
    """
    there = (_nvidia(root), _amd(root), _tpu(root))
    return [accelerator for accelerator in there if accelerator is not None]


def _nvidia(root: Path) -> Accelerator | None:
    answer = _nvidia_smi()
    gpus = root / "proc/driver/nvidia/gpus"
    if answer is None and not (any(root.glob("dev/nvidia[0-9]*")) or any(gpus.glob("*"))):
        return None
    first, _, driver = (answer or "").partition("\n")[0].rpartition(",")
    name = f"an NVIDIA GPU ({first.strip()})" if first.strip() else "an NVIDIA GPU"
    major = re.match(r"\s*(\d+)\.", driver)
    return Accelerator("cuda", name, int(major[1]) if major else None)


def _nvidia_smi() -> str | None:
    """What NVIDIA's own tool says, a line for each GPU; `None` where it is missing or finds none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(  # noqa: S603 - NVIDIA's tool, from the user's own PATH
            query, capture_output=True, text=True, timeout=20, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _amd(root: Path) -> Accelerator | None:
    if not (root / "dev/kfd").exists():
        return None
    nodes = list(root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id"))
    if nodes and all(_text(node) in ("", "0") for node in nodes):  # processors only
        return None
    return Accelerator("rocm", "an AMD GPU")


def _tpu(root: Path) -> Accelerator | None:
    vendors = root.glob("sys/bus/pci/devices/*/vendor")
    by_vfio = any(root.glob("dev/vfio/[0-9]*")) and "0x1ae0" in map(_text, vendors)
    variables = ("TPU_NAME", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "COLAB_TPU_ADDR")
    named = any(os.environ.get(variable) for variable in variables)
    if not (by_vfio or named or any(root.glob("dev/accel[0-9]*"))):
        return None
    return Accelerator("tpu", "a TPU")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


# --- why it is not used -------------------------------------------------------------------------


def unused(accelerator: Accelerator, chosen: str, error_of: Callable[[str], str]) -> Problem:
    """Why JAX runs on the CPU though the accelerator is there.

    Args:
        accelerator: what is there.
        chosen: the platforms that JAX was told to use, or an empty text.
        error_of: what JAX says when it is asked for a platform.
    """
    platform, name = accelerator.platform, accelerator.name
    what = f"{name} is there, but JAX runs on the CPU"
    if chosen:
        variables = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
        variable = next((each for each in variables if os.environ.get(each)), None)
        if variable is None:
            return Problem(f"{what}: jax_platforms is {chosen!r}", "take that setting out")
        return Problem(f"{what}: {variable}={chosen}", f"unset {variable}")
    for variable in _HIDING.get(platform, ()):
        if os.environ.get(variable, "0").strip() in ("", "-1", "none", "NoDevFiles"):
            hidden = f"{variable}={os.environ[variable]!r} hides it"
            return Problem(f"{what}: {hidden}", f"unset {variable}")
    plugin = _plugin(platform)
    if plugin is None:
        return Problem(f"{what}: JAX is installed without it", install(accelerator))
    jax = version_of("jax") or ""
    if platform != "tpu" and plugin.version.split(".")[:2] != jax.split(".")[:2]:
        versions = f"{plugin.name} {plugin.version} is not for JAX {jax}"
        return Problem(f"{what}: {versions}", install(accelerator))
    return Problem(f"{what}: {error_of(platform)}", install(accelerator))


def install(accelerator: Accelerator) -> str:
    """The line that installs JAX for an accelerator."""
    if accelerator.platform == "cuda" and sys.platform == "win32":
        return "use WSL2: JAX has no CUDA for Windows"
    extras = _extras()
    if accelerator.platform == "cuda":
        driver = accelerator.driver or _NEWEST_CUDA_DRIVER
        wanted = ["cuda12"] if driver < _NEWEST_CUDA_DRIVER else ["cuda13", "cuda12"]
    elif accelerator.platform == "rocm":
        wanted = sorted((extra for extra in extras if extra.startswith("rocm")), reverse=True)
    else:
        wanted = ["tpu"]
    extra = next((each for each in wanted if each in extras), [*wanted, "rocm"][0])
    return f'pip install "jax[{extra}]"'


def _extras() -> Iterable[str]:
    try:
        return importlib.metadata.metadata("jax").get_all("Provides-Extra") or ()
    except importlib.metadata.PackageNotFoundError:
        return ()


class _Plugin(NamedTuple):
    name: str
    version: str


def _plugin(platform: str) -> _Plugin | None:
    for distribution in importlib.metadata.distributions():
        name = distribution.name or ""  # a folder that an installation left half done has none
        if _PLUGINS[platform].fullmatch(name.lower()):
            return _Plugin(name, distribution.version)
    return None
