"""`trireme env` and `trireme check`: what this machine has, and how fast it is.

What env prints is to be pasted into an issue: it measures nothing, and imports no torch, which may be broken.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

from trireme.engine.check.row import Row, versions
from trireme.engine.queues.cgroups import cores
from trireme.engine.run import screen
from trireme.engine.run.options import Check, Env

ROOT = str(Path(__file__).resolve().parents[3])
GIT = 'git -C "$0" --git-dir=.git'
PROGRAMS = {
    "commit": ("sh", "-c", f"{GIT} describe --always --dirty 2>/dev/null || echo none: no clone, or no git", ROOT),
    "container": ("sh", "-c", "ls -d /.dockerenv /run/.containerenv 2>/dev/null | grep . || echo none seen"),
    "CPU": ("grep", "-m1", "model name", "/proc/cpuinfo"),
    "RAM": ("grep", "-m3", "Mem", "/proc/meminfo"),
    "RAM limit": ("sh", "-c", "cat /sys/fs/cgroup/memory.max 2>/dev/null || echo none seen"),
    "GPU": ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"),
    "drives": ("lsblk", "--nodeps", "--noheadings", "--exclude", "1,7", "--output", "NAME,SIZE,MODEL"),
    "store": ("df", "-h", "--output=file,source,fstype,size,avail"),
}
VARIABLES = ("CUDA_", "HF_HOME", "HF_HUB_", "HF_ENDPOINT", "TRIREME_", "NCCL_", "OMP_NUM_", "LD_LIBRARY_PATH")
SECONDS = 5  # of a program, at most


def run(o: Env | Check) -> None:
    """The commands. Raises InputError, StoreError, OSError."""
    if isinstance(o, Check):
        from trireme.engine.check.check import check, folders_of  # late: torch

        check(folders_of(list(o.store) or ["."]), screen.say, o.tune)
        return
    screen.say(versions().line())
    screen.say(Row("machine", "system", platform.platform()).line())  # which names WSL2
    screen.say(Row("machine", "cores", f"{cores():g} of {os.cpu_count()} may be used").line())
    for part, command in PROGRAMS.items():
        for line in _printed(*command, *(o.store or (".",)) * (part == "store")):
            screen.say(Row("machine", part, " ".join(line.split())).line())
    for name in sorted(os.environ):
        if name.startswith(VARIABLES) and "TOKEN" not in name:
            screen.say(Row("variable", name, os.environ[name]).line())


def _printed(*command: str) -> Iterator[str]:
    """The lines that a program prints, those of errors last, or the reason why it did not run."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
        yield from (process.stdout + process.stderr or f"exit code {process.returncode}").splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        yield f"{command[0]}: {getattr(error, 'strerror', None) or f'no answer in {SECONDS} s'}"
