"""Which finished runs tests ask for, and what their logs say."""

import json
from pathlib import Path

PAIRS = [dict(prompt=f"the cat {i}", chosen=" sat on the mat", rejected=" ran to the sea") for i in range(8)]
CLASSES = [dict(text=f"the {word} {i}", label=word) for i in range(6) for word in ("cat", "dog")]
ALPACA = [
    dict(instruction=f"Name the {word}", input=f"{i}" * (i % 2), output=f"the {word} ran")
    for i, word in enumerate(("cat", "dog", "sea", "mat"))
] * 2
RUNS = {  # options of each run
    "full": dict(rows="stories.txt"),
    "alpaca": dict(rows="alpaca.jsonl", seq_len=256),
    "alpaca lora": dict(rows="alpaca.jsonl", seq_len=256, lora=4, merge=True),
    "lora": dict(rows="stories.txt", lora=4, merge=True),
    "dpo": dict(rows="pairs.jsonl", method="dpo"),
    "classify": dict(rows="classes.jsonl", method="classify"),
    "reward": dict(rows="pairs.jsonl", method="reward"),
}


def last_eval(out: Path) -> dict:
    """The last evaluation in a run's log."""
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval_loss" in row][-1]
