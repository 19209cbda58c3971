"""python scripts/finetune.py CHECKPOINT --data FILE: one command from a Hugging Face folder to a fine-tuned one."""

import sys
from pathlib import Path


def command() -> int:
    try:
        from trireme.__main__ import loaded

        run = loaded()
    except ModuleNotFoundError as missing:
        root = Path(__file__).absolute().parents[1]
        print(f"error: {missing.name} is not installed. Do this first: pip install -e {root}", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(command())
