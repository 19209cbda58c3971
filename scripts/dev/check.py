"""python scripts/dev/check.py: style and types, as every commit must have them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernels", "models", "storage", "engine")


def types() -> int:
    """mypy's exit code. It finds packages by their paths, so it is shown this folder under the name `trireme`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "trireme").symlink_to(ROOT)
        words = [word for name in PACKAGES for word in ("-p", f"trireme.{name}")]
        config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            config,
            "--cache-dir",
            str(ROOT / ".mypy_cache"),
            *words,
        ]
        return subprocess.run(command, cwd=folder, env=os.environ | {"MYPYPATH": folder}).returncode


def main() -> int:
    """0 where nothing is found."""
    style = [subprocess.run(["ruff", *words, "."], cwd=ROOT).returncode for words in (["check"], ["format", "--check"])]
    return int(any((*style, types())))


if __name__ == "__main__":
    sys.exit(main())
