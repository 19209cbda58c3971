"""Maps names in Hugging Face checkpoints to those of transformers' *ForCausalLM, which this project uses. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from trireme.models.config import InputError, ModelConfig, renamed
from trireme.models.families.names import single_names, stacked_names
from trireme.models.families.scans import Scan
from trireme.models.sizes.narrow import packed_parts
from trireme.models.sizes.shapes import output_name, stored_tensors

Shape = tuple[int, ...]

OUTPUTS = ("lm_head.weight", "embed_out.weight")  # ends of names of output matrices; the second is of one family
# Ends of names of buffers that older versions of transformers stored.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
_IN_ONE = ".experts.gate_up_proj", ".experts.up_proj"  # ends of names of all experts, in transformers' modules
# Parts of names by FSDP, activation checkpointing, torch.compile, DDP.
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")


def as_stored(cfg: ModelConfig, stored: Mapping[str, Shape]) -> ModelConfig:
    """`cfg` with experts and convolutions stored as in `stored` (name -> shape): files have them in several ways."""
    if cfg.scan and cfg.names.mixer.convs:
        parts = _convs(cfg, stored)
        split = lambda m: replace(m, parts=parts) if isinstance(m, Scan) else m
        cfg = replace(cfg, layers=tuple(replace(layer, mixers=tuple(map(split, layer.mixers))) for layer in cfg.layers))
    mixed = cfg.family.names.mixer.mixed_in_one
    if mixed and any(name.endswith(f".{mixed}.weight") for name in stored):
        fused = lambda layer: replace(layer, mixer_names=replace(layer.mixer_names, mixed=(mixed,)))
        cfg = replace(cfg, layers=tuple(map(fused, cfg.layers)))
    spec, names = cfg.experts, cfg.names.mlp
    if spec is None:
        return cfg
    single = any(f".{names.experts}.0." in name for name in stored)  # also where an MTP layer has them in one
    if single and names.stacked:
        return renamed(cfg, single_names)
    if not single and (names.single or names.stacked) and any(name.endswith(_IN_ONE) for name in stored):
        return renamed(cfg, stacked_names)
    if not names.either:
        return cfg
    out_in = {"gate_up_proj": (spec.count, 2 * spec.width, cfg.width), "down_proj": (spec.count, cfg.width, spec.width)}
    shapes = {name.rpartition(".")[2]: tuple(shape) for name, shape in stored.items() if f".{names.experts}." in name}
    square = {name for name, (_, rows, columns) in out_in.items() if rows == columns}
    if all(shapes.get(name) == shape for name, shape in out_in.items() if name not in square):
        return renamed(cfg, stacked_names)
    return cfg


def _convs(cfg: ModelConfig, stored_shapes: Mapping[str, Shape]) -> tuple[int, ...]:
    """Channels of the parts of a convolution that is stored in parts; () if it is stored as one.

    transformers writes parts of about equal size, whatever channels they hold.
    """
    i, layer = next((i, layer) for i, layer in enumerate(cfg.layers) if layer.scan)
    scan, names, prefix = layer.scan, layer.mixer_names, cfg.names.prefix(i)
    assert scan is not None
    short = prefix.removeprefix(cfg.names.base)
    shape = lambda name: stored_shapes.get(f"{prefix}{name}.weight") or stored_shapes.get(f"{short}{name}.weight")
    if shape(names.conv):
        return ()
    stored = [shape(part) for part in names.convs]
    rows = tuple(shape[0] for shape in stored if shape)
    return rows if len(rows) == len(scan.parts) and sum(rows) == scan.channels else scan.parts


def canonical_names(
    cfg: ModelConfig, stored: Mapping[str, Shape], label: Callable[[str], str] = str
) -> dict[str, str | None]:
    """Names in `stored` (name -> shape) -> canonical names; None for a buffer and for tensors that are only copied.

    The base prefix may be missing; a tied matrix may have either name or both. A score head may be missing: a new one
    is made then; an output matrix in addition to a score head is not used. `label(name)` is how messages call a tensor,
    or the checkpoint. Raises InputError if a tensor is missing, unknown, or of another shape than config.json says.
    """
    experts = cfg.experts.count if cfg.experts and cfg.names.mlp.single else 1
    mixed = sum(layer.experts is not None for layer in cfg.layers)
    if mixed * experts + cfg.n_layers - mixed > len(stored):  # before work that grows with layers
        detail = f" of {experts:,} experts" if cfg.experts else ""
        raise InputError(
            f"{label('the checkpoint')} has {len(stored)} tensors, config.json calls for {cfg.n_layers:,} layers"
            f"{detail}. The weights and config.json are not of the same model, or it was not downloaded to the end."
        )
    wanted = stored_tensors(cfg)
    names = {name: _canonical(cfg, name, wanted, label) for name in stored}
    for name, target in names.items():
        if target is not None and tuple(stored[name]) != wanted[target]:
            raise InputError(
                f"{label(name)} has shape {list(stored[name])}, config.json says {list(wanted[target])}. "
                "The weights and config.json are not of the same model."
            )
    present = set(names.values())
    missing = [name for name in wanted if name not in present and not (cfg.scores and name == output_name(cfg))]
    if missing:
        suffix = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        lacks = f"{label('the checkpoint')} lacks {missing[0]}{suffix}"
        raise InputError(f"{lacks}, which config.json calls for. Download it again.")
    return names


def sources(cfg: ModelConfig, stored: Mapping[str, Shape], label: Callable[[str], str] = str) -> dict[str, str]:
    """Canonical name -> name in `stored` to read, of tensors, and of the parts of packed matrices.

    `label` and errors as in canonical_names.
    """
    names = canonical_names(cfg, stored, label)
    chosen: dict[str, str] = {}
    for name, target in names.items():
        if target is not None and (target not in chosen or not name.endswith(OUTPUTS)):
            chosen[target] = name
    for u in range(cfg.n_units):
        for packed in packed_parts(cfg, u).values():
            suffix = packed.part.suffix
            names_of_parts = (name for name, _ in packed.stored)
            chosen |= {name: chosen[name.removesuffix(suffix)] + suffix for name in names_of_parts}
    return chosen


def carried(cfg: ModelConfig, stored: Iterable[str]) -> list[str]:
    """Those of the names `stored` whose tensors the language model does not use: they are copied as they are."""
    return [name for name in stored if any(cfg.carries(full) for full in _in_full(cfg, name))]


def _canonical(cfg: ModelConfig, name: str, wanted: Mapping[str, Shape], label: Callable[[str], str]) -> str | None:
    for full in _in_full(cfg, name):
        if full in wanted:
            return full
        if full == OUTPUTS[0]:
            return None if cfg.scores else output_name(cfg)
        if cfg.carries(full) or full.endswith(_BUFFERS):
            return None
    wrapped = next((prefix for prefix in (*WRAPPERS, "base_model.model.") if name.startswith(prefix)), "")
    hint = (
        f"Its prefix {wrapped!r} is that of a wrapped model. Save the model inside, without it."
        if wrapped
        else "Adapters, quantized weights and other heads are not supported."
    )
    raise InputError(
        f"{label(name)} is not a tensor of a {cfg.model_type} language model as config.json describes it. {hint}"
    )


def _in_full(cfg: ModelConfig, name: str) -> Iterator[str]:
    """The canonical names that a stored name may stand for."""
    yield name
    yield cfg.names.base + name
    for stored, canonical in cfg.names.files.also:
        if stored in name:
            yield name.replace(stored, canonical)
            yield cfg.names.base + name.replace(stored, canonical)
    yield cfg.names.stored(name)
    if cfg.outer and cfg.outer.flat and name.startswith("model."):  # as of a text model with a vision tower
        yield "model.language_model." + name.removeprefix("model.")
    text = "language_model."  # in files of a multimodal model: model.layers and lm_head behind it
    if cfg.outer and cfg.outer.behind and name.startswith(text):
        inner = name.removeprefix(text)
        yield inner
        inner = inner.removeprefix("model.")
        yield "model.language_model." + inner
        if inner.startswith("blocks."):  # as transformers' save_pretrained names the layers of Kimi K2.5
            yield "model.language_model.layers." + inner.removeprefix("blocks.")
