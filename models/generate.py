"""Generation from the model in training: decoding with a key/value cache, by the forward functions of training.

One pass over the units serves all prompts, so a streamed model is read once for each token.
Legend: B prompts, N tokens of a pass, T cached positions; the rest as in shapes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from trireme.kernels import ops
from trireme.models import head, model
from trireme.models.block import Mixing
from trireme.models.config import InputError, ModelConfig
from trireme.models.families.scans import Scan
from trireme.models.mixers import scan
from trireme.models.mixers.attention import Attend
from trireme.models.mlps.experts import Passed
from trireme.models.packed import DTYPE
from trireme.models.rows import Rotation, Rows, Table, Tables, make_rows, rope_tables
from trireme.models.sizes import shapes
from trireme.models.sizes.measure import temporaries

Units = Callable[[], Iterator[tuple[int, Any]]]
Pick = Callable[[Tensor], list[int]]  # logits (B, V) fp32 -> a token of each


def greedy(logits: Tensor) -> list[int]:
    return logits.argmax(-1).tolist()


def generate(
    cfg: ModelConfig,
    units: Units,
    prompts: Sequence[Sequence[int]],
    max_new: int | Sequence[int],
    *,
    eos: frozenset[int] = frozenset(),
    device: torch.device | str = "cpu",
    places: Sequence[torch.device] = (),
    dtype: torch.dtype = torch.float32,
    stop: Callable[[], bool] = lambda: False,
    pick: Pick = greedy,
) -> list[list[int]]:
    """A continuation of each prompt: up to max_new tokens (of each, or of all) chosen by `pick`, ending with the first
    one that is in `eos`.

    `units()`, called once for each token, yields (u, model.weights) in order, in `dtype` on `device`, or with several
    devices on places[u], where the cache of its layer is, too. The weights of a unit must stay valid until the next is
    yielded, those of a tied embedding until the end. `stop()`, asked after each token, ends generation for all.
    Raises InputError if a prompt leaves no learned position free.
    """
    limits = [max_new] * len(prompts) if isinstance(max_new, int) else max_new
    assert all(prompts)
    assert all(n >= 1 for n in limits)
    if not prompts:
        return []
    lengths = [len(p) for p in prompts]
    room = [_room(cfg, n, new) for n, new in zip(lengths, limits, strict=True)]
    longest = max(n + new for n, new in zip(lengths, room, strict=True))
    places = places or [torch.device(device)] * cfg.n_units
    tables = {place: _tables(cfg, longest, place) for place in dict.fromkeys(places)}
    cache = _Cache(cfg, len(prompts), longest, places, dtype)
    new: list[list[int]] = [[] for _ in prompts]
    finished = lambda i: len(new[i]) == room[i] or bool(new[i]) and new[i][-1] in eos

    ids = [token for p in prompts for token in p]
    rows = {place: _with_angles(cfg, make_rows(lengths, tables[place], place), lengths, longest) for place in tables}
    single = {place: make_rows([1] * len(prompts), tables[place], place) for place in tables}
    while True:
        logits = _logits(cfg, units, torch.tensor(ids, device=places[0]), rows, cache)
        for i, token in enumerate(pick(logits)):
            if not finished(i):
                new[i].append(token)
        if stop() or all(finished(i) for i in range(len(new))):
            return new
        ends = [n + len(tokens) for n, tokens in zip(lengths, new, strict=True)]
        if any(ends[i] == _switch(cfg, longest) + 1 and not finished(i) for i in range(len(new))):
            ids = [token for prompt, tokens in zip(prompts, new, strict=True) for token in (*prompt, *tokens)]
            rows = {place: _with_angles(cfg, make_rows(ends, tables[place], place), ends, longest) for place in tables}
            continue  # keys in the cache are rotated by the short factors
        # finished prompts repeat their last token in place: the batch keeps its shape
        ids = [tokens[-1] for tokens in new]
        for place, last in single.items():
            positions = torch.tensor(ends, dtype=torch.int32, device=place) - 1
            rows[place] = _with_angles(cfg, last._replace(docs=last.docs._replace(positions=positions)), ends, longest)


def _switch(cfg: ModelConfig, longest: int) -> int:
    """The number of tokens, prompt and text, up to which longrope's short factors are used; 0 if it does not matter.

    As in transformers, texts that become longer are computed again from their beginning, with the long factors.
    """
    ropes = (spec.rope for spec in cfg.attentions if spec.rope and spec.rope.kind == "longrope")
    return next((rope.original_positions for rope in ropes if longest > rope.original_positions), 0)


def _tables(cfg: ModelConfig, longest: int, place: torch.device) -> Tables:
    """Tables for positions below `longest`; where longrope switches, the short factors' rows come first."""
    tables = rope_tables(cfg, longest, place)
    if not (switch := _switch(cfg, longest)):
        return tables
    joined = lambda a, b: Table(torch.cat([a.cos, b.cos]), torch.cat([a.sin, b.sin]), b.pairs)
    short = {rope: rotation.key for rope, rotation in rope_tables(cfg, switch, place).items()}
    merged = {rope: joined(short[rope], rotation.key) for rope, rotation in tables.items()}
    return {rope: Rotation(table, table) for rope, table in merged.items()}


