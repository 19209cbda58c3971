"""The first and last units of the model: the embedding, and the final norm with the loss.

Legend: P positions, M labels, S scores of a score head; the rest as in shapes.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.config import ModelConfig
from trireme.models.linear import trained
from trireme.models.norm import Norm, Stats, norm, norm_backward
from trireme.models.rows import Rows
from trireme.models.sizes.shapes import embedding_name, is_frozen, output_name

TOP_CHUNK = 512  # rows of fp32 logits
LOSS_CHUNK = 2048  # rows of logits, where they are summed in fp32
SCORE_ROWS = 512  # documents that a score head reads at once


class EmbedWeights(NamedTuple):
    """The embedding's weights, or their gradients."""

    tokens: Tensor  # (V, D)
    positions: Tensor | None  # (P, D)
    scale: float = 1.0  # of embedded tokens
    rounded: bool = False  # whether the scale is rounded to their dtype

    def scale_of(self, dtype: torch.dtype) -> float:
        return float(torch.tensor(self.scale, dtype=dtype)) if self.rounded else self.scale


class HeadWeights(NamedTuple):
    """The head's weights, or their gradients."""

    norm: Norm
    output: Tensor | None  # (V, D), or (S, D) of S labels' scores; of a tied model None until `with_output`

    @property
    def matrix(self) -> Tensor:
        assert self.output is not None, "a tied head has no output matrix before `with_output`"
        return self.output


class Shares(NamedTuple):
    """A teacher's most likely tokens and probabilities for M labels, in the form of ops.Taught."""

    ids: Tensor  # (M, K) int32
    logps: Tensor  # (M, K) fp16
    tail: Tensor  # (M,) fp32


class Targets(NamedTuple):
    """What N tokens are compared with."""

    labels: Tensor  # (N,) int64: the next tokens
    rows: Tensor  # (M,) int64: the tokens that count
    factors: Tensor | None = None  # (N,) fp32, of losses; None: 1
    shares: Shares | None = None  # then the loss is that of cfg.teaching, without smoothing
    correct: Tensor | None = None  # (1,) fp64: each label that no token is likelier than adds its factor


class Scored(NamedTuple):
    """Losses of M documents by a score head: cross-entropy of a class, or with one label the negative score."""

    losses: Tensor  # (M,) fp32; with one label the negative score, which preferences.py compares
    slopes: Tensor  # (M, S) fp32: derivatives by scores
    hits: Tensor  # (M,) bool: no other label has a higher score


def embed_weights(cfg: ModelConfig, views: dict[str, Tensor]) -> EmbedWeights:
    """From the unit's tensors by Hugging Face name."""
    positions, rounded = views.get(f"{cfg.names.positions}.weight"), cfg.family.embed_root
    return EmbedWeights(views[embedding_name(cfg)], positions, cfg.embed_scale, rounded)


def head_weights(cfg: ModelConfig, views: dict[str, Tensor]) -> HeadWeights:
    """From the unit's tensors by Hugging Face name."""
    name = cfg.names.final_norm
    add_one = cfg.family.add_one and not cfg.family.plain_end
    weights = Norm(views[f"{name}.weight"], cfg.eps, views.get(f"{name}.bias"), add_one)
    return HeadWeights(weights, None if cfg.tied else views[output_name(cfg)])


def with_output(cfg: ModelConfig, w: HeadWeights, embed: EmbedWeights | None) -> HeadWeights:
    """`w` with the output matrix, or its gradient: that of `embed` in a tied model."""
    if not cfg.tied:
        return w
    assert embed is not None
    return w._replace(output=embed.tokens)


def embed_forward(w: EmbedWeights, ids: Tensor, rows: Rows, out: Tensor) -> None:
    """Fills out (N, D) with the embeddings of ids (N,) int64, and noise, if any, which has no gradient."""
    ops.embedding_fwd(ids, w.tokens, out)
    if w.positions is not None:
        out.add_(ops.embedding_fwd(rows.docs.positions.long(), w.positions))
    if w.scale != 1.0:
        out.mul_(w.scale_of(out.dtype))
    if rows.noise is not None:
        ops.add_noise_(out, *rows.noise)


def embed_backward(g: EmbedWeights, dy: Tensor, ids: Tensor, rows: Rows) -> None:
    """Adds to g, given the gradient dy (N, D) of the embeddings."""
    if trained(g.tokens):
        ops.embedding_bwd_(g.tokens, dy if g.scale == 1.0 else dy * g.scale_of(dy.dtype), ids)
    if g.positions is not None and trained(g.positions):
        ops.embedding_bwd_(g.positions, dy, rows.docs.positions.long())


def rows_of_loss(cfg: ModelConfig, tokens: int, grad_itemsize: int) -> int:
    """Rows of logits at a time: all where they take less memory than an fp32 sum of the matrix's gradient would.

    `tokens` are the micro-batch's, not those with labels, so that results do not depend on the data's labels.
    """
    summed = grad_itemsize < 4 and not is_frozen(cfg, [(output_name(cfg), (cfg.vocab, cfg.width))])
    return tokens if summed and tokens <= LOSS_CHUNK + 2 * cfg.width else min(tokens, LOSS_CHUNK)


