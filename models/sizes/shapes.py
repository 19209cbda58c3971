"""Names and shapes of weights and saved tensors. No torch.

Legend: N tokens, D width, H query heads, K key/value heads, d head width, F hidden width, V vocabulary; E experts, k of
them for each token, I hidden width of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import prod

from trireme.models.config import InputError, Lora, ModelConfig
from trireme.models.families.names import adapter_names

Group = list[tuple[str, tuple[int, ...]]]  # neighbours in memory: a fused operand
HALVES = ("attention", "mlp")
DENSE = "dense "  # before the kind of a unit without experts among others
SCANS = "scan "  # before that, of a unit whose mixer is a recurrence
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # of all experts of a layer


def unit_names(cfg: ModelConfig) -> list[str]:
    """The units' names in file names and log lines."""
    short = {"block": "block", "attention": "attn", "mlp": "mlp"}
    inner = (f"{short[bare(kind(cfg, u))]}{layer(cfg, u):03d}" for u in range(1, cfg.n_units - 1))
    return ["embed", *inner, "head"]


def kind(cfg: ModelConfig, u: int) -> str:
    """The kind of unit u: "embed", "block", "attention" (any mixer), "mlp" or "head".

    With DENSE before it, the MLP is plain where other layers have experts; with SCANS before that, the mixer is a
    recurrence. An "mlp" has SCANS if MLPs next to a recurrence have other names.
    """
    if u in (0, cfg.n_units - 1):
        return "head" if u else "embed"
    found = HALVES[(u - 1) % 2] if cfg.halves else "block"
    found = HALVES[layer(cfg, u) in cfg.mlp_layers] if cfg.mlp_layers else found
    found = DENSE + found if found != "attention" and cfg.is_dense(layer(cfg, u)) else found
    alike = found.endswith("mlp") and cfg.family.scan_names is None
    return SCANS + found if cfg.scans(layer(cfg, u)) and not alike else found


def bare(kind: str) -> str:
    """A kind without its prefixes SCANS and DENSE."""
    return kind.removeprefix(SCANS).removeprefix(DENSE)


def seen(cfg: ModelConfig, kind: str) -> tuple[ModelConfig, str]:
    """(the config that units of a kind use, the kind without its prefixes)."""
    found = cfg.dense if DENSE in kind else cfg
    return (found.scanned if kind.startswith(SCANS) else found), bare(kind)


def inner_kinds(cfg: ModelConfig) -> tuple[str, ...]:
    """The bare kinds of the inner units: those that make a block, in order, or those that layers are."""
    return HALVES if cfg.halves or cfg.mlp_layers else ("block",)


def layer(cfg: ModelConfig, u: int) -> int:
    return (u - 1) // (2 if cfg.halves else 1)


# ---------------------------------------------------------------- weights


def embedding_name(cfg: ModelConfig) -> str:
    """The token embedding (V, D)."""
    return f"{cfg.names.embed}.weight"


def output_name(cfg: ModelConfig) -> str:
    """The output matrix (V, D), or that of a score head; the token embedding if tied."""
    return embedding_name(cfg) if cfg.tied else f"{cfg.names.output}.weight"


def weight_groups(cfg: ModelConfig, u: int) -> list[Group]:
    """(Hugging Face name, shape) of a unit's tensors, in groups of neighbours in memory for storage.layout.pack."""
    return [group for part in weight_parts(cfg, u) for group in part]


def all_groups(cfg: ModelConfig) -> Iterator[Group]:
    """weight_groups of all units."""
    return (group for u in range(cfg.n_units) for group in weight_groups(cfg, u))


def weight_parts(cfg: ModelConfig, u: int) -> list[list[Group]]:
    """weight_groups by part: a block's are its attention and MLP."""
    cfg, what = seen(cfg, kind(cfg, u))
    if what == "embed":
        return [_embed_groups(cfg)]
    if what == "head":
        return [_head_groups(cfg)]
    prefix = cfg.names.prefix(layer(cfg, u))
    mixer = _scan_groups(cfg) if cfg.scanning else _attention_groups(cfg)
    if cfg.both:
        mixer += _scan_groups(cfg.scanned, norm=False)
    parts = {"attention": mixer, "mlp": _expert_groups(cfg) if cfg.experts else _mlp_groups(cfg)}
    mine = parts.values() if what == "block" else [parts[what]]
    return [[[(prefix + name, shape) for name, shape in group] for group in groups] for groups in mine]


