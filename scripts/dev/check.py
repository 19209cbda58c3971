"""python scripts/dev/check.py [style] [types]: what every commit must pass, both by default."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernels", "models", "storage", "engine")


def style() -> int:
    """ruff's exit code."""
    return max(
        subprocess.run(["ruff", *words, "."], cwd=ROOT).returncode for words in (["check"], ["format", "--check"])
    )


def types() -> int:
    """mypy's exit code. mypy finds packages by path, so this folder is linked as `trireme`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "trireme").symlink_to(ROOT)
        options = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
        packages = [word for name in PACKAGES for word in ("-p", f"trireme.{name}")]
        command = [sys.executable, "-m", "mypy", *options, *packages]
        return subprocess.run(command, cwd=folder, env=os.environ | {"MYPYPATH": folder}).returncode


CHECKS = {"style": style, "types": types}


def main(names: list[str]) -> int:
    if unknown := set(names) - set(CHECKS):
        print(f"error: {', '.join(sorted(unknown))}: no such check; there are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    return max([CHECKS[name]() for name in names or CHECKS])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