def _with_angles(cfg: ModelConfig, rows: Rows, lengths: Sequence[int], longest: int) -> Rows:
    """Rows of documents that are now `lengths` tokens long, with their rows of `_tables`."""
    if not (switch := _switch(cfg, longest)):
        return rows
    docs = rows.docs
    first = torch.tensor([switch if n > switch else 0 for n in lengths], dtype=torch.int32)
    first = torch.repeat_interleave(first, torch.tensor(docs.lengths)).to(docs.positions.device)
    return rows._replace(angles=docs.positions + first)


def needs(cfg: ModelConfig, n_prompts: int, length: int, max_new: int, itemsize: int) -> int:
    """Upper bound of the bytes that `generate` takes on the GPU besides a unit's weights.

    `length`: tokens of the longest prompt; `itemsize`: bytes of a value of the compute dtype.
    """
    positions = n_prompts * (length + max_new)
    tokens = positions if _switch(cfg, length + max_new) else n_prompts * length
    attentions = [layer.attention for layer in cfg.layers if layer.attention]
    cache = positions * sum(a.kv_heads * (a.dim + a.value_dim) for a in attentions) * itemsize
    if spec := cfg.scan:  # states of all layers, and of one twice what the next one is made of
        state, layers = 4 * spec.heads * spec.key_dim * spec.value_dim, sum(bool(layer.scan) for layer in cfg.layers)
        cache += n_prompts * (state * (layers + 2) + layers * itemsize * (spec.taps - 1) * spec.channels)
    kinds = {shapes.kind(cfg, u): u for u in range(1, cfg.n_units - 1)}
    blocks = [temporaries(cfg, u, tokens, itemsize) for u in kinds.values()]
    prefill = 2 * tokens * cfg.width * itemsize + max(blocks)  # a block's input and output
    prefill += sum(4 * prod(shape) for shape, _ in shapes.passed_shapes(cfg, tokens).values()) * (cfg.slices > 1)
    heads = max((a.q_width + a.out_width for a in attentions), default=0)
    decode = positions * heads * (itemsize + 4)  # a layer's cache by head, and in fp32
    tables = 16 * (length + max_new) * max((a.dim for a in attentions), default=0)
    return cache + max(prefill, decode) + tables + 12 * n_prompts * cfg.vocab  # logits, copied


def _room(cfg: ModelConfig, length: int, max_new: int) -> int:
    """How many tokens may follow a prompt. Raises InputError if there is no learned position for one."""
    if not cfg.learned:
        return max_new
    if length >= cfg.max_positions:
        raise InputError(f"a prompt of {length} tokens leaves no room: the model has {cfg.max_positions} positions.")
    return min(max_new, cfg.max_positions - length)


