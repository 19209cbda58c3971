"""One training step, from top to bottom. Read this file first.

All micro-batches of a layer, then the next layer. The only wait is for loss and gradient norm, after backward. Only
functions given to `compute` touch data: a simulation runs the same code. What a function reads and writes are its uses:
it comes after their `ready`, and they free or send their buffers when they are told that it is `done`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trireme.engine.activations import ActivationSwap, saved_tensors
from trireme.engine.buffers import moving_sums, read_by_loss
from trireme.engine.geometry import Geometry
from trireme.engine.gradients import Gradient, Gradients
from trireme.engine.memory import NOTHING, Buffer, Memory, Use, flat
from trireme.engine.optimizer import Optimizer, StepStats
from trireme.engine.placement import Placement
from trireme.engine.plan import Plan
from trireme.engine.queues.names import numbered
from trireme.engine.queues.task import Kind, Queues, Task
from trireme.engine.weights import LayerPart, LayerWeights, SliceWeights, WeightStream
from trireme.models import head, model
from trireme.models.config import InputError, ModelConfig
from trireme.models.losses.comparison import Comparison
from trireme.models.losses.preferences import Documents, Preference
from trireme.models.rows import Load, Rows
from trireme.models.sizes import costs
from trireme.storage.devices import Device

Read = Mapping[int, Mapping[int, LayerWeights]]  # by losses: by GPU and unit


class Packed(NamedTuple):
    """N packed tokens on the device."""

    ids: Tensor  # (N,) int64
    labels: Tensor  # (N,) int64: the next token, -100 for none
    loss_rows: Tensor  # (M,) int64: rows with a label
    rows: Rows
    factors: Tensor | None = None  # (N,) fp32, of the tokens' losses; None: 1
    shares: head.Shares | None = None  # of a teacher
    correct: Tensor | None = None  # (1,) fp64: the loss adds the labels, by their factors, that were the likeliest


@dataclass(frozen=True)
class Inputs:
    """A simulation has sizes alone."""

    tokens: int  # N
    trained: int  # M
    pairs: int  # (query, key) pairs in a layer's attention
    packed: tuple[Packed, ...] = ()  # on each GPU
    docs: Documents | None = None  # in RAM

    def on(self, gpu: int) -> Packed:
        assert self.packed, "a simulation has no tensors"
        return self.packed[gpu]


@dataclass
class Engine:
    """Made by build.py."""

    cfg: ModelConfig
    geo: Geometry
    plan: Plan
    queues: Queues
    memory: Memory
    placement: Placement
    weights: WeightStream
    activations: ActivationSwap
    gradients: Gradients
    optimizer: Optimizer
    views: dict[tuple[int, ...], Any] = field(
        default_factory=dict, repr=False
    )  # of buffers, by layer and address; buffers never move

    def claim_scratch(self, devices: Sequence[Device]) -> None:
        """Takes scratch space for frozen weights, activations and gradients. Raises StoreError."""
        self.placement.space.claim(devices)

    def close(self) -> None:
        """Ends threads; frees scratch space and memory. The queues are the caller's."""
        self.optimizer.close()
        self.views.clear()
        self.placement.space.close()
        if self.placement.files is not None:
            self.placement.files.close()
        self.memory.close()

    def compute(
        self,
        kind: Kind,
        u: int,
        fn: Callable[[], object],
        uses: Sequence[Use],
        flops: float = 0,
        name: str = "",
        gpu: int | None = None,
        after: Sequence[Task] = (),
    ) -> Task:
        """Queues `fn` after its uses' `ready`, and tells them, in the order in which copies leave. `gpu`: not u's."""
        ready, name = [*after, *(task for use in uses for task in use.ready)], name or self.geo.names[u]
        queue = numbered("compute", self.gpu(u) if gpu is None else gpu)
        done = self.queues.run(queue, kind, name, fn, ready, flops=flops)
        for use in uses:
            use.done(done)
        return done

    def gpu(self, u: int) -> int:
        return self.plan.units[u].gpu


