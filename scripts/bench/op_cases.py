"""What ops.py compares each case with: torch's own ways to compute the same, from a case's arguments."""

from __future__ import annotations

from functools import partial

import op_peers
import torch

from trireme.engine.check.cases import Attention, Case, Shapes
from trireme.kernels import ops

DEVICE = "cuda"
randn = Shapes(DEVICE).randn


def peers_of(case: Case) -> op_peers.Peers:
    """Name -> (callable, its share of the op's work)."""
    if case.op in ("attention_fwd", "attention_bwd"):
        return _of_attention(case)
    if case.op == "grouped_mm" and len(case.args) > 4:
        x, w, order, k, *_ = case.args
        rows, matrices = randn(*x.shape), randn(*w.mT.shape).mT
        return {"in bf16": (lambda: ops.grouped_mm(rows, matrices, order, k), 1.0)}
    if case.op == "grouped_mm":
        return op_peers.grouped_product(*case.args)
    if case.op == "grouped_add_":
        return op_peers.grouped_gradient(*case.args)
    if case.op == "embedding_bwd_":
        dw, dy, ids = case.args
        return {"index_add": (lambda: dw.index_add_(0, ids, dy), 1.0)}
    if case.op == "adamw_" and case.args[1] is None:
        w, _, m, v, g, clip = case.args
        options = dict(lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)
        return {"torch fused": (partial(torch._fused_adamw_, [w], [g], [m], [v], [], [clip], **options), 1.0)}
    return _of_fp8(case)


def _of_fp8(case: Case) -> op_peers.Peers:
    if case.op == "act_codes_bwd":
        dy, h, act = case.args

        def apart() -> None:
            y, dh = dy.clone(), h.clone()
            ops.act_bwd_(y, dh, act)
            ops.quantize(dh, True, True)
            ops.quantize(y, False, True)

        return {"written in bf16, with copies": (apart, 1.0)}
    if case.op == "fp8_add_":
        out, *codes = case.args
        return {"added by a second kernel": (lambda: out.add_(ops.fp8_matmul(*codes, torch.empty_like(out))), 1.0)}
    if case.op == "fp8_matmul":
        x, w = randn(*case.args[0].shape), randn(*case.args[2].shape)
        return {"in bf16": (lambda: torch.mm(x, w.T), 1.0)}
    return {}


def _of_attention(case: Case) -> op_peers.Peers:
    """torch's of documents of one length."""
    forward = case.op == "attention_fwd"
    q, k, v, docs, scale = case.args[:5] if forward else (*case.args[1:4], *case.args[6:8])
    if len(set(docs.lengths)) > 1:
        return {}
    dout = randn(*q.shape[:2], v.shape[2]) if forward else case.args[0]
    return dense_peers(Attention(q, k, v, q, k, v, dout, docs, scale))[0 if forward else 1]


def dense_peers(a: Attention) -> tuple[op_peers.Peers, op_peers.Peers]:
    return op_peers.dense_attention(a.q, a.k, a.v, a.dout, len(a.docs.lengths), a.scale)