def _logits(cfg: ModelConfig, units: Units, ids: Tensor, rows: Mapping[torch.device, Rows], cache: _Cache) -> Tensor:
    """The logits (B, V) fp32 after each document's last token."""
    x, out = (torch.empty((len(ids), cfg.width), dtype=cache.dtype, device=ids.device) for _ in range(2))
    slots = {place: cache.slots(row.docs) for place, row in rows.items()}
    passed: Passed | None = None
    for u, w in units():
        device = cache.places[u]
        if len(rows) > 1 and x.device != device:
            x, out = x.cpu().to(device), torch.empty_like(out, device=device)  # a copy between GPUs may stall others
        with torch.cuda.device(device) if len(rows) > 1 else nullcontext():
            if u == 0:
                embed = w
                head.embed_forward(w, ids, rows[device], x)
            elif u < cfg.n_units - 1:
                attend = cache.mixer(shapes.layer(cfg, u), slots[device])
                part = w.part
                if part is not None and passed is None:
                    shaped = shapes.passed_shapes(cfg, len(x))
                    passed = {name: torch.empty(s, dtype=DTYPE[d], device=device) for name, (s, d) in shaped.items()}
                model.forward(cfg, u, w, x, rows[device], {}, out, attend, passed)
                x, out = (out, x) if part is None or part.last == part.total else (x, out)
            else:
                last = x[rows[device].docs.cu_seqlens[1:].long() - 1]
                y = head.final_norm(cfg, w, last)[0]
                logits = ops.soft_cap(torch.mm(y, head.with_output(cfg, w, embed).matrix.T).float(), cfg.logit_cap)
    return logits


class _Cache:
    """Keys (B, T, K, d) and values (B, T, K, e), or the recurrence's state, or both, of each layer, on its device."""

    def __init__(
        self, cfg: ModelConfig, n_prompts: int, positions: int, places: Sequence[torch.device], dtype: torch.dtype
    ):
        self.cfg, self.dtype, self.places, self.positions = cfg, dtype, places, positions
        devices = {shapes.layer(cfg, u): places[u] for u in range(cfg.n_units - 2, 0, -1)}  # a layer's first unit
        self.k, self.v, self.states = dict[int, Tensor](), dict[int, Tensor](), dict[int, _States]()
        for i, layer in enumerate(cfg.layers):
            if spec := layer.attention:  # zeros, not NaN: what is masked is multiplied by 0
                rows = n_prompts, positions, spec.kv_heads
                self.k[i], self.v[i] = (
                    torch.zeros((*rows, d), dtype=dtype, device=devices[i]) for d in (spec.dim, spec.value_dim)
                )
            if layer.scan:
                self.states[i] = _States(layer.scan, n_prompts, devices[i], dtype)

    def slots(self, docs: ops.Docs) -> Tensor:
        """(N,): rows of the tokens of a pass in a layer's cache, seen as (B * T, K, d); each prompt is a document."""
        prompt = torch.repeat_interleave(torch.tensor(docs.lengths)).to(docs.positions.device)
        return prompt * self.positions + docs.positions

    def mixer(self, layer: int, slots: Tensor) -> Mixing:
        """The functions that a layer's mixers call in place of those of training."""
        return tuple(
            self.states[layer].recur if isinstance(spec, Scan) else self.attention(layer, slots)
            for spec in self.cfg.layers[layer].mixers
        )

    def attention(self, layer: int, slots: Tensor) -> Attend:
        """A function in place of ops.attention_fwd: first for packed prompts, then for one token each over the cache.

        As there is no backward, it returns the sums of the softmax only where sinks need them.
        """
        k_all, v_all = self.k[layer], self.v[layer]
        sinks = self.cfg.layers[layer].mixer_names.sinks
        n_prompts, length = k_all.shape[:2]

        def attend(
            q: Tensor, k: Tensor, v: Tensor, docs: ops.Docs, scale: float, window: int, out: Tensor | None, cap: float
        ) -> tuple[Tensor, Tensor]:
            k_all.flatten(0, 1)[slots] = k
            v_all.flatten(0, 1)[slots] = v
            if len(q) > n_prompts:
                return ops.attention_fwd(q, k, v, docs, scale, window, out, cap)
            distance = docs.positions[:, None] - torch.arange(length, device=q.device)
            mask = (distance >= 0) & (distance < (window or length))
            if cap:
                return _capped(q, k_all, v_all, mask, scale, cap), q.new_empty(0)
            query, keys, values = (t.transpose(1, 2) for t in (q[:, None], k_all, v_all))
            y = scaled_dot_product_attention(query, keys, values, mask[:, None, None], scale=scale, enable_gqa=True)
            return y.transpose(1, 2)[:, 0], _lse(q, k_all, mask, scale) if sinks else q.new_empty(0)

        return attend