def on_disk(cfg: ModelConfig, name: str, shape: tuple[int, ...]) -> Group:
    """The tensors of a checkpoint that make up a tensor in memory, in order: itself, or for example one per expert."""
    if cfg.experts and len(shape) == 1 and name.endswith((f".{GATE_UP}_bias", f".{DOWN}_bias")):
        return [(name, (cfg.experts.count, shape[0] // cfg.experts.count))]
    if cfg.names.correction_row and len(shape) == 1 and name.endswith(cfg.names.correction):
        return [(name, (1, *shape))]
    if cfg.names.conv and name.endswith(f".{cfg.names.conv}.weight"):
        if cfg.scan is None or not cfg.scan.parts:
            return [(name, (shape[0], 1, shape[-1]))]
        parts = zip(cfg.names.convs, cfg.scan.parts, strict=True)
        return [(name.replace(cfg.names.conv, part), (rows, 1, shape[-1])) for part, rows in parts]
    before, within, what = name.rpartition(f"{cfg.names.experts}.")
    if len(shape) == 3 and cfg.names.stacked and within:
        return [(before + cfg.names.stacked[what == DOWN], shape)]
    if len(shape) < 3 or not (cfg.names.each and cfg.names.experts):
        return [(name, shape)]
    prefix, what = name.rsplit(".", 1)
    each = cfg.names.each[-1:] if what == DOWN else cfg.names.each[:-1]
    one = (shape[1] // len(each), shape[2])
    return [(f"{prefix}.{e}.{matrix}.weight", one) for e in range(shape[0]) for matrix in each]


def within_experts(cfg: ModelConfig, name: str) -> tuple[str, int | None, int | None]:
    """(name in memory, expert, half) of a stored tensor: which part of the matrix of all experts it is.

    expert and half are None where it has all of them; half is 0 for gate, 1 for up. Of other tensors: (name, None,
    None).
    """
    for matrix, stacked in zip((GATE_UP, DOWN), cfg.names.stacked, strict=False):
        if name.endswith(f".{stacked}"):
            return f"{name.removesuffix(stacked)}{cfg.names.experts}.{matrix}", None, None
    before, _, last = name.removesuffix(".weight").rpartition(".")
    layer, _, expert = before.rpartition(".")
    if last not in cfg.names.each or not expert.isdigit():
        return name, None, None
    half, ups = cfg.names.each.index(last), len(cfg.names.each) - 1
    if half == ups:
        return f"{layer}.{DOWN}", int(expert), None
    return f"{layer}.{GATE_UP}", int(expert), half if ups > 1 else None


def stored_tensors(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """name -> shape of all that a checkpoint of the model holds."""
    return dict(stored for group in all_groups(cfg) for name, shape in group for stored in on_disk(cfg, name, shape))


def trained_parts(cfg: ModelConfig, u: int) -> list[list[Group]]:
    """weight_parts of a unit without frozen groups, with adapters."""
    lora = cfg.lora if 0 < u < cfg.n_units - 1 else None
    return [
        [group for group in part if not is_frozen(cfg, group)] + (_adapter_groups(cfg, lora, part) if lora else [])
        for part in weight_parts(cfg, u)
    ]


def frozen_groups(cfg: ModelConfig, u: int) -> list[Group]:
    return [group for group in weight_groups(cfg, u) if is_frozen(cfg, group)]


def is_packed(cfg: ModelConfig, group: Group) -> bool:
    """Whether all matrices of a group are packed in files."""
    return cfg.packing is not None and all(len(shape) > 1 and _matches(name, cfg.packed) for name, shape in group)


def is_frozen(cfg: ModelConfig, group: Group) -> bool:
    """Whether a group is frozen, as a router's correction always is, and a score head with adapters never.

    Raises InputError where only some tensors of the one matmul are.
    """
    if len(group) == 1 and cfg.names.correction and group[0][0].endswith(cfg.names.correction):
        return True
    if cfg.scores and cfg.lora and group[0][0] == output_name(cfg):
        return False
    found = [_matches(name, cfg.frozen) for name, _ in group]
    if any(found) and not all(found):
        raise InputError(
            f"{', '.join(name for name, _ in group)} are multiplied as one matrix: freeze all of them, or none."
        )
    return all(found)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether the last glob that matches `name` is one without `!`."""
    found = (not p.startswith("!") for p in reversed(patterns) if fnmatchcase(name, p.removeprefix("!")))
    return next(found, False)


def _adapter_groups(cfg: ModelConfig, lora: Lora, groups: list[Group]) -> list[Group]:
    """Adapters of a part: of each matmul every A (rank, in), neighbours, then every B (out, rank).

    Of experts all A, by expert and rank (E rank, in), and all B (E rank, out).
    """
    found: list[Group] = []
    for group in groups:
        name, shape = group[0]
        if len(shape) == 3 and lora.adapts(name.rpartition(".")[0]):
            features = shape[:0:-1] if cfg.names.experts_in_out else shape[1:]  # (out, in)
            sizes = zip(adapter_names(name), reversed(features), strict=True)
            found += [[(part, (shape[0] * lora.rank, n))] for part, n in sizes]
        matrices = [(name.removesuffix(".weight"), shape) for name, shape in group if len(shape) == 2]
        adapted = [(adapter_names(module), shape) for module, shape in matrices if lora.adapts(module)]
        rows, columns = (1, 0) if cfg.names.in_out else (0, 1)
        if adapted:
            found.append([(a, (lora.rank, shape[columns])) for (a, _), shape in adapted])
            found.append([(b, (shape[rows], lora.rank)) for (_, b), shape in adapted])
    return found


def adapts_experts(name: str) -> bool:
    """Whether a tensor is an adapter of a layer's experts."""
    return f".experts.{GATE_UP}.lora_" in name or f".experts.{DOWN}.lora_" in name


def features(cfg: ModelConfig, names: tuple[str, ...]) -> tuple[int, ...]:
    """Output features of each matrix of a matmul, given their names within a block."""
    own = cfg.names
    if cfg.latent and names == own.qkv:
        return cfg.latent.q_rank or cfg.q_width, cfg.latent.kv_rank + cfg.latent.rope
    if cfg.latent and names in ((own.q_b,), (own.kv_b,)):
        return (cfg.q_width if names == (own.q_b,) else cfg.n_heads * (cfg.latent.nope + cfg.latent.value),)
    if names == own.qkv:
        gated = cfg.q_width * (1 + cfg.attention_gate)
        return (cfg.qkv_width,) if len(names) == 1 else (gated, cfg.kv_width, cfg.kv_width)
    if cfg.scan and names == own.mixed:
        heads, wide = cfg.scan.heads, cfg.scan.value_width
        grouped = (cfg.scan.channels + wide, 2 * heads)
        if len(names) == 1:
            return (cfg.scan.mixed_width,)
        if own.convs:
            return cfg.scan.key_width, cfg.scan.key_width, wide, wide, heads, heads
        return grouped if own.mixed_by_head else (cfg.scan.channels, wide, heads, heads)
    if cfg.experts and cfg.experts.latent and names == (own.latent_in,):
        return (cfg.experts.latent,)
    if names == own.up:
        ffn = cfg.experts.shared if cfg.experts else cfg.ffn
        matrices = 1 + cfg.gated
        return (matrices * ffn,) if len(names) == 1 else (ffn,) * matrices
    return (cfg.width,)


def _embed_groups(cfg: ModelConfig) -> list[Group]:
    tokens: Group = [(embedding_name(cfg), (cfg.vocab, cfg.width))]
    positions: Group = [(f"{cfg.names.positions}.weight", (cfg.max_positions, cfg.width))]
    return [tokens, positions] if cfg.rope is None else [tokens]


def _head_groups(cfg: ModelConfig) -> list[Group]:
    output: list[Group] = [] if cfg.tied else [[(output_name(cfg), (cfg.outputs, cfg.width))]]
    return output + _norm(cfg, cfg.names.final_norm)


def _norm(cfg: ModelConfig, *names: str) -> list[Group]:
    """Groups of norms over the width; the name "" stands for none."""
    parts = ("weight", "bias") if cfg.family.layer_norm else ("weight",)
    return [[(f"{name}.{part}", (cfg.width,))] for name in names if name for part in parts]


def _matrix(cfg: ModelConfig, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Group:
    """Neighbouring matrices of `rows` features each."""
    return [
        (f"{name}.weight", (columns, n) if cfg.names.in_out else (n, columns))
        for name, n in zip(names, rows, strict=True)
    ]


def _bias(names: tuple[str, ...], rows: tuple[int, ...]) -> Group:
    return [(f"{name}.bias", (n,)) for name, n in zip(names, rows, strict=True)]


def _attention_groups(cfg: ModelConfig) -> list[Group]:
    names, D = cfg.names, cfg.width
    rows = features(cfg, names.qkv)
    groups = [
        _matrix(cfg, names.qkv, rows, D),
        _matrix(cfg, (names.o,), (D,), cfg.attn_width),
        *_norm(cfg, names.norm1, names.post1),
    ]
    if cfg.latent:
        ranks = [(names.q_b, names.q_norm, cfg.latent.q_rank), (names.kv_b, names.k_norm, cfg.latent.kv_rank)]
        for matrix, norm, rank in ranks[not names.q_b :]:
            groups += [_matrix(cfg, (matrix,), features(cfg, (matrix,)), rank), [(f"{norm}.weight", (rank,))]]
    if cfg.qk_norm:
        wide = cfg.family.qk_norm == "width"
        widths = (cfg.q_width, cfg.kv_width) if wide else (cfg.head_dim, cfg.head_dim)
        groups += [[(f"{n}.weight", (d,))] for n, d in zip((names.q_norm, names.k_norm), widths, strict=True)]
    if names.sinks:
        groups.append([(names.sinks, (cfg.n_heads,))])
    if cfg.qkv_bias:
        groups.append(_bias(names.qkv, rows))
    if cfg.o_bias:
        groups.append(_bias((names.o,), (D,)))
    return groups


def _scan_groups(cfg: ModelConfig, norm: bool = True) -> list[Group]:
    """Groups of a recurrence; `norm`: with the norm before it."""
    names, own = cfg.names, cfg.scan
    assert own is not None
    groups: list[Group] = [
        _matrix(cfg, names.mixed, features(cfg, names.mixed), cfg.width),
        _matrix(cfg, (names.mixed_o,), (cfg.width,), own.value_width),
        [(f"{names.conv}.weight", (own.channels, own.taps))],
        *_norm(cfg, names.norm1 if norm else ""),
        [(names.decay, (own.heads,))],
        [(names.step, (own.heads,))],
    ]
    if own.normed:
        groups.append([(f"{names.mixed_norm}.weight", (own.value_dim if own.delta else own.value_width,))])
    if own.conv_bias:
        groups.append([(f"{names.conv}.bias", (own.channels,))])
    if names.skip:
        groups.append([(names.skip, (own.heads,))])
    return groups


def _mlp_groups(cfg: ModelConfig) -> list[Group]:
    names, D = cfg.names, cfg.width
    rows = features(cfg, names.up)
    groups = [
        _matrix(cfg, names.up, rows, D),
        _matrix(cfg, (names.down,), (D,), cfg.ffn),
        *_norm(cfg, names.norm2, names.post2),
    ]
    if cfg.mlp_bias:
        groups += [_bias(names.up, rows), _bias((names.down,), (D,))]
    return groups


def expert_shape(cfg: ModelConfig, matrix: str) -> tuple[int, int]:
    """The shape of one expert's GATE_UP or DOWN in memory."""
    assert cfg.experts is not None
    inner = expert_input(cfg)
    rows, columns = (up_width(cfg), inner) if matrix == GATE_UP else (inner, cfg.experts.width)
    return (columns, rows) if cfg.names.experts_in_out else (rows, columns)


def expert_input(cfg: ModelConfig) -> int:
    """Features of the inputs and outputs of experts: the model's width, or that of latents."""
    return cfg.experts.latent or cfg.width if cfg.experts else cfg.width


def of_an_expert(cfg: ModelConfig) -> int:
    """Elements of one expert's matrices."""
    return sum(prod(expert_shape(cfg, matrix)) for matrix in (GATE_UP, DOWN))


def _expert_groups(cfg: ModelConfig) -> list[Group]:
    names, own, D = cfg.names, cfg.experts, cfg.width
    assert own is not None
    groups: list[Group] = [
        [(f"{names.experts}.{GATE_UP}", (own.count, *expert_shape(cfg, GATE_UP)))],
        [(f"{names.experts}.{DOWN}", (own.count, *expert_shape(cfg, DOWN)))],
        [(f"{names.router}.weight", (own.count, D))],
    ]
    if own.bias:  # flat: vectors have no weight decay
        groups.append([(f"{names.experts}.{GATE_UP}_bias", (own.count * 2 * own.width,))])
        groups.append([(f"{names.experts}.{DOWN}_bias", (own.count * D,))])
        groups.append([(f"{names.router}.bias", (own.count,))])
    if names.correction:
        groups.append([(names.correction, (own.count,))])
    if own.shared:
        groups += [_matrix(cfg, names.up, features(cfg, names.up), D), _matrix(cfg, (names.down,), (D,), own.shared)]
    if own.shared_gate:
        groups.append([(f"{names.shared_gate}.weight", (1, D))])
    if own.latent:
        groups.append(_matrix(cfg, (names.latent_in,), (own.latent,), D))
        groups.append(_matrix(cfg, (names.latent_out,), (D,), own.latent))
    return groups + _norm(cfg, names.norm2)


def parameters(cfg: ModelConfig, u: int | None = None) -> int:
    """Number of parameters of a unit, or of the model."""
    groups = all_groups(cfg) if u is None else weight_groups(cfg, u)
    return sum(prod(shape) for group in groups for _, shape in group)


# ---------------------------------------------------------------- saved tensors


def up_name(cfg: ModelConfig) -> str:
    """The name of the result of the MLP's first matmul."""
    return "gate_up" if cfg.gated else "fc"


def up_width(cfg: ModelConfig) -> int:
    """Features of the MLP's first matmul."""
    ffn = cfg.experts.width if cfg.experts else cfg.ffn
    return 2 * ffn if cfg.gated else ffn


def hidden_width(cfg: ModelConfig) -> int:
    """Features of a token's activation in the MLP."""
    return cfg.experts.chosen * cfg.experts.width if cfg.experts else cfg.ffn


def chosen(cfg: ModelConfig) -> int:
    """Rows of the MLP's matmuls for each token."""
    return cfg.experts.chosen if cfg.experts else 1


def saved_shapes(cfg: ModelConfig, tokens: int, kind: str = "block") -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> (shape, "compute" or "F32") of the tensors that forward can save besides its input.

    Results are bitwise identical for any subset of them. attn_out without lse is of no use.
    """
    N, (cfg, kind) = tokens, seen(cfg, kind)
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    if kind != "mlp" and not cfg.scanning:
        found["qkv"] = (N, cfg.qkv_width), "compute"
        found["attn_out"] = (N, cfg.attn_width), "compute"
        found["lse"] = (cfg.n_heads, N), "F32"
        if cfg.names.post1:
            found["attn_branch"] = (N, cfg.width), "compute"
    if kind != "mlp" and (cfg.scanning or cfg.both):
        assert cfg.scan is not None
        found["mixed"] = (N, cfg.scan.mixed_width), "compute"
        found["scan_out"] = (N, cfg.scan.value_width), "compute"
    if kind == "block" and not cfg.parallel:
        found["resid"] = (N, cfg.width), "compute"
    if kind != "attention":
        if not is_sliced(cfg):  # then of several units
            found[up_name(cfg)] = (N * chosen(cfg), up_width(cfg)), "compute"
        if cfg.experts and cfg.experts.shared:
            found["shared_up"] = (N, (1 + cfg.gated) * cfg.experts.shared), "compute"
        if cfg.experts and cfg.experts.latent:
            found["latent_sum"] = (N, cfg.experts.latent), "compute"
        if cfg.names.post2:
            found["mlp_branch"] = (N, cfg.width), "compute"
    return found


def is_sliced(cfg: ModelConfig) -> bool:
    """Whether a layer's experts come in slices. `cfg` is the layer's (ModelConfig.at)."""
    return cfg.slices > 1 and cfg.halves and cfg.experts is not None


def passed_shapes(cfg: ModelConfig, tokens: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> (shape, dtype) of the tensors that pass from slice to slice of a layer's experts, besides their input.

    sum (of the experts so far), weights and experts (the routing), and in backward d_weights (the weights' gradient).
    """
    N, k = tokens, chosen(cfg)
    sums = {"sum": ((N, cfg.width), "F32"), "weights": ((N, k), "F32"), "d_weights": ((N, k), "F32")}
    return {**sums, "experts": ((N, k), "I32")}


def saved_bytes(cfg: ModelConfig, tokens: int, itemsize: int, kind: str = "block") -> dict[str, int]:
    """name -> bytes of saved_shapes, `itemsize` per compute element."""
    shapes = saved_shapes(cfg, tokens, kind)
    return {name: prod(shape) * (4 if dtype == "F32" else itemsize) for name, (shape, dtype) in shapes.items()}