# ---------------------------------------------------------------- the step


def train_step(
    e: Engine,
    batch: Sequence[Inputs],
    step: int,
    lr: float,
    trained: float | None = None,
    preference: Preference | None = None,
    docs: Sequence[Sequence[Documents]] | None = None,
) -> StepStats:
    """Forward, backward and update; `step` counts from 1. `trained`: labels of all hosts, or the sum of their weights;
    with `preference`, the sum of pairs' weights. `docs`: of each host's micro-batches. None: of `batch`.

    In mode `forward` the next call runs the update, ahead of each layer's forward, or `e.optimizer.flush()` does.
    Raises InputError where no token has a label: there is no mean of the loss.
    """
    trained = sum(mb.trained for mb in batch) if trained is None else trained
    here = [mb.docs for mb in batch if mb.docs]
    comparison = Comparison(preference, docs or [here], e.plan.host) if preference else None
    if not trained:
        raise InputError(f"step {step}: none of its tokens has a label. Leave rows without labels out of the data.")
    _forward(e, batch, train=True, twice=comparison is not None)
    e.optimizer.begin(step, lr)
    parts: list[Tensor] = []
    losses, done = _losses_and_gradients(e, batch, 1 / trained, comparison, parts)
    _pool_load(e, batch)
    _backward(e, batch)
    stats = e.optimizer.conclude(losses, trained)
    if e.plan.losses:
        _add_counts(e, batch, done)
    e.optimizer.read_ahead()
    if parts:
        return replace(stats, metrics=metrics_of(parts, trained))
    return replace(stats, metrics=comparison.metrics) if comparison else stats


def metrics_of(parts: Sequence[Tensor], trained: float) -> dict[str, float]:
    """Means over labels of what a teacher's loss is made of, (2,) of each micro-batch."""
    ce, kl = torch.stack([part.cpu() for part in parts]).sum(0).tolist()
    return {"ce": ce / trained, "kl": kl / trained}


def evaluate(e: Engine, batch: Sequence[Inputs], parts: list[Tensor] | None = None) -> list[Tensor]:
    """Each micro-batch's losses (N,), zero without a label. Runs updates that are due.

    `parts` takes, where there is a teacher, sums of the two parts of each micro-batch's losses, (2,) fp64.
    """
    _forward(e, batch, train=False)
    with e.weights.of_losses(_loss_gpus(e, batch)) as w:
        losses, done = _losses(e, batch, w, parts)
    if e.plan.gpus > 1:
        _add_counts(e, batch, done)  # waits: threads of their own make the losses
    return losses


def _add_counts(e: Engine, batch: Sequence[Inputs], done: Sequence[Task]) -> None:
    """Waits for the losses' tasks, and adds what several GPUs counted to the counter on the head's GPU."""
    if e.queues.simulated:
        return
    for mb, task in zip(batch, done, strict=True):
        more, correct = task.wait(), mb.on(e.gpu(e.geo.head)).correct
        if correct is not None and more is not None:
            correct.add_(more.to(correct.device))


def stream_layers(e: Engine) -> Iterator[tuple[int, Any]]:
    """Layers in order, with prefetched weights, for a caller who computes with each: a sampled token. As `evaluate`."""
    _expect(e)
    for u in range(e.geo.head):
        for part in e.weights.parts(u):
            yield from _streamed(e, [part])
    with e.weights.of_losses([e.gpu(e.geo.head)]) as w:
        yield from _streamed(e, list(w[e.gpu(e.geo.head)].values()))


def _streamed(e: Engine, given: Sequence[LayerPart]) -> Iterator[tuple[int, Any]]:
    """The first of `given`, as `stream_layers` has it; the caller reads the others too."""
    part = given[0]
    queue, whole = numbered("compute", e.gpu(part.u)), e.geo.weights[part.u].span + e.geo.base[part.u].span
    arrived = e.queues.run(queue, "other", f"wait for {e.geo.names[part.u]}", lambda: None, part.ready)
    if e.plan.gpus > 1 and not e.queues.simulated:
        arrived.wait()  # another thread's queue
    yield part.u, weights_of(e, part)
    nbytes = e.geo.base[part.v].span if isinstance(part, SliceWeights) else whole
    done = e.queues.run(queue, "token", name_of(e, part), lambda: None, nbytes=nbytes)  # what the caller read
    for each in given:
        each.done(done)


