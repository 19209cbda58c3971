"""Checks of drives: free space, O_DIRECT, hard links, rates that last."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from trireme.engine.amounts import gb, percent
from trireme.engine.check.row import Row
from trireme.engine.planner.probe import compute, drive
from trireme.engine.planner.rates import DRIVES, GB, reserved
from trireme.storage.devices import check_links, is_direct
from trireme.storage.files import StoreError
from trireme.storage.temporary import HIDDEN, Temporary

SECONDS = 30  # of all drives: up to 2 x TURNS + 1 turns each
LEAST = 1 << 30  # bytes free, to be tried


def drives(folders: Mapping[str, Path], out: dict[Path, dict[str, float]]) -> Iterator[Row]:
    """Yields rows; `out` gets the rates of the drives that were measured, by folder. `folders`: by the names given;
    nothing is left in them.
    """
    for name, folder in folders.items():
        disk, model = shutil.disk_usage(folder), drive.identity(folder)["model"] or "a drive without a model's name"
        left = disk.free - reserved(disk.total)
        space_advice = "" if left > 0 else f"free {gb(-left)}: nearly full drives write slowly"
        yield Row("drive", name, f"{model}, {gb(disk.free)} of {gb(disk.total)} free", space_advice)
        with Temporary(HIDDEN, folder) as trial:
            yield _links(name, trial)
            direct = is_direct(trial)
        advice = "" if direct else "put the store on ext4, xfs or btrfs of a drive of this machine"
        result = "files bypass the page cache" if direct else "no O_DIRECT: slower, through the page cache"
        yield Row("drive", f"{name}, O_DIRECT", result, advice)
        if disk.free < LEAST:
            yield Row("drive", f"{name}, rates", "not tried: less than 1 GiB is free", "free some space")
            continue
        seconds = SECONDS / len(folders) / (2 * compute.TURNS + 1)
        out[folder] = drive.drive_rates(folder, seconds, patient=True)
        yield _rates(name, out[folder])


def _links(name: str, folder: Path) -> Row:
    try:
        check_links(folder)
    except StoreError as error:
        reason = error.strerror or str(error)
        return Row("drive", f"{name}, hard links", "none", reason)
    return Row("drive", f"{name}, hard links", "snapshots can be made")


def _rates(name: str, rates: Mapping[str, float]) -> Row:
    read, write, usual = rates["ssd_read"], rates["ssd_write"], DRIVES["gen4"]
    result = f"read {read / GB:.2f}, write {write / GB:.2f} GB/s, together {percent(rates['mixed'])} of that"
    slow = "use an NVMe drive in a slot of its own, and look at its temperature" if read < usual.read / 7 else ""
    if not slow and write < usual.write / 2:
        slow = "it writes slowly: is it full, hot, or without a fast cache?"
    return Row("drive", f"{name}, rates", result, slow)
