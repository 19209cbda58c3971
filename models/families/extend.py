"""A longer context: a config.json with YaRN for more positions than the model was trained with. No torch."""

from __future__ import annotations

from typing import Any

from trireme.models.families.keys import InputError, Keys
from trireme.models.families.table import FAMILIES, OTHER_NAMES, WRAPPERS, text_of


def extended(raw: dict[str, Any], factor: float, source: str) -> dict[str, Any]:
    """A decoded config.json with `factor` times the positions by YaRN, in the spelling that it has.

    Raises InputError where positions are learned, scaled already, or of two kinds. `source` names the file in errors.
    """
    model_type = raw.get("model_type")
    if model_type not in (*WRAPPERS,):
        return _extended(raw, factor, source)
    text, name = text_of(raw)
    if not isinstance(text, dict):
        return raw  # refused by parse_config
    text = {"model_type": WRAPPERS[model_type].texts[0]} | text
    if not name:
        return raw | _extended(text, factor, source) | {"model_type": model_type}
    return raw | {name: _extended(text, factor, f"{source}: {name}")}


def _extended(raw: dict[str, Any], factor: float, source: str) -> dict[str, Any]:
    model_type = raw.get("model_type")
    model_type = OTHER_NAMES.get(model_type, model_type) if isinstance(model_type, str) else model_type
    if model_type not in (*FAMILIES,):
        return raw  # refused by parse_config
    keys, family = Keys(raw, source), FAMILIES[model_type]
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    params = raw.get(name) or {}
    if not isinstance(params, dict):
        raise keys.error(name, "an object or null")
    kind = params.get("rope_type", params.get("type", "default"))
    kind = family.rope_types.get(kind, kind) if isinstance(kind, str) else kind
    nested = any(isinstance(value, dict) for value in params.values())
    obstacles = (
        (not family.rotary, "are learned"),
        (family.layers or family.local_theta not in (None, family.theta) or nested, "are of two kinds"),
        (family.indexed, "are as many as its attention is dense for"),
        (family.longrope, "are scaled by longrope alone"),
        (kind != "default", f'are scaled already, by "{kind}"'),
    )
    if reason := next((words for stands, words in obstacles if stands), ""):
        raise InputError(f"{source}: the positions of this {model_type} {reason}. Leave --rope-factor out.")
    positions = keys.count(family.spelled["max_positions"], family.max_positions)
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": positions}
    params = {key: value for key, value in params.items() if key != "type"}
    if family.local_theta is not None:  # transformers finds the parameters of full attention there
        raw = {key: value for key, value in raw.items() if key != "rope_parameters"}
    if "rope_parameters" not in raw:
        name = "rope_scaling"
    return raw | {name: params | yarn} | {family.spelled["max_positions"]: int(positions * factor)}