# ---------------------------------------------------------------- forward


def _forward(e: Engine, batch: Sequence[Inputs], train: bool, twice: bool = False) -> None:
    """All layers but the head, whose weights come too. `twice`: the head reads its input so often."""
    _expect(e)
    e.activations.expect_forward(len(batch))
    for u in range(e.geo.head):
        for part in e.weights.parts(u):
            for b, mb in enumerate(batch):
                if u == 0:
                    forward_embedding(e, b, part, mb, train)
                else:
                    forward_block(e, u, b, part, mb, train, twice)


def _expect(e: Engine) -> None:
    """Weights of a forward pass, updated if that is due; a tied embedding's twice."""
    e.weights.expect([*range(e.geo.head), *read_by_loss(e.geo)], before=e.optimizer.update_before_forward)


def forward_embedding(e: Engine, b: int, w: LayerPart, mb: Inputs, train: bool) -> Task:
    out = e.activations.x[1][b].fill(mb.tokens, again=train)

    def forward() -> None:
        ids, rows = mb.on(e.gpu(0)).ids, mb.on(e.gpu(0)).rows
        head.embed_forward(weights, ids, rows, out.rows())

    weights = weights_of(e, w)
    return e.compute("forward", 0, forward, (w, out))


def forward_block(e: Engine, u: int, b: int, w: LayerPart, mb: Inputs, train: bool, twice: bool = False) -> Task:
    """Of a slice of experts: the last one leaves the layer's output and what is saved."""
    again = train and (u + 1 < e.geo.head or twice)
    x = e.activations.x[u][b].read(last=w.ends)
    out = [e.activations.x[u + 1][b].fill(mb.tokens, again)] if w.ends else []
    saved = [each.fill(mb.tokens) for each in e.activations.saved[u][b]] if train and w.ends else []
    passed = e.activations.from_slice(u, b, mb.tokens, w.begins, w.ends)

    def forward() -> None:
        rows, (onto,) = mb.on(e.gpu(u)).rows, out or (x,)  # a slice before the last leaves x as it is
        kept, sums = saved_tensors(saved), passed[0].tensors() if passed else None
        model.forward(e.cfg, u, weights, x.rows(), rows, kept, onto.rows(), passed=sums)

    weights = weights_of(e, w)
    flops = costs.forward_flops(e.cfg, u, mb.tokens, mb.pairs) * share_of(e, w)
    return e.compute("forward", u, forward, (w, *saved, x, *out, *passed), flops, name_of(e, w))


# ---------------------------------------------------------------- the head

# Where several GPUs compute the losses, all micro-batches still add to one sum of the head's gradients. It is copied
# from GPU to GPU in the order of micro-batches, so that the additions are those of one GPU. A loss does not wait for
# the sum; only the GEMM that adds to it does (`add_gradients`).
GRADIENT = "gradient"  # in the name of that GEMM's task


class Left(NamedTuple):
    """What `loss` leaves for `add_gradients`, which frees it: a buffer that both tasks use."""

    dlogits: Buffer  # (M, V)
    norm: list[head.HeadWeights]  # the final norm's gradient: `loss` appends it, `add_gradients` takes it

    @property
    def ready(self) -> tuple[Task, ...]:
        return self.dlogits.ready

    def done(self, task: Task) -> None:
        self.dlogits.ready = (task,)

    def logits(self, e: Engine, mb: Inputs) -> Tensor:
        vocab = e.cfg.vocab
        return flat(self.dlogits.tensor, e.geo.dtype, mb.trained * vocab).view(mb.trained, vocab)