class _States:
    """A layer's recurrence: states (B, H, d, e) fp32, and the last inputs of its convolution, (B, taps - 1, C)."""

    def __init__(self, spec: Scan, n_prompts: int, device: torch.device, dtype: torch.dtype):
        self.memory = torch.zeros((n_prompts, spec.heads, spec.key_dim, spec.value_dim), device=device)
        self.before = torch.zeros((n_prompts, spec.taps - 1, spec.channels), dtype=dtype, device=device)

    def recur(self, w: scan.ScanWeights, parts: scan.ScanParts, rows: Rows) -> Tensor:
        """In place of the recurrence of training (scan.Recur): first for packed prompts, then for one token each."""
        if len(parts.a) == len(self.memory):
            return self._next(w, parts)
        a = scan.inputs(w, parts, ops.conv_fwd(parts.channels, w.conv, w.conv_bias, rows.docs))
        out = ops.scan_fwd(a.q, a.k, a.v, a.g, a.beta, rows.docs, w.spec.delta, w.skip, None, self.memory)
        window, end = self.before.shape[1], 0
        for i, length in enumerate(rows.docs.lengths):
            end += length
            n = min(window, length)
            self.before[i, window - n :] = parts.channels[end - n : end]
        return out.flatten(1)

    def _next(self, w: scan.ScanWeights, parts: scan.ScanParts) -> Tensor:
        """The outputs for one token of each prompt, (B, H e)."""
        window = torch.cat([self.before, parts.channels[:, None]], 1)
        self.before.copy_(window[:, 1:])
        summed = (window.float() * w.conv.T.float()).sum(1)
        raw = silu(summed if w.conv_bias is None else summed + w.conv_bias.float()).to(window.dtype)
        a = scan.inputs(w, parts, raw)
        q, k = (t.float().repeat_interleave(w.spec.heads // t.shape[1], 1) for t in (a.q, a.k))
        self.memory.mul_(a.g.exp()[..., None, None])
        v = a.v.float()
        new = v - torch.einsum("bhde,bhd->bhe", self.memory, k) if w.spec.delta else v
        self.memory.add_(k[..., None] * (a.beta[..., None] * new)[:, :, None])
        y = torch.einsum("bhde,bhd->bhe", self.memory, q)
        return (y if w.skip is None else y + w.skip.float()[:, None] * v).to(window.dtype).flatten(1)


def _lse(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Logarithms of the softmax's sums, (H, B) fp32, of q (B, H, d) over keys (B, T, K, d) where mask (B, T)."""
    return torch.logsumexp(_scores(q, k, scale).masked_fill(~mask, float("-inf")), -1).flatten(0, 1)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scaled scores (K, H / K, B, T) fp32 of q (B, H, d) and keys (B, T, K, d)."""
    return torch.einsum("bkgd,btkd->kgbt", q.unflatten(1, (k.shape[2], -1)).float(), k.float()) * scale


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """Attention (B, H, d) with soft-capped scores, which torch's function does not have."""
    scores = ops.soft_cap(_scores(q, k, scale), cap).masked_fill(~mask, float("-inf"))
    return torch.einsum("kgbt,btkd->bkgd", torch.softmax(scores, -1), v.float()).flatten(1, 2).to(q.dtype)
