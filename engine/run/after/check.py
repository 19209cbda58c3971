"""`trireme check`: measures this machine and compares kernels with their references."""

from __future__ import annotations

from trireme.engine.check import check as checks
from trireme.engine.run import screen
from trireme.engine.run.options import Check


def run(o: Check) -> None:
    """Raises InputError, StoreError, OSError."""
    checks.check(checks.folders_of(list(o.store) or ["."]), screen.say, o.tune)
