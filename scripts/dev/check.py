"""python scripts/dev/check.py [style] [types]: what every commit must pass, both by default."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def style() -> int:
    """ruff's exit code."""
    return max(
        subprocess.run(["ruff", *words, "."], cwd=ROOT).returncode for words in (["check"], ["format", "--check"])
    )


def types() -> int:
    """mypy's exit code, of the package and of what its tests seldom run."""
    mypy = [sys.executable, "-m", "mypy"]
    return max(subprocess.run([*mypy, *files], cwd=ROOT).returncode for files in ([], ["scripts/harness.py"]))


CHECKS = {"style": style, "types": types}


def main(names: list[str]) -> int:
    if unknown := set(names) - set(CHECKS):
        print(f"error: {', '.join(sorted(unknown))}: no such check; there are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    return max([CHECKS[name]() for name in names or CHECKS])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
