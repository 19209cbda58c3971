"""Names and shapes of the weights within a layer, in groups of neighbours in memory. No torch. Legend: shapes.py."""

from __future__ import annotations

from functools import lru_cache

from trireme.models.families.experts import Experts
from trireme.models.families.scans import Scan
from trireme.models.layers import Attention, Layer, Mlp

Group = list[tuple[str, tuple[int, ...]]]  # neighbours in memory: a fused operand
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # of all experts of a layer


@lru_cache
def matmuls(layer: Layer) -> dict[tuple[str, ...], tuple[int, tuple[int, ...]]]:
    """The linear layers: names of the matrices of a matmul -> (input features, output features of each matrix).

    Without routers and the matrices of experts, of which a matmul has many.
    """
    D, names, features = layer.width, layer.mixer_names, dict[tuple[str, ...], tuple[int, tuple[int, ...]]]()
    for mixer in layer.mixers:
        if isinstance(mixer, Scan):
            features[names.mixed] = D, _mixed_features(mixer, len(names.mixed))
            features[(names.mixed_o,)] = mixer.value_width, (D,)
            continue
        features[names.qkv] = D, (mixer.qkv_width,) if len(names.qkv) == 1 else mixer.parts
        if latent := mixer.latent:
            features[(names.kv_b,)] = latent.kv_rank, (mixer.heads * (latent.nope + latent.value),)
            if names.q_b:
                features[(names.q_b,)] = latent.q_rank, (mixer.q_width,)
        features[(names.o,)] = mixer.out_width, (D,)
    up, down = layer.mlp_names.up, (layer.mlp_names.down,)
    for mlp in layer.mlps:
        if width := mlp.width if isinstance(mlp, Mlp) else mlp.shared:
            matrices = 1 + mlp.gated
            features[up] = D, (matrices * width,) if len(up) == 1 else (width,) * matrices
            features[down] = width, (D,)
        if isinstance(mlp, Experts) and mlp.latent:
            features[(layer.mlp_names.latent_in,)] = D, (mlp.latent,)
            features[(layer.mlp_names.latent_out,)] = mlp.latent, (D,)
    return features


def _mixed_features(spec: Scan, matrices: int) -> tuple[int, ...]:
    """Output features of each of so many projections of a recurrence."""
    heads, keys, values = spec.heads, spec.key_width, spec.value_width
    return {
        1: (spec.mixed_width,),
        2: (spec.channels + values, 2 * heads),
        4: (spec.channels, values, heads, heads),
        6: (keys, keys, values, values, heads, heads),
    }[matrices]


def parts_of(layer: Layer) -> list[list[Group]]:
    """The groups of a layer by part: its mixers, its MLPs."""
    mixers = [_scan(layer, spec) if isinstance(spec, Scan) else _attention(layer, spec) for spec in layer.mixers]
    mlps = [_experts(layer, spec) if isinstance(spec, Experts) else _mlp(layer, spec) for spec in layer.mlps]
    return [[group for groups in part for group in groups] for part in (mixers, mlps) if part]


def norms(layer: Layer, *names: str) -> list[Group]:
    """Groups of norms over the width; the name "" stands for none."""
    parts = ("weight", "bias") if layer.norm == "layer" else ("weight",)
    return [[(f"{name}.{part}", (layer.width,))] for name in names if name for part in parts]


def _matrix(layer: Layer, *names: str) -> Group:
    """The matrices of a matmul."""
    n_in, features = matmuls(layer)[names]
    return [
        (f"{name}.weight", (n_in, n) if layer.in_out else (n, n_in)) for name, n in zip(names, features, strict=True)
    ]


def _bias(layer: Layer, *names: str) -> Group:
    _, features = matmuls(layer)[names]
    return [(f"{name}.bias", (n,)) for name, n in zip(names, features, strict=True)]


def _vector(name: str, n: int) -> Group:
    return [(name, (n,))]