def final_norm(cfg: ModelConfig, w: HeadWeights, x: Tensor) -> tuple[Tensor, Stats | None]:
    """(normed x (N, D) times cfg.logit_scale, statistics for backward)."""
    y, stats = norm(x, w.norm)
    return y if cfg.logit_scale == 1.0 else y.mul_(cfg.logit_scale), stats


def head_loss(
    cfg: ModelConfig, w: HeadWeights, x: Tensor, t: Targets, scale: float, g: HeadWeights | None, dx: Tensor | None
) -> Tensor:
    """Loss of each token, (N,) fp32; with g and dx also the gradients of scale * sum(factors * loss).

    x (N, D). w and g are from `with_output`. Fills dx and adds to g where trained. Labels are smoothed by cfg.smoothing
    if dx is given. With `shares` the result is the two parts of the loss, (2, N): cross-entropy and divergence.

    With a score head labels are classes, each at the one token of a document that is scored; losses are as in Scored.
    """
    if cfg.scores:
        return _score_loss(w, x, t, scale, g, dx)
    y, stats = final_norm(cfg, w, x)
    out, taught = _trained_output(g), None
    if t.shares is not None:
        assert cfg.teaching is not None
        assert t.correct is None
        taught = ops.Taught(*t.shares, cfg.teaching.weight, cfg.teaching.temperature)
    hits = None if t.correct is None else torch.zeros_like(t.labels, dtype=torch.uint8)
    losses = ops.linear_cross_entropy(
        y,
        w.matrix,
        t.labels,
        t.rows,
        scale,
        out,
        dx,
        chunk=rows_of_loss(cfg, len(x), 4 if out is None else out.itemsize),
        cap=cfg.logit_cap,
        factors=t.factors,
        smoothing=cfg.smoothing if dx is not None and taught is None else 0.0,
        hits_=hits,
        taught=taught,
    )
    if t.correct is not None and hits is not None:
        t.correct.add_((hits if t.factors is None else hits * t.factors).sum(dtype=torch.float64))
    if dx is not None:
        assert g is not None
        if cfg.logit_scale != 1.0:
            dx.mul_(cfg.logit_scale)
        norm_backward(dx, x, w.norm, stats, g.norm, out=dx)
    return losses


def _trained_output(g: HeadWeights | None) -> Tensor | None:
    """The output matrix' gradient; None where it is not taken or not trained."""
    return None if g is None or g.output is None or not trained(g.output) else g.output


def _score_labels(scores: Tensor, labels: Tensor) -> Scored:
    """Losses of scores (M, S) fp32 and labels (M,) int64, which are zeros with one label."""
    if scores.shape[1] == 1:
        losses = -scores[:, 0]
        return Scored(losses, torch.full_like(scores, -1.0), torch.ones_like(losses, dtype=torch.bool))
    logps, index = torch.log_softmax(scores, 1), labels[:, None]
    slopes = logps.exp().scatter_add_(1, index, torch.full_like(logps[:, :1], -1.0))
    return Scored(-logps.gather(1, index)[:, 0], slopes, scores.argmax(1) == labels)


def _score_loss(
    w: HeadWeights, x: Tensor, t: Targets, scale: float, g: HeadWeights | None, dx: Tensor | None
) -> Tensor:
    """head_loss with a score head: norm and scores of the M rows alone, the scores in fp32."""
    losses, matrix = torch.zeros(len(x), dtype=torch.float32, device=x.device), w.matrix.float()
    g_out = _trained_output(g)
    d_out = None if g_out is None else torch.zeros_like(matrix)
    if dx is not None:
        dx.zero_()
    for rows in t.rows.split(SCORE_ROWS) if len(t.rows) else ():
        x_rows, factors = x[rows], torch.ones_like(rows, dtype=torch.float32) if t.factors is None else t.factors[rows]
        y, stats = norm(x_rows, w.norm)
        scored = _score_labels(y.float() @ matrix.T, t.labels[rows])
        losses[rows] = scored.losses
        if t.correct is not None:
            t.correct.add_((scored.hits * factors).sum(dtype=torch.float64))
        if dx is not None:
            assert g is not None
            slopes = scored.slopes * (scale * factors)[:, None]
            if d_out is not None:
                d_out.addmm_(slopes.T, y.float())
            dx[rows] = norm_backward((slopes @ matrix).to(x.dtype), x_rows, w.norm, stats, g.norm)
    if d_out is not None and g_out is not None:
        g_out.add_(d_out)
    return losses


def head_top(
    cfg: ModelConfig, w: HeadWeights, x: Tensor, loss_rows: Tensor, k: int, limit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The k most likely tokens, among ids less than `limit`, after each of the M rows of x (N, D) in loss_rows.

    (ids (M, k) int64, log-probabilities (M, k) fp32, the logarithm of the probability of all other tokens (M,) fp32).
    Logits exist for TOP_CHUNK rows at a time.
    """
    y, _ = final_norm(cfg, w, x)
    chunks = []
    for part in loss_rows.split(TOP_CHUNK):
        logits = ops.soft_cap((y[part] @ w.matrix.T).float(), cfg.logit_cap)
        lse = torch.logsumexp(logits, -1, keepdim=True)
        top, ids = logits[:, :limit].topk(k, dim=-1)
        tail = torch.logsumexp(logits.scatter_(1, ids, float("-inf")), -1, keepdim=True) - lse
        chunks.append((ids, top - lse, tail[:, 0]))
    ids, logps, tails = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return ids, logps, tails
