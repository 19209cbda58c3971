"""python scripts/dev/fuzz.py [TARGET ...] [--seed S] [--count N]: tries mutated inputs."""

import argparse
import sys
from pathlib import Path


def main() -> int:
    sys.path[:0] = [str(Path(__file__).parents[2] / "tests" / name) for name in ("helpers", "fuzz")]
    from mutations import attack
    from targets import TARGETS

    parser = argparse.ArgumentParser(description="Feeds mutated files to the parsers and says which were not refused.")
    parser.add_argument("target", nargs="*", help=f"all of them, or those that begin so: {', '.join(TARGETS)}")
    parser.add_argument("--seed", type=int, default=0, help="the first file")
    parser.add_argument("--count", type=int, default=100_000, help="files of each target")
    given, wrong = parser.parse_args(), 0
    for name in [name for name in TARGETS if name.startswith(tuple(given.target or [""]))]:
        findings = attack(TARGETS[name], range(given.seed, given.seed + given.count))
        print(f"{name:16} {given.count:9,} files  {len(findings):3} kinds of findings", flush=True)
        for finding in findings:
            print(f"    {finding}")
        wrong += len(findings)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