def _attention(layer: Layer, spec: Attention) -> list[Group]:
    names = layer.mixer_names
    groups = [_matrix(layer, *names.qkv), _matrix(layer, names.o), *norms(layer, names.norm, names.post)]
    if spec.latent:
        if names.q_b:
            groups += [_matrix(layer, names.q_b), _vector(f"{names.q_norm}.weight", spec.latent.q_rank)]
        groups += [_matrix(layer, names.kv_b), _vector(f"{names.k_norm}.weight", spec.latent.kv_rank)]
    if spec.norm in ("head", "width"):
        widths = (spec.q_width, spec.kv_width) if spec.norm == "width" else (spec.dim, spec.dim)
        groups += [_vector(f"{n}.weight", d) for n, d in zip((names.q_norm, names.k_norm), widths, strict=True)]
    if names.sinks:
        groups.append(_vector(names.sinks, spec.heads))
    if spec.bias:
        groups.append(_bias(layer, *names.qkv))
    if spec.o_bias:
        groups.append(_bias(layer, names.o))
    return groups


def _scan(layer: Layer, spec: Scan) -> list[Group]:
    """Those of a recurrence, without the norm before it where another mixer has it."""
    names, first = layer.mixer_names, layer.mixers[0] is spec
    groups: list[Group] = [
        _matrix(layer, *names.mixed),
        _matrix(layer, names.mixed_o),
        [(f"{names.conv}.weight", (spec.channels, spec.taps))],
        *norms(layer, names.norm if first else ""),
        _vector(names.decay, spec.heads),
        _vector(names.step, spec.heads),
    ]
    if spec.normed:
        groups.append(_vector(f"{names.mixed_norm}.weight", spec.value_dim if spec.delta else spec.value_width))
    if spec.conv_bias:
        groups.append(_vector(f"{names.conv}.bias", spec.channels))
    if names.skip:
        groups.append(_vector(names.skip, spec.heads))
    return groups


def _mlp(layer: Layer, spec: Mlp) -> list[Group]:
    names = layer.mlp_names
    groups = [
        _matrix(layer, *names.up),
        _matrix(layer, names.down),
        *norms(layer, names.norm, names.post_mlp, names.post),
    ]
    if names.scalar:
        groups.append(_vector(names.scalar, 1))
    if spec.bias:
        groups += [_bias(layer, *names.up), _bias(layer, names.down)]
    return groups


def _experts(layer: Layer, spec: Experts) -> list[Group]:
    names, D = layer.mlp_names, layer.width
    groups: list[Group] = [
        *norms(layer, names.post_experts if len(layer.mlps) > 1 else names.post),
        [(f"{names.experts}.{GATE_UP}", (spec.count, *expert_shape(layer, GATE_UP)))],
        [(f"{names.experts}.{DOWN}", (spec.count, *expert_shape(layer, DOWN)))],
        [(f"{names.router}.weight", (spec.count, D))],
    ]
    if names.router_scale:
        groups += [_vector(names.router_scale, D), _vector(names.expert_scale, spec.count)]
    if spec.bias:  # flat: vectors have no weight decay
        groups.append(_vector(f"{names.experts}.{GATE_UP}_bias", spec.count * 2 * spec.width))
        groups.append(_vector(f"{names.experts}.{DOWN}_bias", spec.count * D))
        groups.append(_vector(f"{names.router}.bias", spec.count))
    if names.correction:
        groups.append(_vector(names.correction, spec.count))
    if spec.shared:
        groups += [_matrix(layer, *names.up), _matrix(layer, names.down)]
    if spec.shared_gate:
        groups.append([(f"{names.shared_gate}.weight", (1, D))])
    if spec.latent:
        groups += [_matrix(layer, names.latent_in), _matrix(layer, names.latent_out)]
    return groups + norms(layer, names.norm_experts or names.norm)


def expert_shape(layer: Layer, matrix: str) -> tuple[int, int]:
    """The shape of one expert's GATE_UP or DOWN in memory."""
    assert layer.experts is not None
    inner = expert_input(layer)
    rows, columns = (up_width(layer.experts), inner) if matrix == GATE_UP else (inner, layer.experts.width)
    return (columns, rows) if layer.mlp_names.experts_in_out else (rows, columns)


def expert_input(layer: Layer) -> int:
    """Features of the inputs and outputs of experts: the model's width, or that of latents."""
    return layer.experts.latent or layer.width if layer.experts else layer.width


def up_name(spec: Mlp | Experts) -> str:
    """The name of the result of an MLP's first matmul."""
    if isinstance(spec, Mlp) and spec.shared:
        return "shared_up"
    return "gate_up" if spec.gated else "fc"


def up_width(spec: Mlp | Experts) -> int:
    """Features of an MLP's first matmul, or of an expert's."""
    return 2 * spec.width if spec.gated else spec.width
