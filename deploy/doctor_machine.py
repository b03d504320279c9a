"""Preflight of a site's machine: Python, packages, disk, memory, GPU, clock. Each check is given what was measured."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

from deploy.doctor_finding import Finding, error, ok, warning

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30

MIN_PYTHON = (3, 11)
SAME_VERSION = frozenset({"flwr", "torch", "torchvision", "numpy", "safetensors"})
"""Packages that shape the numbers or the messages: another version is an error, of the others it is a warning."""

DISK_BYTES = (2 * GIB, 10 * GIB)
MEMORY_BYTES = (2 * GIB, 4 * GIB)
"""Below the first it is an error, below the second a warning. Choice: a checked-out environment and one decoded data
set of 100,000 small images fit into 10 GiB; a client process with torch and a ResNet-18 needs about 2 GiB."""

CLOCK_WARNING_S = 60.0
CLOCK_ERROR_S = 300.0
"""Choice: a signed request is taken for about 5 minutes, so a clock further behind keeps a site out."""

CLOCK_AHEAD_WARNING_S = 3.0
CLOCK_AHEAD_ERROR_S = 6.0
"""The SuperLink takes no request from more than 5 s in its future; a ``Date`` without its fraction is the sixth."""

GPU_PROBE = (
    "import json, torch; print(json.dumps([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]))"
)


def check_python(version: tuple[int, int, int]) -> Finding:
    """The interpreter's version."""
    found = ".".join(map(str, version))
    if version[:2] < MIN_PYTHON:
        return error("python", f"Python is {found}, expected 3.11 or newer", "install Python 3.11 and make .venv again")
    return ok("python", f"Python {found}")


def pinned_versions(constraints: str) -> dict[str, str]:
    """Name -> version out of the text of ``constraints.txt``, names normalised.

    >>> pinned_versions("# tested\\nopen_clip_torch==3.3.0\\ntriton==3.8.0 ; platform_system == 'Linux'")
    {'open-clip-torch': '3.3.0', 'triton': '3.8.0'}
    """
    pins = {}
    for line in constraints.splitlines():
        name, found, version = line.partition(";")[0].strip().partition("==")
        if found and not line.startswith("#"):
            pins[_normal(name)] = version.strip()
    return pins


def required_packages(pyproject: str) -> tuple[str, ...]:
    """Names of the packages that the text of ``pyproject.toml`` asks for, normalised, without extras."""
    lines = tomllib.loads(pyproject)["project"]["dependencies"]
    return tuple(_normal(re.split(r"[\s\[<>=!~;]", line, maxsplit=1)[0]) for line in lines)


def check_packages(
    installed: Mapping[str, str], pins: Mapping[str, str], required: Iterable[str], same: Iterable[str] = SAME_VERSION
) -> list[Finding]:
    """Installed versions (name -> version) against the tested ones."""
    fix = "install the tested versions: python deploy/install.py"
    findings = []
    if missing := sorted(set(required) - set(installed)):
        findings.append(error("packages-missing", f"not installed: {', '.join(missing)}", fix))
    other = {
        name: f"{name} {installed[name]} (tested: {pins[name]})"
        for name in sorted(set(installed) & set(pins))
        if installed[name].partition("+")[0] != pins[name].partition("+")[0]
    }
    same = set(same)
    if strict := [text for name, text in other.items() if name in same]:
        findings.append(error("packages-version", f"other versions than the federation's: {', '.join(strict)}", fix))
    if loose := [text for name, text in other.items() if name not in same]:
        findings.append(warning("packages-version", f"other versions than the tested ones: {', '.join(loose)}", fix))
    return findings or [ok("packages", f"{len(set(installed) & set(pins))} packages at the tested versions")]


def installed_packages() -> dict[str, str]:
    """Name -> version of every package of this interpreter, names normalised."""
    found = importlib.metadata.distributions()
    return {_normal(one.metadata["Name"]): one.version for one in found if one.metadata["Name"]}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def check_disk(free_bytes: int, what: str, limits: tuple[int, int] = DISK_BYTES) -> Finding:
    """Free space where the site's state goes."""
    return _amount("disk", f"{free_bytes / GIB:.1f} GiB free for {what}", free_bytes, limits, "free some space")


def check_memory(available_bytes: int, limits: tuple[int, int] = MEMORY_BYTES) -> Finding:
    """Memory that a new process can have."""
    sentence = f"{available_bytes / GIB:.1f} GiB of memory available"
    return _amount("memory", sentence, available_bytes, limits, "end other programs or add memory")


def _amount(code: str, sentence: str, found: int, limits: tuple[int, int], fix: str) -> Finding:
    lowest, comfortable = limits
    if found < lowest:
        return error(code, f"{sentence}, expected at least {lowest / GIB:.0f} GiB", fix)
    if found < comfortable:
        return warning(code, f"{sentence}, {comfortable / GIB:.0f} GiB are better", fix)
    return ok(code, sentence)


def check_folder(folder: Path, what: str) -> Finding:
    """Whether a folder is there, or can be made, and can be written to by this user."""
    nearest = next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return error("folder", f"{what} cannot be written to", "give the site's user the right to write there")
    return ok("folder", f"{what} can be written to")


def check_gpu(names: list[str] | None, has_driver: bool) -> Finding:
    """``names``: the GPUs that torch sees, None where it could not be asked."""
    if names is None:
        return warning("gpu", "torch could not be asked for a GPU", "install the tested versions")
    if names:
        return ok("gpu", f"{len(names)} GPU: {', '.join(names)}")
    if has_driver:
        return warning(
            "gpu",
            "there is an NVIDIA driver but torch sees no GPU",
            "update the driver or free the GPU; or train on CPU",
        )
    return ok("gpu", "no GPU, training runs on the CPU")


def check_clock(skew_s: float) -> Finding:
    """``skew_s``: this machine's time minus the server's."""
    sentence = f"the clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the server's"
    fix = "set the clock by NTP (timedatectl set-ntp true)"
    late, early = (CLOCK_AHEAD_ERROR_S, CLOCK_AHEAD_WARNING_S) if skew_s > 0 else (CLOCK_ERROR_S, CLOCK_WARNING_S)
    if abs(skew_s) >= late:
        return error("clock", f"{sentence}; from {late:.0f} s on the site is not let in", fix)
    if abs(skew_s) >= early:
        return warning("clock", sentence, fix)
    return ok("clock", "the clock agrees with the server's")


def skew_s(ours: datetime, date_header: datetime) -> float:
    """Seconds that ``ours`` is ahead of an HTTP ``Date``."""
    return (ours - date_header).total_seconds()


def machine_findings(state_dir: Path) -> list[Finding]:
    """Measures this machine and checks it."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    place = next(folder for folder in (state_dir.absolute(), *state_dir.absolute().parents) if folder.exists())
    return [
        check_python(sys.version_info[:3]),
        *check_packages(installed_packages(), pinned_versions(constraints), required_packages(pyproject)),
        check_folder(state_dir.absolute(), "the state folder"),
        check_disk(shutil.disk_usage(place).free, "the state folder"),
        check_memory(available_memory()),
        check_gpu(_gpus(), shutil.which("nvidia-smi") is not None),
    ]


def available_memory() -> int:
    """Bytes that a new process can have; the free ones where the kernel does not say."""
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _gpus() -> list[str] | None:
    """Asked in a process of its own: a broken driver may take the process with it."""
    try:
        done = subprocess.run([sys.executable, "-c", GPU_PROBE], capture_output=True, text=True, timeout=120)
        return list(json.loads(done.stdout)) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError):
        return None
