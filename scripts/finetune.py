"""python scripts/finetune.py CHECKPOINT --data FILE: one command from a Hugging Face folder to a fine-tuned one."""

import os
import sys

try:
    from trireme.engine.run.main import command
except ModuleNotFoundError as missing:
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    print(f"error: {missing.name} is not installed. Do this first: pip install -e {root}", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(command())
