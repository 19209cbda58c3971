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
    """mypy's exit code."""
    return subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT).returncode


CHECKS = {"style": style, "types": types}


def main(names: list[str]) -> int:
    if unknown := set(names) - set(CHECKS):
        print(f"error: {', '.join(sorted(unknown))}: no such check; there are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    return max([CHECKS[name]() for name in names or CHECKS])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
