"""What the control groups of this process allow: folders of a controller, and the cores it may use. Imports no
torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT, SELF_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
QUOTA = "cpu.cfs_quota_us", "cpu.cfs_period_us"  # of version 1


def groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yields (folder, version 1 or 2) of the control groups of this process that have `controller`, the innermost
    first.

    In a container the outer ones may be invisible; its limit is that of the root.
    """
    for line in SELF_CGROUP.read_text().splitlines() if SELF_CGROUP.exists() else ["0::/", f"1:{controller}:/"]:
        number, controllers, path = line.split(":", 2)
        folder = Path(path.lstrip("/"))
        for group in (folder, *folder.parents):
            if number == "0":
                yield ROOT / group, 2
            elif controller in controllers.split(","):
                yield ROOT / controller / group, 1


def cores() -> float:
    """Cores that this process may use: those of its affinity or, if it is less, the quota of a group."""
    number = float(len(os.sched_getaffinity(0)))
    for group, version in groups("cpu"):
        try:
            words = (
                (group / "cpu.max").read_text().split() if version == 2 else [(group / f).read_text() for f in QUOTA]
            )
            quota, period = map(int, words)
        except (OSError, ValueError):  # no file, or no quota: "max"
            continue
        if quota > 0 and period > 0:  # version 1: -1 is none
            number = min(number, quota / period)
    return number


def update_threads(gpus: int = 1) -> int:
    """Threads of CPU AdamW: all cores but one for Python; with several GPUs all but two for each and one.

    Each of several GPUs has threads that launch kernels, and each needs a core. On 64 cores with four H100s no gain was
    seen: a step of 7B took 3.7 s, for another reason (`real._set_interpreter`).
    """
    usable = int(cores())
    return max(1, usable - 1 if gpus == 1 else max(usable - 2 * gpus - 1, usable // 2))
