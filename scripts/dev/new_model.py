"""python scripts/dev/new_model.py CONFIG: the rows that come closest to a config.json, or to that of a folder.

Each row of models/families/table.py reads the keys as its own. Those that it refuses are noted and left out; those that
it does not ask for are unread. A config.json does not say where norms are, nor names of tensors: read the model's code.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from trireme.models.config import SUPPORTED, InputError, ModelConfig, parse_config
from trireme.models.families.known import unsupported_reason
from trireme.models.families.table import FAMILIES, WRAPPERS
from trireme.models.sizes.shapes import parameters

ROWS, MOST_REFUSALS = 4, 12
IDLE = re.compile(  # keys that change nothing that a language model computes
    r"dropout|initializer|_token|use_cache|output_|^return_|^_|architectures|auto_map|dtype|transformers_v|quantization|"
    r"^use_(flash|grouped)|id2label|label2id|problem_type|chunk_size|aux_loss|load_balance|z_loss|model_type|vision|audio|pretraining_tp"
)
FEATURES = {"experts": r"experts?(_|$)", "scan": r"mamba|^linear_\w*heads?|ssm_", "latent": r"kv_lora_rank"}
MECHANISMS = {  # keys -> what they are
    r"^index|sparse_|topk_blocks|compress": "sparse attention with an indexer of its keys",
    r"hc_|hyper_connection": "several residual streams",
    r"ngram|per_layer_in|^ple_": "embeddings for each layer, or of several tokens",
    r"conv_|kda|lightning": "short convolutions, or linear attention of another kind",
    r"gate|gating": "a gate on the result of attention, or of another branch",
    r"cap|clamp|_limit|mup|multiplier|scale|scaling": "factors or limits of branches, scores or logits",
    r"layer_types|_pattern|_every|interval|_enum|_freq|dense_layers|idxs": "kinds of layers in another order",
    r"per_layer|setting|v_head_dim|shared?_": "sizes that differ by layer, or of values and shared parts",
    r"expert|route|topk|top_k|moe": "another choice or weight of experts",
    r"norm|bias|act": "norms, biases or activations of another kind or place",
    r"rope|rotary|theta|nope|alibi": "positions of another kind",
    "": "not guessed",
}


class Read(dict[str, Any]):
    """Keys of a config.json; it notes which are asked for."""

    def __init__(self, raw: dict[str, Any], asked: set[str]):
        super().__init__(raw)
        self.asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __or__(self, other: dict[str, Any]) -> "Read":  # type: ignore[override]
        return Read({**self, **other}, self.asked)


class Fit(NamedTuple):
    """How a row reads a config.json."""

    name: str
    distance: int
    unread: list[str]
    refused: list[str]  # messages
    cfg: ModelConfig | None


def fit(name: str, raw: dict[str, Any]) -> Fit:
    """A row's reading, without keys that it refuses and with 64 for numbers that it lacks."""
    family, refused, cfg = FAMILIES[name], list[str](), None
    said = [*vars(family).values(), *(vars(family.experts).values() if family.experts else ())]
    asked = {*family.aliases, *(value for value in said if isinstance(value, str))}
    outer = next((wrapper for wrapper, own in WRAPPERS.items() if family.inner and name in own.texts), "")
    left = {family.aliases.get(key, key): value for key, value in raw.items()} | {"model_type": name}
    strange = sum(key not in left for field, key in family.spelled.items() if field not in ("theta", "share", "act"))
    for field, pattern in FEATURES.items():
        strange += 4 * (bool(getattr(family, field)) != any(re.search(pattern, key) for key in raw))
    while cfg is None and len(refused) < MOST_REFUSALS:
        try:
            read = Read(left, asked)
            cfg = parse_config({"model_type": outer, "text_config": read} if outer else read)
        except InputError as e:
            refused.append(str(e).partition(": ")[2])
            if not (named := [key for key in re.findall(r'"(\w+)"', refused[-1]) if key != "model_type"]):
                break
            culprit = next((key for key in named if key in left), None)
            left = left | {named[0]: 64} if culprit is None else {k: v for k, v in left.items() if k != culprit}
    asked |= {key for key, value in raw.items() if IDLE.search(key) or value in (None, False)}
    unread = [key for key in raw if key not in asked]
    return Fit(name, len(unread) + 2 * len(refused) + strange + 9 * (cfg is None), unread, refused, cfg)


def report(raw: dict[str, Any]) -> str:
    """The closest rows, and what the first of them does not have."""
    text = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    known = "has a row." if raw.get("model_type") in SUPPORTED else unsupported_reason(raw.get("model_type"), SUPPORTED)
    fits = sorted((fit(name, text) for name in FAMILIES), key=lambda own: own.distance)
    best, lines = fits[0], [f"{raw.get('model_type')}: {known}", "closest rows:"]
    for own in fits[:ROWS]:
        size = f"{parameters(own.cfg) / 1e9:,.2f} B parameters" if own.cfg else "not read to its end"
        lines += [f"  {own.name}: distance {own.distance}, {size}; unread: {', '.join(own.unread) or 'none'}"]
        lines += [f"    refused: {message}" for message in own.refused]
    lines += [f"{best.name} lacks:"]
    for key in dict.fromkeys([*best.unread, *(k for m in best.refused for k in re.findall(r'"(\w+)"', m)[:1])]):
        rows = [own.name for own in fits if own.cfg and key not in own.unread and own is not best][:ROWS]
        what = next(what for pattern, what in MECHANISMS.items() if re.search(pattern, key))
        lines += [f"  {key} = {json.dumps(text.get(key))[:50]}: {what}; read by {', '.join(rows) or 'no row: new'}"]
    return "\n".join(lines)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    print(report(json.loads((path / "config.json" if path.is_dir() else path).read_text())))
