"""python scripts/dev/tree.py: writes docs/tree.md, every file with the first sentence of its docstring."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tree.md"
ROOMS = {
    "kernels": "Triton; imports torch and triton, nothing of ours. One op, one file",
    "kernels/attention": "causal flash attention over packed documents",
    "kernels/fp8": "matrices in fp8: quantised by their largest value, and multiplied",
    "kernels/experts": "mixture of experts: rows sorted by expert, products by group",
    "models": "a block: weights, saved tensors, forward, backward; generation",
    "models/families": "what a config.json means, per model_type; no torch",
    "models/sizes": "what of a model is counted before it computes: names, shapes, bytes, FLOPs; no torch",
    "storage": "bytes on the SSD; no torch, nothing of ours outside storage",
    "engine": "what a step is made of",
    "engine/data": "rows to micro-batches; no torch",
    "engine/hosts": "several hosts: who there is, what they agree on, tensors between them",
    "engine/lanes": "who does the work of a step, and in which order",
    "engine/tuning": "what of a model is trained: some of its tensors, or adapters",
    "engine/planner": "how a plan is found and how long it takes",
    "engine/run": "one run, from options to the folder that it leaves",
    "engine/run/begin": "how a run begins: what is settled before its first byte, and what it goes on with",
    "scripts": "the command",
    "scripts/command": "the same, for python -m trireme",
    "scripts/bench": "benchmarks: each prints a table and writes JSON",
    "scripts/dev": "tools for those who work on this code",
}


def sentence(path: Path) -> str:
    """Of a docstring or, in C++, the first comment."""
    text = path.read_text()
    said = ast.get_docstring(ast.parse(text)) if path.suffix == ".py" else text.lstrip("/ *\n").split("\n\n")[0]
    assert said, f"{path} does not say what it is for"
    first = " ".join(said.replace("\n//", "\n").split("\n\n")[0].split())
    return re.split(r"(?<! al)\. ", first)[0].removesuffix(".")


def page() -> str:
    lines = ["# Every file, one sentence", "", "Made by `python scripts/dev/tree.py` from the files' own first lines."]
    for room, what in ROOMS.items():
        lines += ["", f"## {room}/", "", f"{what[0].upper()}{what[1:]}.", ""]
        files = sorted(p for p in (ROOT / room).iterdir() if p.suffix in (".py", ".cpp"))
        lines += [f"- `{path.name}` {sentence(path)}" for path in files]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