class Into(NamedTuple):
    """Where the gradients of `scale` times the sum of losses go: added to `g` or, of some, left for `add_gradients`."""

    scale: float
    g: Mapping[int, Gradient]  # by unit
    left: Left | None = None
    comparison: Comparison | None = None  # has the losses' factors
    compared: Sequence[Task] = ()  # makes them


def _loss_gpus(e: Engine, batch: Sequence[Inputs]) -> Iterable[int]:
    """GPUs that compute the losses of a step's micro-batches."""
    return dict.fromkeys(map(e.plan.loss_gpu, range(len(batch))))


def _losses(
    e: Engine, batch: Sequence[Inputs], w: Read, parts: list[Tensor] | None = None
) -> tuple[list[Tensor], list[Task]]:
    """Each micro-batch's losses, and their tasks."""
    losses = [NOTHING] * len(batch)
    return losses, [loss(e, b, w[e.plan.loss_gpu(b)], mb, losses, parts) for b, mb in enumerate(batch)]


def _losses_and_gradients(
    e: Engine, batch: Sequence[Inputs], scale: float, comparison: Comparison | None, parts: list[Tensor]
) -> tuple[list[Tensor], list[Task]]:
    """As `_losses`, and the head's gradients of scale * their sum.

    With `comparison` all losses come first; it makes the factors of their gradients, and the losses that are returned.
    """
    read, waits = read_by_loss(e.geo), bool(moving_sums(e.geo, e.plan))
    losses, done, compared = [NOTHING] * len(batch), list[Task](), list[Task]()
    with e.weights.of_losses(_loss_gpus(e, batch)) as w:
        if comparison:
            compared = [_compare(e, comparison, *_losses(e, batch, w))]
            e.activations.expect_head(len(batch))
        for b, mb in enumerate(batch):
            gpu = e.plan.loss_gpu(b)
            g = {v: e.gradients.get(v, gpu) for v in read}
            left = Left(e.gradients.dlogits[gpu].acquire(f"dlogits {b}"), []) if waits else None
            into = Into(scale, {} if left else g, left, comparison, compared)
            done.append(loss(e, b, w[gpu], mb, losses, parts, into))
            if left:
                add_gradients(e, b, w[gpu], g, mb, left)
    for v in read if waits else ():
        e.gradients.get(v)  # back to its GPU
    e.optimizer.finish(e.geo.head)
    for v in read[1:]:
        e.gradients.set_aside(v)
    return comparison.losses if comparison else losses, done


def _compare(e: Engine, comparison: Comparison, losses: list[Tensor], made: Sequence[Task]) -> Task:
    def compare() -> None:
        if e.plan.losses:
            for task in made:
                task.wait()
        comparison.run(losses, e.gradients.gather)

    return e.queues.run(numbered("compute", e.gpu(e.geo.head)), "other", "comparison", compare, made)


