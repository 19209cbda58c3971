"""Windows of attention and layers without rope, as config.json lists them. No torch."""

from __future__ import annotations

from trireme.models.families.family import Family
from trireme.models.families.keys import InputError, Keys
from trireme.models.families.rope import GLOBAL, LOCAL
from trireme.models.families.scans import LINEAR, DeltaKeys

INDEXED = "indexed_attention"  # in layer_types: an indexer chooses keys


def windows(keys: Keys, family: Family, layers: int) -> list[int]:
    """The window of each layer, in tokens; 0 for none. Raises InputError."""
    if family.scan is not None and family.windows == "none":
        keys.refuse_unless("sliding_window", (None,))
        return [0] * layers
    if keys.raw.get(family.before_key) is not None:
        keys = Keys(keys.raw | {"sliding_window": keys.count(family.before_key) + 1}, keys.source)
    present = "sliding_window" in keys.raw
    absent = keys.raw["sliding_window"] is None if present else family.window is None
    absent = absent or family.windows == "none"
    window = 0 if absent else keys.count("sliding_window", family.window)
    if family.windows == "above" and not keys.flag("use_sliding_window", False):
        window = 0
    if family.windows in ("pattern", "above"):
        return _pattern(keys, family, layers, window)
    kind = LOCAL if window else INDEXED if family.indexed else GLOBAL
    if keys.raw.get("layer_types") not in (None, [kind] * layers):
        raise InputError(
            f'{keys.source}: "layer_types" must be {kind} in all {layers} layers, as the other keys say; other '
            f"patterns are not supported for {keys.raw['model_type']}."
        )
    return [window] * layers


def _first_window(keys: Keys, family: Family, layers: int) -> int:
    """The first layer with a window, by max_window_layers."""
    first = keys.raw.get("max_window_layers", family.above)
    if type(first) is not int or first < 0:
        raise keys.error("max_window_layers", "an integer >= 0")
    return min(first, layers)


def _pattern(keys: Keys, family: Family, layers: int, window: int) -> list[int]:
    """As windows, by `layer_types` or the family's default."""
    types = keys.raw.get("layer_types")
    if types is None:
        types = _usual_types(keys, family, layers, window)
        if LOCAL in types and not window:
            raise keys.error("layer_types", f'a list of {layers} names, as "sliding_window" is null')
    kinds = (GLOBAL, LOCAL) if family.scan is None else (GLOBAL, LOCAL, LINEAR)
    if not isinstance(types, list) or len(types) != layers or not all(t in kinds for t in types):
        raise keys.error("layer_types", f"a list of {layers} names, each {' or '.join(kinds)}")
    if LOCAL in types and not window:
        raise keys.error("sliding_window", f"a positive integer, as layer_types names {LOCAL}")
    return [window if kind == LOCAL else 0 for kind in types]


def _usual_types(keys: Keys, family: Family, layers: int, window: int) -> list[str]:
    """`layer_types` where config.json has none."""
    if isinstance(family.scan, DeltaKeys):
        return [family.scan.pattern[i % len(family.scan.pattern)] for i in range(layers)]
    if family.unrotated == "listed":
        local_layers = unrotated_layers(keys, layers) if window and keys.flag("use_sliding_window", False) else ()
        return [LOCAL if i in local_layers else GLOBAL for i in range(layers)]
    if family.above:
        first = _first_window(keys, family, layers) if window else layers
        return [GLOBAL] * first + [LOCAL] * (layers - first)
    if not family.period:
        return [LOCAL if window else GLOBAL] * layers
    period = keys.count(family.period_key, family.period) if family.period_key else family.period
    if family.ends:
        return [GLOBAL if i < 2 or i % period == 1 or i == layers - 1 else LOCAL for i in range(layers)]
    if family.last:
        return [GLOBAL if (layers - 1 - i) % period == 0 else LOCAL for i in range(layers)]
    flags = [(i + (not family.first)) % period == 0 or family.begins and i == 0 for i in range(layers)]
    return [GLOBAL if flag else LOCAL for flag in flags]


def unrotated_layers(keys: Keys, layers: int) -> tuple[int, ...]:
    """The layers without rope, by no_rope_layers or no_rope_layer_interval. Raises InputError."""
    rotated = keys.raw.get("no_rope_layers")
    if rotated is None:
        interval = keys.count("no_rope_layer_interval", 4)
        rotated = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or not all(r in (0, 1) for r in rotated):
        raise keys.error("no_rope_layers", f"a list of {layers} times 0 or 1")
    return tuple(i for i, r in enumerate(rotated) if not r)
