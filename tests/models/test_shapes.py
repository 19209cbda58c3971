"""Names, FLOPs and bytes of the models, counted by hand or by watching what the blocks do."""

import types
import weakref
from collections import defaultdict
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from tiny import Tiny, empty_saved
from torch.utils._python_dispatch import TorchDispatchMode

from trireme.engine.memory import views
from trireme.engine.planner.sizes import find_model
from trireme.kernels import ops
from trireme.kernels.fp8.matmuls import fp8_matmul
from trireme.kernels.fp8.reference import E4M3, PAD
from trireme.kernels.loss import loss as cross_entropy
from trireme.kernels.loss.reference import Taught
from trireme.models import attention, experts, head, latent, linear, lora, mlp, model, norm, packed, shared
from trireme.models.config import Lora, Teaching, parse_config
from trireme.models.families.packing import FP8
from trireme.models.lora import Dropout
from trireme.models.mixers import scan
from trireme.models.packed import Sliced, grouped_mm
from trireme.models.sizes import costs, narrow, shapes, workspace
from trireme.storage.layout import pack

GPT2 = parse_config(dict(model_type="gpt2", vocab_size=50257, n_embd=768, n_layer=12, n_head=12))
LLAMA3_8B, QWEN3_30B = find_model("llama-8b"), find_model("qwen3-30b")
SMALL = dict(vocab_size=50, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
MIXTURE = SMALL | dict(
    model_type="qwen3_moe", num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=3,
    moe_intermediate_size=48,
)  # fmt: skip
LATENT = SMALL | dict(
    q_lora_rank=40, kv_lora_rank=24, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8,
    num_experts_per_tok=3, moe_intermediate_size=48, first_k_dense_replace=0, n_shared_experts=1, n_group=1,
    topk_group=1,
)  # fmt: skip
HYBRID = dict(
    num_hidden_layers=2, head_dim=32, num_key_value_heads=2, layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32,
)  # fmt: skip
MAMBA = dict(
    num_hidden_layers=2, num_key_value_heads=2, layer_types=["mamba", "attention"], mamba_n_heads=8, mamba_d_state=16,
    mamba_n_groups=2, shared_intermediate_size=160, residual_multiplier=0.5,
)  # fmt: skip
FALCON_H1 = SMALL | dict(
    model_type="falcon_h1", num_key_value_heads=2, head_dim=24, mamba_d_ssm=80, mamba_n_heads=4, mamba_d_state=16,
    ssm_multipliers=[0.35, 0.25, 0.7, 0.5, 0.9], ssm_out_multiplier=0.7, mlp_multipliers=[0.9, 0.6],
)  # fmt: skip
NEMOTRON = SMALL | dict(
    model_type="nemotron_h", num_hidden_layers=4, num_key_value_heads=2, head_dim=24, mamba_num_heads=4,
    mamba_head_dim=20, ssm_state_size=16, n_groups=2, n_routed_experts=8, num_experts_per_tok=3,
    moe_intermediate_size=48, moe_shared_expert_intermediate_size=160,
    layers_block_type=["linear_attention", "full_attention", "mlp", "moe"],
)  # fmt: skip
SMALL_MODELS = {
    "gpt2": dict(model_type="gpt2", vocab_size=50, n_embd=64, n_layer=1, n_head=4, n_positions=64),
    "llama": SMALL | dict(model_type="llama", num_key_value_heads=2, head_dim=24),
    "llama wide heads": SMALL | dict(model_type="llama", num_key_value_heads=4, head_dim=128),
    "qwen3": SMALL | dict(model_type="qwen3", num_key_value_heads=2, head_dim=32),
    "qwen3 moe": MIXTURE,
}
DIALECTS = {
    "phi3": SMALL | dict(model_type="phi3", num_key_value_heads=2),
    "granite": SMALL | dict(model_type="granite", residual_multiplier=0.5),
    "starcoder2": SMALL | dict(model_type="starcoder2", hidden_act="gelu_pytorch_tanh"),
    "olmo2": SMALL | dict(model_type="olmo2"),
    "qwen2 moe": MIXTURE | dict(model_type="qwen2_moe", shared_expert_intermediate_size=160),
    "mixtral": MIXTURE | dict(model_type="mixtral"),
    "gpt oss": MIXTURE
    | dict(model_type="gpt_oss", intermediate_size=48, rope_parameters=dict(rope_type="default", rope_theta=1e4)),
    "olmoe": MIXTURE | dict(model_type="olmoe", num_key_value_heads=4, head_dim=16),
    "glm4 moe": MIXTURE | dict(model_type="glm4_moe", n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=0),
    "a dense layer of glm4 moe": MIXTURE | dict(model_type="glm4_moe", n_routed_experts=8, num_hidden_layers=2),
    "gpt_neox": SMALL | dict(model_type="gpt_neox"),
    "gemma2": SMALL | dict(model_type="gemma2", head_dim=32),
    "arcee": SMALL | dict(model_type="arcee", hidden_act="relu2", mlp_bias=True),
    "jais2": SMALL | dict(model_type="jais2", hidden_act="relu2"),
    "hunyuan moe": MIXTURE
    | dict(model_type="hunyuan_v1_moe", moe_topk=MIXTURE["num_experts_per_tok"], intermediate_size=48),
    "hunyuan": SMALL | dict(model_type="hunyuan_v1_dense", num_key_value_heads=2),
    "granite moe": MIXTURE
    | dict(model_type="granitemoe", num_local_experts=8, intermediate_size=48, residual_multiplier=0.5),
    "ernie moe": MIXTURE
    | dict(model_type="ernie4_5_moe", moe_num_experts=8, moe_k=MIXTURE["num_experts_per_tok"], moe_layer_start_index=0),
    "deepseek v3": LATENT | dict(model_type="deepseek_v3", num_nextn_predict_layers=0),
    "deepseek v2, queries without a latent": LATENT | dict(model_type="deepseek_v2", q_lora_rank=None),
    "qwen3.5": SMALL | HYBRID | dict(model_type="qwen3_5_text"),
    "attention of qwen3.5": SMALL
    | HYBRID
    | dict(model_type="qwen3_5_text", full_attention_interval=1, layer_types=None),
    "qwen3 next": MIXTURE | HYBRID | dict(model_type="qwen3_next", shared_expert_intermediate_size=160),
    "olmo hybrid": SMALL | HYBRID | dict(model_type="olmo_hybrid", linear_value_head_dim=24),
    "attention of olmo hybrid": SMALL
    | HYBRID
    | dict(model_type="olmo_hybrid", layer_types=["full_attention", "linear_attention"]),
    "granite 4 hybrid": SMALL | MAMBA | dict(model_type="granitemoehybrid", num_local_experts=0),
    "falcon h1": FALCON_H1,
    "falcon h1 with norms": FALCON_H1 | dict(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2),
    "granite 4 hybrid with experts": SMALL
    | MAMBA
    | dict(model_type="granitemoehybrid", num_local_experts=8, num_experts_per_tok=3, intermediate_size=48),
    "gemma3": SMALL | dict(model_type="gemma3_text", head_dim=32, hidden_activation="gelu_pytorch_tanh"),
}


def test_parameters():
    assert shapes.parameters(GPT2) == 124_439_808  # GPT-2 small
    assert shapes.parameters(LLAMA3_8B) == 8_030_261_248  # Llama 3 8B
    assert shapes.parameters(LLAMA3_8B, 0) == 128256 * 4096


def test_units():
    cfg = GPT2
    names = shapes.unit_names(cfg)
    assert len(names) == cfg.n_units == 14
    assert (names[0], names[12], names[13]) == ("embed", "block011", "head")
    assert [g[0][0] for g in shapes.weight_groups(cfg, 13)] == ["transformer.ln_f.weight", "transformer.ln_f.bias"]


def test_vectors_come_last_in_a_layout():
    """So weight decay applies to a prefix; and q, k, v are neighbours."""
    layout = pack(shapes.weight_groups(LLAMA3_8B, 1), "BF16")
    dims = [len(t.shape) for t in layout.tensors]
    assert dims == sorted(dims, reverse=True)
    assert [t.name.split(".")[-2] for t in layout.tensors[:3]] == ["q_proj", "k_proj", "v_proj"]


@pytest.mark.parametrize("window", [0, 1, 3, 50])
def test_attended_pairs(window):
    lengths = [1, 7, 4]
    seen = sum(1 for n in lengths for q in range(n) for k in range(q + 1) if not window or q - k < window)
    assert costs.attended_pairs(lengths, window) == seen


def test_pairs_of_a_layer_are_the_mean_over_windows():
    cfg = parse_config(SMALL | dict(model_type="olmo3", num_hidden_layers=4, sliding_window=3))
    lengths = [1, 7, 4]
    by_layer = [costs.attended_pairs(lengths, cfg.layers[i].attention.window) for i in range(4)]
    assert by_layer == [by_layer[0]] * 3 + [costs.attended_pairs(lengths)]
    assert costs.layer_pairs(cfg, lengths) == sum(by_layer) // 4
    assert costs.layer_pairs(GPT2, lengths) == costs.attended_pairs(lengths)


def test_model_flops_are_six_a_parameter():
    cfg = LLAMA3_8B
    vectors = (2 * 32 + 1) * 4096
    matrices = shapes.parameters(cfg) - 128256 * 4096 - vectors
    assert costs.model_flops(cfg, 1000, 0) == 6 * 1000 * matrices
    pairs = costs.attended_pairs([1000])
    assert costs.model_flops(cfg, 1000, pairs) - costs.model_flops(cfg, 1000, 0) == 12 * pairs * 32 * 4096
    units = range(cfg.n_units)
    assert sum(costs.forward_flops(cfg, u, 1000, pairs) for u in units) * 3 == costs.model_flops(cfg, 1000, pairs)


def test_a_mixture_has_the_bytes_of_all_experts_and_the_flops_of_the_chosen():
    cfg = QWEN3_30B
    assert shapes.parameters(cfg) == 30_532_122_624  # Qwen3-30B-A3B
    assert shapes.parameters(find_model("qwen3-235b")) == 235_093_634_560  # Qwen3-235B-A22B
    embedding, vectors = 151936 * 2048, 48 * (2 * 2048 + 2 * 128) + 2048
    active = shapes.parameters(cfg) - embedding - vectors - 48 * 120 * 3 * 768 * 2048  # 120 of 128 are not taken
    assert costs.model_flops(cfg, 1000, 0) == 6 * 1000 * active
    assert costs.model_flops(replace(cfg, frozen=("*.mlp.*",)), 1000, 0) < 6 * 1000 * active
    assert shapes.saved_bytes(cfg, 10, 2, "mlp") == {"gate_up": 10 * 8 * 1536 * 2}


def test_units_of_nemotron():
    """Layers are a mixer or an MLP, and units."""
    cfg = find_model("nemotron-3-nano")
    assert cfg.n_units == 54
    assert cfg.attending == 6
    assert shapes.unit_names(cfg)[:7] == ["embed", "attn000", "mlp001", "attn002", "mlp003", "attn004", "attn005"]
    assert [shapes.kind(cfg, u) for u in (1, 2, 6)] == ["scan attention", "mlp", "attention"]
    assert shapes.saved_bytes(cfg, 10, 2, "mlp") == {"fc": 10 * 6 * 1856 * 2, "shared_up": 10 * 3712 * 2}


def test_units_of_glm():
    """GLM-4.5-Air: a dense layer, then experts; the parameters that are published, without the MTP layer."""
    cfg = find_model("glm-air")
    assert shapes.parameters(cfg) == 106_852_245_504 + 45 * 128  # and the corrections
    dense, sparse = (replace(cfg, halves=True, n_layers=n) for n in (1, 2))
    assert [shapes.kind(dense, u) for u in (1, 2)] == ["attention", "dense mlp"]
    assert [shapes.kind(sparse, u) for u in (3, 4)] == ["attention", "mlp"]
    assert shapes.saved_bytes(cfg, 10, 2, "dense mlp") == {"gate_up": 10 * 2 * 10944 * 2}
    assert shapes.saved_bytes(cfg, 10, 2, "mlp") == {"gate_up": 10 * 8 * 2816 * 2, "shared_up": 10 * 2816 * 2}
    embedding, vectors = 151552 * 4096, 46 * (2 * 4096 + 96 * 128 + 2 * 8 * 128) + 4096 + 45 * 128
    active = shapes.parameters(cfg) - embedding - vectors - 45 * 120 * 3 * 1408 * 4096
    assert costs.model_flops(cfg, 1000, 0) == 6 * 1000 * active


def test_saved_bytes():
    cfg = LLAMA3_8B
    assert shapes.saved_bytes(cfg, 10, 2) == {
        "qkv": 10 * 6144 * 2,
        "attn_out": 10 * 4096 * 2,
        "lse": 10 * 32 * 4,
        "resid": 10 * 4096 * 2,
        "gate_up": 10 * 28672 * 2,
    }


# ---------------------------------------------------------------- the blocks, watched


def _bare_ops():
    """The kernels as nothing but the memory that they return, which is what a fused kernel allocates."""
    new = torch.empty_like
    stats = lambda x, n=1: torch.empty(n, x.shape[0])
    glu = lambda gate_up: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    return types.SimpleNamespace(
        rmsnorm_fwd=lambda x, *_: (new(x), stats(x)[0]),
        rmsnorm_bwd=lambda dy, *rest: new(dy) if len(rest) < 6 or rest[5] is None else None,
        layernorm_fwd=lambda x, *_: (new(x), stats(x)[0], stats(x)[0]),
        layernorm_bwd=lambda dy, *rest: new(dy) if len(rest) < 8 or rest[7] is None else None,
        head_rmsnorm_fwd=lambda x, *_: (x.new_empty(x.shape), torch.empty(x.shape[:2])),
        head_rmsnorm_bwd=lambda *_: None,
        rope_=lambda *_: None,
        dropout=lambda x, *rest: new(x) if rest[3] is None else rest[3],
        swiglu_fwd=glu,
        geglu_fwd=glu,
        swiglu_bwd=lambda dy, gate_up: (new(gate_up), glu(gate_up)),
        geglu_bwd=lambda dy, gate_up: (new(gate_up), glu(gate_up)),
        gelu_bias_fwd=lambda h, *_: new(h),
        gelu_bias_bwd=lambda dy, h, *_: (new(h), new(h)),
        relu2_fwd=new,
        relu2_bwd=lambda dy, h: (new(h), new(h)),
        bias_bwd_=lambda *_: None,
        attention_fwd=lambda q, k, v, *_, out=None: (
            q.new_empty((*q.shape[:2], v.shape[2])) if out is None else out,
            torch.empty(q.shape[1], q.shape[0]),
        ),
        attention_bwd=lambda *_: None,
        sigmoid_gate_fwd=lambda x, _: new(x),
        sigmoid_gate_bwd=lambda dy, *_: new(dy),
        silu_gate_fwd=lambda x, _: new(x),
        silu_gate_bwd=lambda dy, *_: new(dy),
        **_bare_experts(),
        **_bare_scans(),
        Quantized=ops.Quantized,
        quantize=_bare_codes,
        rotated_codes=lambda x, cos, sin, positions, turned, columns: _bare_codes(x, True, columns),
        rmsnorm_codes=lambda x, w, eps, *orders: (_bare_codes(x, *orders), stats(x)[0]),
        **dict.fromkeys(("swiglu_codes_fwd", "geglu_codes_fwd"), _bare_glu_codes),
        **dict.fromkeys(("swiglu_codes_bwd", "geglu_codes_bwd"), _bare_glu_codes_bwd),
        fp8_matmul=fp8_matmul,
        fp8_add_=_bare_fp8_add_,
    )


def _bare_fp8_add_(out, *operands):
    """With the most that cuBLASLt may have of so small matrices."""
    fp8_matmul(*operands, torch.empty_like(out))


def code(*shape):
    return torch.zeros(shape, dtype=torch.uint8).view(E4M3)


def _bare_codes(x, rows=True, columns=False):
    """As the kernel makes them."""
    turned = x.shape[1], -(-len(x) // PAD) * PAD
    return ops.Quantized(torch.ones(1), code(*x.shape) if rows else None, code(*turned) if columns else None)


def _bare_glu_codes(gate_up):
    return ops.Quantized(torch.ones(1), code(len(gate_up), gate_up.shape[1] // 2), None)


def _bare_glu_codes_bwd(dy, gate_up, columns=True):
    return _bare_codes(gate_up, True, columns), _bare_codes(dy, False, columns)


def _bare_experts():
    """Products of the rows that there are, with one matrix."""
    rows = lambda x, order: x[:1].expand(len(order.pair), -1)
    number = lambda n: torch.empty(n, dtype=torch.int32)

    def grouped_mm(x, w, order, k=0, out=None, bias=None, scales=None):
        if scales is None:
            return torch.mm(rows(x, order), w[0], out=out)
        return fp8_matmul(rows(x, order), scales[0][:1], w[0].T, scales[1][:1], out)

    return dict(
        Rule=ops.Rule,
        Order=ops.Order,
        route_fwd=lambda logits, rule, _: (
            torch.empty(len(logits), rule.k),
            torch.zeros((len(logits), rule.k), dtype=torch.int32),
        ),
        sinks_fwd_=lambda *_: None,
        sinks_bwd_=lambda *_: None,
        clamped_swiglu_fwd=lambda gate_up, _: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2),
        route_bwd=lambda _, logits, *__: torch.empty_like(logits),
        sort_pairs=lambda experts, count: ops.Order(
            number(experts.numel()), number(experts.numel()), number(count + 1)
        ),
        grouped_mm=grouped_mm,
        quantize_rows=lambda x: (code(*x.shape), torch.ones(len(x))),
        quantize_experts=lambda w: (code(len(w), w.shape[2], w.shape[1]), torch.ones(len(w))),
        grouped_add_=lambda dw, a, b, order, *_: dw[0].addmm_(rows(a, order).T, rows(b, order)),
        combine=lambda rows, _, k, weights=None, residual=None, out=None, *__: (
            rows.new_empty(len(rows) // k, rows.shape[1]) if out is None else out
        ),
        routed_relu2_bwd=lambda d, h, w, *_: (torch.empty_like(h), torch.empty_like(d), torch.empty_like(w)),
        routed_swiglu_bwd=lambda d, gate_up, w, *_: (
            torch.empty_like(gate_up),
            torch.empty_like(d),
            torch.empty_like(w),
        ),
    )


def _bare_scans():
    """With what the launchers allocate, of chunks of 32 rows: fp32."""

    def scan_fwd(q, k, v, g, beta, docs, delta, skip, out):
        made = [torch.empty(*v.shape[:2], 32) for _ in range(1 + delta)]
        out = torch.empty(v.shape) if out is None else out
        del made
        return out

    def scan_bwd(dout, q, k, v, g, beta, docs, delta, *_):
        (N, H, e), (_, K, d) = v.shape, k.shape
        local = [torch.empty(N, H, 32) for _ in range(1 + delta)]
        made = [torch.empty(v.shape) for _ in range(1 + delta)]
        made += [torch.empty(-(-N // 32), H, d, e) for _ in range(2)]
        del local
        made += [torch.empty(N, H, d) for _ in range(2 * (H != K))]
        dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
        del made
        return dg, dbeta, None

    return dict(
        scan_fwd=scan_fwd,
        scan_bwd=scan_bwd,
        conv_fwd=lambda x, *_: x.new_empty(x.shape),
        conv_bwd=lambda *_: None,
        gated_norm_fwd=lambda x, *_: torch.empty_like(x),
        gated_norm_bwd=lambda dy, *_: torch.empty_like(dy),
        decay_fwd=lambda a, *_: (torch.empty(a.shape), torch.empty(a.shape)),
        decay_bwd=lambda dg, *_: torch.empty_like(dg),
    )


BARE = _bare_ops()
TOKENS = 64


class Watch(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes, while it lives, and the FLOPs of matrix matmuls."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        op, variant = func.__name__.split(".")
        kwargs = kwargs or {}
        result = kwargs["out"] if op == "_scaled_mm" else func(*args, **kwargs)  # a CPU's are slow; nobody reads them
        if op in ("mm", "addmm", "addmm_", "_scaled_mm"):
            a, b = args[:2] if op == "_scaled_mm" else args[-2:]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        made = "empty" in op or (op, variant) in (("zeros", "default"), ("sum", "dim_IntList"))
        if made or op in ("mm", "addmm", "clone") and variant == "default":
            nbytes = result.untyped_storage().nbytes()
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(result.untyped_storage(), self.forget, nbytes)
        return result

    def forget(self, nbytes):
        self.live -= nbytes


def _watched(cfg, u, monkeypatch, keep, forward, backward, dtype="F32", grads=None) -> None:
    """A block or half of one, forward and backward, each in a watching context, with kernels that compute nothing."""
    names = {name: shape for v in range(cfg.n_units) for group in shapes.weight_groups(cfg, v) for name, shape in group}
    groups = (group for v in range(cfg.n_units) for part in shapes.trained_parts(cfg, v) for group in part)
    names |= {name: shape for group in groups for name, shape in group}
    tiny = Tiny(cfg, {name: torch.zeros(shape) for name, shape in names.items()}, dtype, grads)
    x, dy, out, dx = (torch.zeros(TOKENS, cfg.width, dtype=tiny.dtype) for _ in range(4))
    dropout = Dropout(0.1, 1, 0) if cfg.lora and cfg.lora.dropout else None
    rows = tiny.rows([TOKENS])._replace(dropout=dropout)
    saved = empty_saved(cfg, TOKENS, tiny.dtype, keep, kind=shapes.kind(cfg, u))
    groups, dtypes = narrow.made_groups(cfg, u)  # codes are a step's, as weights are
    codes = views(layout := pack(groups, "F32", dtypes), torch.zeros(layout.span, dtype=torch.uint8))
    tiny.w[u] = model.weights(cfg, u, tiny.views[u] | codes)
    parts, passed = [tiny.w[u]], None
    if own := narrow.slices(cfg, u):
        parts = [_slice(tiny.w[u], part, cfg.experts.count) for part in own]
        found = shapes.passed_shapes(cfg, TOKENS).items()
        passed = {name: torch.zeros(shape, dtype=packed.DTYPE[kind]) for name, (shape, kind) in found}
    for module in (attention, experts, latent, linear, lora, mlp, norm, packed, scan, shared):
        monkeypatch.setattr(module, "ops", BARE)
    with forward:
        for w in parts:
            model.forward(cfg, u, w, x, rows, saved, out, passed=passed)
    with backward:
        for w in parts:
            model.backward(cfg, u, w, tiny.g[u], x, saved, dy, rows, dx, passed)


def _slice(w, own, count):
    at = slice(own.start, own.stop)
    return w._replace(up=w.up[at], down=w.down[at], part=experts.Slice(own.start, own.stop, count))


def _check_flops(cfg, u, keep, forward, backward):
    """GEMMs that were watched, and what a recurrence, which makes none here, takes."""
    kind = shapes.kind(cfg, u)
    mixer = costs.mixer_flops(cfg, kind, TOKENS, 0)
    again = costs.mixer_flops(cfg, kind, TOKENS, 0, shapes.saved_shapes(cfg, 1, kind).keys() - keep)
    assert forward.flops == costs.forward_flops(cfg, u, TOKENS, 0) - mixer
    rebuilt = costs.recompute_flops(cfg, keep, TOKENS, 0, kind) - again
    assert (
        backward.flops
        == costs.backward_flops(cfg, u, TOKENS, 0) - costs.mixer_backward_flops(cfg, kind, TOKENS, 0) + rebuilt
    ), keep


class Copies(TorchDispatchMode):
    """Notes (shape, dtype) of every tensor that is a copy in another dtype."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.__name__.startswith("_to_copy"):
            self.made.append((tuple(result.shape), result.dtype))
        return result


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("frozen", [(), ("*lm_head*", "*embed*"), ("*",)])
def test_the_head_has_fp32_sums_where_it_is_trained_alone(tied, frozen, monkeypatch):
    cfg, tokens = parse_config(SMALL | dict(model_type="llama", tie_word_embeddings=tied)), workspace.LOSS_CHUNK + 1
    cfg = replace(cfg, frozen=frozen)
    groups = [group for u in range(cfg.n_units) for group in shapes.weight_groups(cfg, u)]
    tiny = Tiny(cfg, {name: torch.zeros(shape) for group in groups for name, shape in group}, "BF16")
    monkeypatch.setattr(cross_entropy, "_loss", defaultdict(lambda: lambda *_, **__: None))
    monkeypatch.setattr(head.ops, "linear_cross_entropy", cross_entropy.linear_cross_entropy)
    top, g = (head.with_output(cfg, side[cfg.n_units - 1], side[0]) for side in (tiny.w, tiny.g))
    x, labels, rows = torch.zeros(tokens, cfg.width).bfloat16(), torch.zeros(tokens).long(), torch.arange(tokens)
    with Copies() as copies:
        head.head_loss(cfg, top, x, labels, rows, 1.0, g, torch.empty_like(x))
    sums = ((cfg.vocab, cfg.width), torch.float32)
    assert (sums in copies.made) == (not frozen)
    in_fp32, in_bf16 = (workspace.workspace_bytes(cfg, cfg.n_units - 1, tokens, 2, grads) for grads in (4, 2))
    assert in_bf16 - in_fp32 == 4 * cfg.vocab * cfg.width * (not frozen)


class Every(Watch):
    """Counts copies in another dtype, too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.__name__.startswith(("_to_copy", "index_select", "mul", "lerp")):
            nbytes = result.untyped_storage().nbytes()
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(result.untyped_storage(), self.forget, nbytes)
        return result


def _peak_of_the_loss(V, D, tokens, taught, monkeypatch):
    """With kernels that compute nothing."""
    none = defaultdict(lambda: lambda *_, **__: None)
    monkeypatch.setattr(cross_entropy, "_add_product_", lambda *_: None)  # in fp32 on a CPU
    for name in ("_loss", "_teachers_logits"):
        monkeypatch.setattr(cross_entropy, name, none)
    x, w, rows = torch.zeros(tokens, D).bfloat16(), torch.zeros(V, D).bfloat16(), torch.arange(tokens)
    given, more, watch = (x, w, rows % V, rows, 1.0), (w.float(), torch.empty_like(x)), Every()
    factors = torch.ones(tokens)
    with watch:
        if taught is None:
            _ = cross_entropy.linear_cross_entropy(*given, *more, factors=factors) * factors
        else:
            found = cross_entropy.linear_cross_entropy(*given, *more, factors=factors, taught=taught) * factors
            torch.lerp(found[0], found[1], 0.5)
    return watch.peak


@pytest.mark.parametrize("k", [1, 64])
def test_what_a_teacher_adds_to_the_head(k, monkeypatch):
    """Inputs of every token, and temporaries of a chunk: as much as is allocated, and hardly more."""
    cfg, tokens = parse_config(SMALL | dict(model_type="llama")), workspace.LOSS_CHUNK + 1
    shares = torch.zeros(tokens, k).int(), torch.zeros(tokens, k).half(), torch.zeros(tokens)
    taught = replace(cfg, teaching=Teaching(k, 0.5, 1.0))
    assert taught.teaching.nbytes * tokens == sum(t.nbytes for t in shares)
    said, given = Taught(*shares, 0.5, 1.0), (cfg.vocab, cfg.width, tokens)
    more = _peak_of_the_loss(*given, said, monkeypatch) - _peak_of_the_loss(*given, None, monkeypatch)
    with_it, without = (workspace.workspace_bytes(c, c.n_units - 1, tokens, 2) for c in (taught, cfg))
    assert more <= with_it - without <= more + 40 * tokens


class New(Watch):
    """Counts whatever an operation makes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor)]
        for t in made if all(r.alias_info is None for r in func._schema.returns) else ():
            self.live += t.untyped_storage().nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(t.untyped_storage(), self.forget, t.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("labels", [1, 300])
@pytest.mark.parametrize(("tokens", "documents"), [(600, 3), (600, 600)])
def test_workspace_holds_a_score_head(labels, tokens, documents, monkeypatch):
    """Of a few documents at once, however many there are."""
    cfg = replace(parse_config(SMALL | dict(model_type="llama")), scores=labels, tied=False)
    monkeypatch.setattr(norm, "ops", BARE)
    x = torch.zeros(tokens, cfg.width).bfloat16()
    w = head.HeadWeights(norm.Norm(x[0]), torch.zeros(labels, cfg.width).bfloat16())
    rows, classes, watch = torch.arange(documents), torch.zeros(tokens).long(), New()
    given = cfg, w, x, classes, rows, 1.0, w, torch.empty_like(x), torch.ones(tokens)
    with watch:
        head.head_loss(*given, correct_=torch.zeros(1).double()) * given[-1]
    bound = workspace.workspace_bytes(cfg, cfg.n_units - 1, tokens, 2, 2) - workspace.SLACK
    assert watch.peak <= bound
    if documents == tokens:
        assert bound <= 3 * watch.peak


UNITS = pytest.mark.parametrize(("halves", "u"), [(False, 1), (True, 1), (True, 2)], ids=["block", "attention", "mlp"])


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("K", [1, 3])
def test_launchers_of_scans_allocate_what_blocks_are_watched_with(K, delta, monkeypatch):
    from trireme.kernels import launch
    from trireme.kernels.scan import backward as behind
    from trireme.kernels.scan import forward as ahead
    from trireme.kernels.scan import scan as launchers

    kernels = {ahead: ("_local", "_forward"), behind: ("_walk_back", "_gradients")}
    for module, names in kernels.items():
        for name in names:
            monkeypatch.setattr(module, name, defaultdict(lambda: lambda *_, **__: None))
    monkeypatch.setattr(launch, "scan", lambda *_: launch.Scan(32, 16, 16, 16, 16, 4, 4, "ieee"))
    docs, peaks = ops.make_docs([40, 24], "cpu"), defaultdict(list)
    for own in (vars(launchers), _bare_scans()):
        q, k, v = (torch.empty(64, heads, 8) for heads in (K, K, 3))
        g, into = torch.empty(64, 3), [torch.empty_like(t) for t in (q, k, v)]
        with Watch() as forward:
            own["scan_fwd"](q, k, v, g, g, docs, delta, None, None)
        with Watch() as backward:
            own["scan_bwd"](v, q, k, v, g, g, docs, delta, None, *into)
        peaks["forward"].append(forward.peak)
        peaks["backward"].append(backward.peak)
    assert {kind: launched for kind, (launched, _) in peaks.items()} == {kind: n for kind, (_, n) in peaks.items()}


def _bound(cfg, u, itemsize=4, grad_itemsize=None):
    """The bound of a unit's workspace, without what is inside kernels, which these do not have."""
    found = workspace.workspace_bytes(cfg, u, TOKENS, itemsize, grad_itemsize)
    return found - 8 * cfg.width * TOKENS - workspace.SLACK


@UNITS
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_workspace_bounds_what_a_block_allocates(name, halves, u, monkeypatch):
    cfg, forward, backward = replace(parse_config(SMALL_MODELS[name]), halves=halves), Watch(), Watch()
    _watched(cfg, u, monkeypatch, (), forward, backward)
    bound = _bound(cfg, u)
    assert 0 < forward.peak < backward.peak
    assert 0.98 * bound < backward.peak <= bound


@UNITS
@pytest.mark.parametrize("name", SMALL_MODELS | DIALECTS)
def test_workspace_is_enough_for_every_family_and_of_a_long_text_that_of_a_tile(name, halves, u, monkeypatch):
    cfg = replace(parse_config((SMALL_MODELS | DIALECTS)[name]), halves=halves)
    bounds = {}
    for tile in (TOKENS, 16, 15):
        tiled, forward, backward = replace(cfg, mlp_rows=tile), Watch(), Watch()
        _watched(tiled, u, monkeypatch, (), forward, backward)
        bounds[tile] = _bound(tiled, u)
        assert 0.65 * bounds[tile] < max(forward.peak, backward.peak) <= bounds[tile]
        assert tile < TOKENS or backward.peak > 0.7 * bounds[tile]
    if shapes.kind(cfg, u).endswith("mlp"):
        assert bounds[16] < 0.3 * bounds[TOKENS]
    elif shapes.kind(cfg, u) == "attention":
        assert bounds[16] == bounds[TOKENS]


@pytest.mark.grid
@pytest.mark.usefixtures("few_rows_in_fp8")
@UNITS
@pytest.mark.parametrize("name", SMALL_MODELS | DIALECTS)
@pytest.mark.parametrize("most", [1 << 29, 0])
def test_workspace_holds_the_codes_of_fp8(name, most, halves, u, monkeypatch):
    """`most`: whether matrices' codes are made before, or by each fp8_matmul."""
    monkeypatch.setattr(narrow, "MOST_CODES", most)
    cfg = replace(parse_config((SMALL_MODELS | DIALECTS)[name]), halves=halves, fp8=True)
    forward, backward = Watch(), Watch()
    _watched(cfg, u, monkeypatch, (), forward, backward)
    bound = _bound(cfg, u)
    assert max(forward.peak, backward.peak) <= bound
    assert backward.peak > (0.97 if name in SMALL_MODELS and not cfg.experts else 0.6) * bound
    _check_flops(cfg, u, frozenset(), forward, backward)
    if cfg.experts and shapes.kind(cfg, u) != "attention":
        assert narrow.experts_in_fp8(cfg, TOKENS)


@pytest.mark.grid
@pytest.mark.parametrize(("halves", "u"), [(False, 1), (True, 2)], ids=["block", "mlp"])  # a CPU's attention copies
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("grads", ["BF16", "F32"])
def test_workspace_holds_additions_to_gradients(name, grads, halves, u, monkeypatch):
    cfg = replace(parse_config(SMALL_MODELS[name]), halves=halves, fp8=True)
    forward, backward = Watch(), Watch()
    _watched(cfg, u, monkeypatch, (), forward, backward, "BF16", grads)
    bound = _bound(cfg, u, 2, 2 if grads == "BF16" else 4)
    assert 0.8 * bound < max(forward.peak, backward.peak) <= bound


@pytest.mark.grid
@pytest.mark.parametrize("u", [1, 2, 3, 4], ids=NEMOTRON["layers_block_type"])
@pytest.mark.parametrize("keys", [{}, dict(moe_latent_size=40), dict(moe_shared_expert_intermediate_size=16)])
@pytest.mark.parametrize("fp8", [False, True])
def test_sizes_of_layers_that_are_a_mixer_or_an_mlp(fp8, keys, u, monkeypatch):
    cfg = replace(parse_config(NEMOTRON | keys), fp8=fp8)
    names = list(shapes.saved_shapes(cfg, 1, shapes.kind(cfg, u)))
    for keep in (frozenset(c) for k in range(len(names) + 1) for c in combinations(names, k)):
        forward, backward = Watch(), Watch()
        _watched(cfg, u, monkeypatch, keep, forward, backward)
        _check_flops(cfg, u, keep, forward, backward)
        bound = _bound(cfg, u)
        assert max(forward.peak, backward.peak) <= bound
        assert keep or fp8 or backward.peak > 0.75 * bound


@pytest.mark.grid
@UNITS
@pytest.mark.parametrize("lora", [None, Lora(4, 8.0, ("in_proj", "v_proj", "gate_proj"), dropout=0.1)])
@pytest.mark.parametrize("fp8", [False, True])
def test_sizes_of_two_mixers_beside_each_other(fp8, lora, halves, u, monkeypatch):
    cfg = replace(parse_config(FALCON_H1), fp8=fp8, halves=halves, lora=lora, frozen=("*",) if lora else ())
    names = list(shapes.saved_shapes(cfg, 1, shapes.kind(cfg, u)))
    for keep in [frozenset(), *(frozenset({name}) for name in names), frozenset(names)]:
        forward, backward = Watch(), Watch()
        _watched(cfg, u, monkeypatch, keep, forward, backward)
        if lora is None:
            _check_flops(cfg, u, keep, forward, backward)
        bound = _bound(cfg, u)
        assert max(forward.peak, backward.peak) <= bound
        assert keep or fp8 or backward.peak > 0.7 * bound


def test_of_two_mixers_that_alone_is_repeated_whose_result_is_missing():
    cfg = parse_config(FALCON_H1)
    names, rebuilt = set(shapes.saved_shapes(cfg, 1)), lambda kept: costs.recompute_flops(cfg, kept, 8, 30)
    assert rebuilt(frozenset(names - {"scan_out"})) == costs.scan_flops(cfg, 8)
    assert rebuilt(frozenset(names - {"lse"})) == costs.attention_flops(cfg, 30)
    assert rebuilt(frozenset(names - {"resid"})) == 2 * 8 * (4 * 24 + 80) * 64


@UNITS
@pytest.mark.parametrize("rank", [4, 32])
def test_workspace_is_enough_for_adapters_of_experts(rank, halves, u, monkeypatch):
    cfg = replace(parse_config(MIXTURE), halves=halves, lora=Lora(rank, 8.0, ("experts",)), frozen=("*",))
    forward, backward = Watch(), Watch()
    _watched(cfg, u, monkeypatch, (), forward, backward)
    bound = _bound(cfg, u)
    assert 0.6 * bound < max(forward.peak, backward.peak) <= bound
    plain = replace(cfg, lora=None, frozen=("*",))
    more = costs.forward_flops(cfg, u, TOKENS, 0) - costs.forward_flops(plain, u, TOKENS, 0)
    assert more == 2 * TOKENS * 3 * rank * (64 + 96 + 48 + 64) * (shapes.kind(cfg, u) != "attention")


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(("tile", "fp8"), [(TOKENS, False), (15, False), (TOKENS, True)])
@pytest.mark.usefixtures("few_rows_in_fp8")
def test_workspace_and_flops_of_slices_are_those_of_all_experts(rank, tile, fp8, monkeypatch):
    """A slice may have all rows; what passes between them is not workspace. The last one routes again in backward."""
    lora = Lora(rank, 8.0, ("experts",)) if rank else None
    cfg = replace(parse_config(MIXTURE), halves=True, lora=lora, frozen=("*",), mlp_rows=tile, fp8=fp8)
    whole, sliced = [(Watch(), Watch()) for _ in range(2)]
    for cut, watches in ((cfg, whole), (replace(cfg, slices=3), sliced)):
        _watched(cut, 2, monkeypatch, (), *watches)
    bound = _bound(replace(cfg, slices=3), 2)
    assert 0.6 * bound < max(sliced[0].peak, sliced[1].peak) <= bound
    own, each = cfg.experts, lambda kept: costs.recompute_flops(kept, frozenset(), TOKENS, 0, "mlp")
    assert each(replace(cfg, slices=3)) - each(cfg) == 2 * TOKENS * own.count * cfg.width
    if not rank:  # kernels that compute nothing take all rows for those of each slice
        up, down = (2 * TOKENS * own.chosen * n * own.width * cfg.width for n in (2, 1))
        more = [b.flops - a.flops for a, b in zip(whole, sliced, strict=True)]
        assert more == [2 * (up + down), 2 * (2 * up + down) + 2 * TOKENS * own.count * cfg.width]


@UNITS
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_workspace_holds_what_dropout_makes(name, halves, u, monkeypatch):
    targets = ("c_attn", "c_proj", "c_fc") if name == "gpt2" else ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    lora = Lora(4, 8.0, targets, dropout=0.1)
    cfg = replace(parse_config(SMALL_MODELS[name]), halves=halves, lora=lora, frozen=("*",))
    forward, backward = Watch(), Watch()
    _watched(cfg, u, monkeypatch, (), forward, backward)
    bound = _bound(cfg, u)
    assert 0.7 * bound < max(forward.peak, backward.peak) <= bound
    plain = Watch(), Watch()
    _watched(replace(cfg, lora=replace(lora, dropout=0.0)), u, monkeypatch, (), *plain)
    assert (forward.flops, backward.flops) == tuple(each.flops for each in plain)


@pytest.mark.grid
@UNITS
@pytest.mark.parametrize("name", SMALL_MODELS | DIALECTS)
def test_flops_are_those_of_the_products(name, halves, u, monkeypatch):
    cfg = replace(parse_config((SMALL_MODELS | DIALECTS)[name]), halves=halves)
    kind = shapes.kind(cfg, u)
    names = list(shapes.saved_shapes(cfg, 1, kind))
    for keep in (frozenset(c) for k in range(len(names) + 1) for c in combinations(names, k)):
        forward, backward = Watch(), Watch()
        _watched(cfg, u, monkeypatch, keep, forward, backward)
        _check_flops(cfg, u, keep, forward, backward)


def test_halves_make_a_block():
    """Of weights, operations and what is saved; all but `resid`, which is the input of the second."""
    for whole in (GPT2, LLAMA3_8B):
        cut = replace(whole, halves=True)
        assert shapes.unit_names(cut)[:4] == ["embed", "attn000", "mlp000", "attn001"]
        assert cut.n_units == 2 * whole.n_layers + 2
        assert [shapes.layer(cut, u) for u in (1, 2, 3)] == [0, 0, 1]
        for u in (1, whole.n_layers):
            pair = (2 * u - 1, 2 * u)
            assert shapes.weight_parts(whole, u) == [part for v in pair for part in shapes.weight_parts(cut, v)]
            for count in (costs.forward_flops, costs.backward_flops):
                assert count(whole, u, 100, 5050) == sum(count(cut, v, 100, 5050) for v in pair)
        saved = {kind: shapes.saved_shapes(whole, 10, kind) for kind in ("block", *shapes.HALVES)}
        assert saved["attention"] | saved["mlp"] == {n: s for n, s in saved["block"].items() if n != "resid"}
        assert shapes.parameters(cut) == shapes.parameters(whole)


def test_attention_flops():
    cfg = LLAMA3_8B
    pairs = costs.attended_pairs([100])
    attention = 4 * pairs * 32 * 128
    assert costs.forward_flops(cfg, 1, 100, pairs) - costs.forward_flops(cfg, 1, 100, 0) == attention
    kept = frozenset(shapes.saved_shapes(cfg, 1))
    assert costs.recompute_flops(cfg, kept, 100, pairs) == 0
    for name in ("attn_out", "lse"):
        assert costs.recompute_flops(cfg, kept - {name}, 100, pairs) == attention


def test_no_more_than_a_slice_is_decoded():
    raw = MIXTURE | dict(quantization_config=dict(quant_method="fp8", weight_block_size=[16, 16]))
    cfg = replace(parse_config(raw), lora=Lora(2, 4.0, ("q_proj",)), frozen=("*",), at_once=3, halves=True)
    assert cfg.packing is not None
    E, D, F = cfg.experts.count, cfg.width, 2 * cfg.experts.width
    assert narrow.slice_bytes(cfg, 2, 2) == 3 * F * D * 2
    assert narrow.slice_bytes(cfg, 1, 2) == narrow.slice_bytes(replace(cfg, at_once=0), 2, 2) == 0
    codes, scales = E * F * D, E * F * D // 256 * 4
    up, down = codes + scales + 2 * codes, (codes + scales + 2 * codes) // 2
    assert narrow.sliced_bytes(cfg, 2, cfg.mlp_rows + 1, 2) == (2 * (up + down), 2 * (up + down), 2 * up)
    packing = replace(FP8, block=(16, 16))
    parts = torch.zeros((E, F, D), dtype=torch.uint8), torch.ones(E, F // 16, D // 16)
    order = ops.sort_pairs(torch.tensor([[0, 1], [2, 7]], dtype=torch.int32), E)
    x, out = torch.zeros(2, D).bfloat16(), torch.zeros(4, F).bfloat16()
    whole, some = Watch(), Watch()
    for at_once, watch in ((E, whole), (3, some)):
        with watch:
            grouped_mm(x, Sliced(packing, parts, (F, D), True, at_once), order, 2, out)
    assert whole.peak - some.peak >= 0.9 * (E - 3) * F * D * 2