def loss(
    e: Engine,
    b: int,
    w: Mapping[int, LayerWeights],
    mb: Inputs,
    losses: list[Tensor],
    parts: list[Tensor] | None = None,
    into: Into | None = None,
) -> Task:
    """Sets micro-batch b's losses, times their factors; with `into` adds gradients too. `parts`: as of `evaluate`.

    The task's result, where several GPUs compute losses: how many labels were the likeliest token; else None.
    """
    u, gpu = e.geo.head, e.plan.loss_gpu(b)
    scale, g, left, comparison, compared = into or Into(1.0, {})
    x = e.activations.x[u][b].read(last=left is None)
    dx = e.activations.dx[u][b].fill(mb.tokens) if into else None
    place = _place(e, mb, parts)

    def add() -> Tensor | None:
        at, out = mb.on(gpu), dx.rows() if dx else None
        w_out = model.output_matrix(e.cfg, weights.get(0), weights[u])
        g_out = model.output_matrix(e.cfg, grads.get(0), grads[u]) if g else None
        factors = comparison.factors[b] if comparison else at.factors
        given = (weights[u], w_out, x.rows(), at.labels, at.loss_rows)
        correct = None if comparison else at.correct
        more = None if correct is None or not e.plan.losses else torch.zeros_like(correct, device=at.labels.device)
        own, dlogits = grads.get(u), left.logits(e, mb) if left else None
        if left:
            own = head.norm_sums(weights[u], torch.float32 if e.plan.sums_wide else x.rows().dtype)
            left.norm.append(own)
        counts = correct if more is None else more
        found = head.head_loss(e.cfg, *given, scale, own, g_out, out, factors, at.shares, counts, dlogits)
        found = found if factors is None else found * factors
        if at.shares is not None and e.cfg.teaching:
            if parts is not None:
                parts[place] = found.sum(1, dtype=torch.float64)
            found = torch.lerp(found[0], found[1], e.cfg.teaching.weight)
        losses[b] = found
        return more

    weights = {v: weights_of(e, layer) for v, layer in w.items()}
    grads = {v: gradients_of(e, v, gradient) for v, gradient in g.items()}
    once, back = (count(e.cfg, u, mb.trained, mb.pairs) for count in (costs.forward_flops, costs.backward_flops))
    flops = once + (once if left else back if g else 0)
    written: list[Use] = [use for use in (dx, left) if use]
    uses: list[Use] = [*w.values(), x, *g.values(), *written]
    return e.compute("loss", u, add, uses, flops, gpu=gpu, after=compared)


def add_gradients(
    e: Engine, b: int, w: Mapping[int, LayerWeights], g: Mapping[int, Gradient], mb: Inputs, left: Left
) -> Task:
    """Adds to `g` what `loss` of micro-batch b left."""
    u, gpu = e.geo.head, e.plan.loss_gpu(b)
    x = e.activations.x[u][b].read()

    def add() -> None:
        g_out = model.output_matrix(e.cfg, grads.get(0), grads[u])
        given = weights[u], x.rows(), mb.on(gpu).loss_rows, left.logits(e, mb), left.norm.pop()
        head.head_gradients(e.cfg, *given, grads[u], g_out)

    weights = {v: weights_of(e, layer) for v, layer in w.items()}
    grads = {v: gradients_of(e, v, gradient) for v, gradient in g.items()}
    once, back = (count(e.cfg, u, mb.trained, mb.pairs) for count in (costs.forward_flops, costs.backward_flops))
    uses: tuple[Use, ...] = (*w.values(), x, *g.values(), left)
    done = e.compute("loss", u, add, uses, back - once, f"{e.geo.names[u]} {GRADIENT}", gpu)
    left.dlogits.free((done,))
    return done


def _place(e: Engine, mb: Inputs, parts: list[Tensor] | None) -> int:
    """Where the parts of a micro-batch's loss go, if it has a teacher: in the order of micro-batches."""
    if parts is not None and e.cfg.teaching and mb.packed and mb.packed[0].shares is not None:
        parts.append(NOTHING)
    return len(parts or ()) - 1


def _pool_load(e: Engine, batch: Sequence[Inputs]) -> None:
    """Tells every GPU the load of experts on all, and on all hosts, which gradients of its balance need."""
    if e.cfg.experts is None or e.plan.gpus == e.plan.hosts == 1:
        return

    def run(gpu: int, fn: Callable[[Load], Any], after: Sequence[Task] = ()) -> Task:
        def with_load() -> Any:
            load = batch[0].on(gpu).rows.load
            return None if load is None or not (load.weight or e.plan.gpus > 1) else fn(load)

        return e.queues.run(numbered("compute", gpu), "other", "load", with_load, after)

    def of_hosts(load: Load) -> list[tuple[Tensor, Tensor]]:
        here = [task.wait() for task in told]
        return e.gradients.over_hosts(here) if load.weight else here

    told = [run(gpu, lambda load: load.in_ram()) for gpu in range(e.plan.gpus)]
    every = run(0, of_hosts, told)
    for gpu in range(e.plan.gpus):
        run(gpu, lambda load: load.pool_(every.wait()), (every,))


