"""Windows of attention and layers without rope, as config.json lists them. No torch."""

from __future__ import annotations

from trireme.models.families.keys import InputError, Keys
from trireme.models.families.rope import GLOBAL, LOCAL
from trireme.models.families.table import Family


def sliding_window(keys: Keys, family: Family, layers: int) -> tuple[int, int, tuple[int, ...]]:
    """(window, its first layer, later layers without it); (0, 0, ()) for none."""
    given = "sliding_window" in keys.raw
    absent = keys.raw["sliding_window"] is None if given else family.window is None
    absent = absent or family.windows == "none"
    window = 0 if absent else keys.count("sliding_window", family.window)
    if family.windows == "all":
        return window, 0, ()
    if family.windows == "dense":
        _refuse_hybrids(keys, layers)
        return 0, 0, ()
    if family.windows == "pattern":
        return _pattern(keys, family, layers, window)
    if family.windows == "none" or not keys.flag("use_sliding_window", False):
        window = 0
    first = keys.raw.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise keys.error("max_window_layers", "an integer >= 0")
    first = min(first, layers) if window else layers
    types = keys.raw.get("layer_types")
    wanted = lambda: [GLOBAL] * first + [LOCAL] * (layers - first)
    if types is not None and not (isinstance(types, list) and len(types) == layers and types == wanted()):
        raise InputError(
            f'{keys.where}: "layer_types" must be full_attention in the first {first} layers and sliding_attention in '
            "the others, as use_sliding_window and max_window_layers say; other patterns are not supported."
        )
    return (window, first, ()) if first < layers else (0, 0, ())


def _pattern(keys: Keys, family: Family, layers: int, window: int) -> tuple[int, int, tuple[int, ...]]:
    """As sliding_window, by `layer_types` or the family's period."""
    types = keys.raw.get("layer_types")
    if types is None:
        period = keys.count("sliding_window_pattern", family.period or (layers + 1 if window else 1))
        types = [GLOBAL if (i + 1) % period == 0 else LOCAL for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(t in (GLOBAL, LOCAL) for t in types):
        raise keys.error("layer_types", f"a list of {layers} names, each {GLOBAL} or {LOCAL}")
    if LOCAL not in types:
        return 0, 0, ()
    if not window:
        raise keys.error("sliding_window", f"a positive integer, as layer_types names {LOCAL}")
    return window, 0, tuple(i for i, kind in enumerate(types) if kind == GLOBAL)


def _refuse_hybrids(keys: Keys, layers: int) -> None:
    """InputError unless every layer is attention with a plain MLP."""
    keys.refuse_unless("num_local_experts", (0,))
    types = keys.raw.get("layer_types") or keys.raw.get("layers_block_type")
    if not isinstance(types, list) or len(types) != layers or any(t not in ("attention", GLOBAL) for t in types):
        raise keys.error("layer_types", f'a list of {layers} times "attention": Mamba layers are not supported')


def unrotated_layers(keys: Keys, layers: int) -> tuple[int, ...]:
    """Layers without rope."""
    rotated = keys.raw.get("no_rope_layers")
    if rotated is None:
        every = keys.count("no_rope_layer_interval", 4)
        rotated = [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or not all(r in (0, 1) for r in rotated):
        raise keys.error("no_rope_layers", f"a list of {layers} times 0 or 1")
    return tuple(i for i, r in enumerate(rotated) if not r)