# ---------------------------------------------------------------- backward


def _backward(e: Engine, batch: Sequence[Inputs]) -> None:
    blocks = range(e.geo.head - 1, 0, -1)
    e.weights.expect(blocks)
    e.activations.expect_backward(len(batch))
    for u in blocks:
        for part in e.weights.parts(u, backward=True):
            for b, mb in enumerate(batch):
                backward_block(e, u, b, part, mb)
        e.optimizer.finish(u)
    for b, mb in enumerate(batch):
        backward_embedding(e, b, mb)
    e.optimizer.finish(0)


def backward_block(e: Engine, u: int, b: int, w: LayerPart, mb: Inputs) -> Task:
    """Of a slice of experts: the last one reads what is saved, and leaves the input's gradient."""
    gradient = e.gradients.get(u)
    x, dy = e.activations.x[u][b].read(last=w.ends), e.activations.dx[u + 1][b].read(last=w.ends)
    saved = [each.read() for each in e.activations.saved[u][b]] if w.ends else []
    dx = [e.activations.dx[u][b].fill(mb.tokens)] if w.ends else []
    passed = e.activations.from_slice(u, b, mb.tokens, w.begins, w.ends)

    def backward() -> None:
        rows, (onto,) = mb.on(e.gpu(u)).rows, dx or (x,)  # a slice before the last leaves x as it is
        kept, sums = saved_tensors(saved), passed[0].tensors() if passed else None
        given = x.rows(), kept, dy.rows(), rows, onto.rows(), sums
        model.backward(e.cfg, u, weights, grads, *given)

    weights, grads = weights_of(e, w), gradients_of(e, u, gradient)
    kept = frozenset(name for name, _ in e.plan.units[u].saved)
    flops = costs.backward_flops(e.cfg, u, mb.tokens, mb.pairs)
    flops += costs.recompute_flops(e.cfg, kept, mb.tokens, mb.pairs, e.geo.kinds[u])
    uses = w, gradient, x, *saved, dy, *dx, *passed
    return e.compute("backward", u, backward, uses, flops * share_of(e, w), name_of(e, w))


def backward_embedding(e: Engine, b: int, mb: Inputs) -> Task:
    gradient, dy = e.gradients.get(0), e.activations.dx[1][b].read()

    def backward() -> None:
        head.embed_backward(grads, dy.rows(), mb.on(e.gpu(0)).ids, mb.on(e.gpu(0)).rows)

    grads = gradients_of(e, 0, gradient)
    return e.compute("backward", 0, backward, (gradient, dy))


# ---------------------------------------------------------------- tensors


def weights_of(e: Engine, part: LayerPart) -> Any:
    """A layer's weights in use by the block's names, as model.weights. A simulation has none."""
    if e.queues.simulated:
        return None
    own = e.geo.slice_at(part.v).own if isinstance(part, SliceWeights) else None
    key = part.u, own.start if own else 0, *(frozen.get().tensor.data_ptr() for frozen in part.stored)
    if key not in e.views:
        e.views[key] = model.weights(e.cfg, part.u, e.weights.tensors(part), own)
    return e.views[key]


def name_of(e: Engine, part: LayerPart) -> str:
    """Of a layer, or of a slice of its experts."""
    return e.geo.base_names[part.v] if isinstance(part, SliceWeights) else e.geo.names[part.u]


def share_of(e: Engine, part: LayerPart) -> float:
    """Of a layer's work."""
    return e.geo.share_of_slice(part.v) if isinstance(part, SliceWeights) else 1


def gradients_of(e: Engine, u: int, gradient: Gradient) -> Any:
    """As `weights_of`, of its gradients."""
    if e.queues.simulated:
        return None
    key = u, gradient.buffer.tensor.data_ptr()
    if key not in e.views:
        e.views[key] = model.gradients(e.cfg, u, e.gradients.tensors(u, gradient))
    return e.views[key]
