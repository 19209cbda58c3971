"""The figures of tables.py: published numbers, the papers' equations, and Trireme's step code on the papers' machines.

Nothing is fitted: rates are those of engine/planner/rates.py and of the papers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from trireme.engine.buffers import fits
from trireme.engine.geometry import Geometry
from trireme.engine.plan import DoesNotFit
from trireme.engine.planner.choose import choose
from trireme.engine.planner.advice import check_drive
from trireme.engine.planner.forecast import Forecast, Work
from trireme.engine.planner.gpus import GPUS
from trireme.engine.planner.predict import Batch, predict
from trireme.engine.planner.rates import DRIVES, GB, Machine, machine
from trireme.engine.planner.rule import Wanted, simple_plan, sizes_of
from trireme.engine.planner.sizes import find_model
from trireme.engine.run.plan import record_size
from trireme.engine.tuning.chosen import adapted, targets
from trireme.models.config import Lora, ModelConfig, uniform
from trireme.models.sizes import costs, shapes

SEQ = 1024
GIB = 1 << 30
Row = list[object]  # cells of a table


def gpt3(width: int, layers: int, heads: int) -> ModelConfig:
    return uniform("gpt2", 50257, width, layers, heads, heads, width // heads, 4 * width, 8192, 1e-5, True,
                   qkv_bias=True, o_bias=True, mlp_bias=True)  # fmt: skip


# Fuyou, table 4.
GPT = {
    "13B": gpt3(5120, 40, 40), "33B": gpt3(6656, 60, 52), "65B": gpt3(8192, 80, 64), "135B": gpt3(11264, 88, 88),
    "175B": gpt3(12288, 96, 96), "276B": gpt3(14336, 112, 112), "412B": gpt3(16384, 128, 128),
    "805B": gpt3(20480, 160, 160),
}  # fmt: skip
# PatrickStar, table 2, and STRONGHOLD's size: hidden width and layers.
NARROW = {f"{n}B": gpt3(width, layers, heads) for n, width, layers, heads in (
    (1.7, 2304, 24, 24), (4, 3072, 32, 32), (6, 4096, 28, 32), (10, 4096, 48, 32), (12, 4096, 58, 32),
    (15, 4096, 73, 32), (20, 8192, 25, 64), (30, 8192, 37, 64), (40, 8192, 49, 64), (50, 8192, 62, 64),
    (60, 8192, 75, 64), (68, 9216, 66, 72), (80, 9216, 78, 72), (100, 9216, 98, 72),
)}  # fmt: skip

SERVER_DRAM = 150 * GB  # eight channels of DDR4-2933 (188 GB/s on paper), at 0.8
FUYOU_BLOCK = {"rtx4090": 164e12, "a100-80g": 200e12}  # a Transformer block (section 1, footnote 3)


def fuyou_server(gpu: str, drives: int = 12, ram: int = 768) -> Machine:
    """The machine of Fuyou's table 3, and of LoHan."""
    return machine(GPUS[gpu], ram * 10**9, DRIVES["p5510"], drives, SERVER_DRAM)


# ---------------------------------------------------------------- published systems


def fuyou_seconds(cfg: ModelConfig, sequences: int, gpu: str, drives: int, overlapped: bool = True) -> float:
    """A step by Fuyou's equations 1 to 8, with the best swapped share; or with updates after backward.

    16-bit parameters are read for both passes; 12 + 2 bytes of state a parameter are read and 14 written. Reads and
    writes of the drives add up, both directions of PCIe overlap.
    """
    r, p, tokens = fuyou_server(gpu, drives).rates, shapes.parameters(cfg), sequences * SEQ
    pairs = costs.attended_pairs([SEQ] * sequences)
    forward = costs.model_flops(cfg, tokens, pairs) / 3 / FUYOU_BLOCK[gpu]
    checkpoint = 2 * tokens * cfg.width * cfg.n_layers
    inner = cfg.n_layers * sum(shapes.saved_bytes(cfg, tokens, 2).values())

    def step(share: float) -> float:
        swapped = checkpoint + share * inner
        up = max(forward, max(2 * p, swapped) / r.h2d, 2 * p / r.ssd_read + swapped / r.ssd_write)
        state = 12 * p / r.ssd_read + 14 * p / r.ssd_write
        down = max((3 - share) * forward, (2 * p + swapped) / r.h2d)
        read = (2 * p + swapped) / r.ssd_read
        if overlapped:
            return up + max(down, p / r.adam, state + read)
        return up + max(down, read) + max(p / r.adam, state)

    return min(step(i / 20) for i in range(21))


def zero_infinity_seconds(cfg: ModelConfig, sequences: int, gpu: str) -> float:
    """A step of ZeRO-Infinity as Fuyou describes it (section 3, figure 2a): nothing overlaps, blocks are recomputed.

    Parameters come from the drives and over PCIe for both passes, checkpoints of blocks go to RAM, gradients to RAM;
    then 12 + 2 bytes of state a parameter are read, updated and written.
    """
    r, p, tokens = fuyou_server(gpu, 12).rates, shapes.parameters(cfg), sequences * SEQ
    computed = costs.model_flops(cfg, tokens, costs.attended_pairs([SEQ] * sequences)) * 4 / 3 / FUYOU_BLOCK[gpu]
    checkpoint = 2 * tokens * cfg.width * cfg.n_layers
    passes = 4 * p / r.ssd_read + (4 * p + checkpoint) / r.h2d + (2 * p + checkpoint) / r.d2h
    return computed + passes + 14 * p / r.ssd_read + p / r.adam + 14 * p / r.ssd_write


@dataclass(frozen=True)
class Published:
    """A printed throughput: TFLOP/s at `sequences` of 1,024 tokens."""

    system: str
    model: str
    gpu: str
    drives: int
    sequences: int
    tflops: float
    why: str = ""  # the simulation is off by more than 15 %


WHY = {
    "memory": "The equations assume GPU memory for every swapped activation. With a block of 175B on it (3.6 GB of "
    "weights and as much of gradients), a GPU of 24 GB has no room for them; the paper names this as its limit.",
    "peak": "The equations assume that blocks run at the benchmarked 200 TFLOP/s all the time, and that RAM for "
    "activations in flight is unlimited. The paper reaches 0.86 to 0.82 of that rate.",
    "simplex": "The equations add the time of reading to that of writing (4 and 7). With one drive, which limits the "
    "step, the sum is longer than the published step: the drive partly overlaps the two.",
}
THROUGHPUT = (
    Published("Fuyou, figure 5c", "13B", "rtx4090", 12, 64, 156),
    Published("Fuyou, figure 5b", "13B", "a100-80g", 12, 80, 202),
    Published("Fuyou, figure 5a", "175B", "rtx4090", 12, 16, 87, "memory"),
    Published("Fuyou, figure 5a", "175B", "a100-80g", 12, 64, 172, "peak"),
    Published("Fuyou, figure 6", "276B", "a100-80g", 12, 64, 168, "peak"),
    Published("Fuyou, figure 6", "412B", "a100-80g", 12, 64, 163, "peak"),
    Published("LoHan", "13B", "rtx4090", 1, 32, 37.5, "simplex"),
    Published("LoHan", "13B", "rtx4090", 2, 32, 64.3),
    Published("LoHan", "13B", "rtx4090", 3, 32, 81.1),
    Published("LoHan", "13B", "rtx4090", 6, 32, 121.7),
    Published("LoHan", "13B", "rtx4090", 12, 32, 142.0),
)


# ---------------------------------------------------------------- Trireme


def forecast(cfg: ModelConfig, m: Machine, sequences: int, mode: str = "forward", placement: str = "auto") -> Forecast:
    """By the rule's plan; `sequences` of 1,024 tokens. Raises DoesNotFit."""
    rows = [k for k in (16, 8, 4, 2, 1) if k <= sequences]
    record = record_size(shapes.parameters(cfg), m.limits.host)
    wanted = Wanted(sizes_of(rows, sequences, SEQ), mode=mode, placement=placement, record=record)
    made = Forecast(cfg, simple_plan(cfg, m.limits, wanted), m, m.limits, Work(SEQ, sequences, 1))
    check_drive(made)
    return made


def faster(made: Forecast, placement: str) -> Forecast:
    """The estimate of the same step with the plan of a search, as a run makes it."""
    p = made.plan
    sizes = [(2 * p.tokens, p.n_micro // 2), (p.tokens, p.n_micro), (p.tokens // 2, 2 * p.n_micro)]
    sizes = sizes[p.n_micro % 2 : 2 + (p.tokens > SEQ)]
    wanted = Wanted(tuple(sizes), p.dtype, p.mode, p.record, placement=placement, document=SEQ)
    return replace(made, plan=choose(made.cfg, made.limits, made.machine.rates, wanted).plan)


def with_adapters(cfg: ModelConfig, rank: int) -> ModelConfig:
    """`cfg`, or with adapters of `rank` on every linear layer."""
    return adapted(cfg, Lora(rank, 2.0 * rank, targets(cfg, ()))) if rank else cfg


def best(cfg: ModelConfig, m: Machine, most: int, mode: str, placement: str = "auto") -> Forecast | None:
    """The largest step that fits, halving from `most` sequences."""
    while most:
        try:
            return faster(forecast(cfg, m, most, mode, placement), placement)
        except DoesNotFit:
            most //= 2
    return None


def lacks(refusal: DoesNotFit) -> str:
    return next((tier for tier in ("GPU memory", "RAM") if f"of {tier}" in str(refusal)), "disk")


def largest(models: dict[str, ModelConfig], m: Machine) -> str:
    """The largest model that trains, with one sequence and no clipping."""
    fits = "none"
    for name, cfg in models.items():
        try:
            forecast(cfg, m, 1, "backward")
            fits = name
        except DoesNotFit:
            continue
    return fits


# ---------------------------------------------------------------- rows of tables


def throughput() -> list[Row]:
    """Published throughputs and both simulations."""
    rows = []
    for p in THROUGHPUT:
        cfg, m = GPT[p.model], fuyou_server(p.gpu, p.drives)
        flops = costs.model_flops(cfg, p.sequences * SEQ, costs.attended_pairs([SEQ] * p.sequences))
        simulated = flops / fuyou_seconds(cfg, p.sequences, p.gpu, p.drives) / 1e12
        ours, on_ssd = best(cfg, m, p.sequences, "backward"), best(cfg, m, p.sequences, "backward", "state-ssd")
        assert ours is not None
        rows.append(
            [p.system, p.model, GPUS[p.gpu].name, p.drives, p.sequences, f"{p.tflops:g}", f"{simulated:.0f}"]
            + [f"{simulated / p.tflops:.2f}{f' ({p.why})' * bool(p.why)}", f"{ours.tflops:.0f}"]
            + [f"{on_ssd.tflops:.0f}" if on_ssd else "–", f"{ours.work.sequences} sequences, {ours.step.bound}"]
        )
    return rows


def sizes() -> list[Row]:
    """The largest models of papers and of Trireme."""
    rows = []
    for gpu, ram, size in (("rtx4090", 128, "65B"), ("rtx4090", 768, "276B"), ("a100-80g", 768, "805B")):
        name = f"{GPUS[gpu].name}, {ram} GB, 12 drives"
        rows.append(["Fuyou, figure 4", name, size, largest(GPT, fuyou_server(gpu, 12, ram))])
    for system, gpu, ram, size in (
        ("STRONGHOLD, figure 6a", "v100-32g", 755, "39.5B"),
        ("PatrickStar, figure 10", "v100-32g", 240, "12B"),
        ("PatrickStar, figure 10", "a100-40g", 1000, "50B"),
    ):
        m = machine(GPUS[gpu], ram * 10**9, None, dram=SERVER_DRAM)
        rows.append([system, f"{GPUS[gpu].name}, {ram} GB, no drive", size, largest(NARROW, m)])
    return rows


WINDOWS = (1, 2, 3, 4, 6, 8, 12)


def windows() -> list[Row]:
    """Share of the best throughput over buffers of weights, on STRONGHOLD's V100 (figure 9)."""
    m, rows = machine(GPUS["v100-32g"], 755 * 10**9, None, dram=SERVER_DRAM), []
    for name, cfg, sequences in (("1.7B", NARROW["1.7B"], 4), ("1.7B", NARROW["1.7B"], 16), ("40B", NARROW["40B"], 4)):
        record = record_size(shapes.parameters(cfg), m.limits.host)
        wanted = Wanted(((sequences * SEQ, 1),), mode="backward", record=record, placement="host")
        plan = simple_plan(cfg, m.limits, wanted)
        made = [replace(plan, window=n, units=tuple(replace(u, saved=()) for u in plan.units)) for n in WINDOWS]
        made = [p for p in made if fits(Geometry.of(cfg, p), p, m.limits)]
        seconds = [predict(cfg, p, m.rates, Batch(p.tokens, SEQ, 1)).step_s for p in made]
        shares = [f"{min(seconds) / s:.0%}" for s in seconds] + ["does not fit"] * (len(WINDOWS) - len(seconds))
        rows.append([f"{name}, {sequences}", *shares])
    return rows


BUYERS = {
    "7B": find_model("llama-7b"), "13B": find_model("llama-13b"), "33B": find_model("llama-33b"),
    "70B": find_model("llama-70b"),
    "175B": find_model("gpt3-175b"), "405B": find_model("llama-405b"),
}  # fmt: skip
DRIVE = replace(DRIVES["gen4"], capacity=4 * 10**12, endurance=2400e12)


def buyers() -> list[Row]:
    """What an RTX 4090 trains, by RAM and drives."""
    rows: list[Row] = []
    for (name, cfg), ram, drives in product(BUYERS.items(), (64, 128, 256), (1, 2, 4)):
        m = machine(GPUS["rtx4090"], ram * GIB, DRIVE, drives)
        found = best(cfg, m, 128, "forward") or best(cfg, m, 128, "backward")
        if found is None:
            try:
                forecast(cfg, m, 1, "backward")
            except DoesNotFit as refusal:
                rows.append([name, ram, drives, f"does not fit: {lacks(refusal)}", *[""] * 5])
            continue
        clip = "" if found.plan.mode == "forward" else ", no clip"
        rows.append(
            [name, ram, drives, f"{found.work.sequences}{clip}", f"{found.step.step_s:.3g}", tokens_per_s(found)]
            + [f"{found.tflops:.0f}", found.step.bound, written(found)]
        )
    return rows


def adapters() -> list[Row]:
    """What LoRA trains on an RTX 4090: rank 16 on all linear layers, by sequences per step, RAM and drives."""
    rows = []
    for model, sequences, ram, drives in product(("8B", "33B", "70B"), (8, 32), (64, 128), (1, 2)):
        cfg = with_adapters(find_model(f"llama-{model.lower()}"), 16)
        m = machine(GPUS["rtx4090"], ram * GIB, DRIVE, drives)
        wanted = Wanted(sizes_of([k for k in (16, 8, 4, 2, 1) if k <= sequences], sequences, SEQ), document=SEQ)
        f = Forecast(cfg, choose(cfg, m.limits, m.rates, wanted).plan, m, m.limits, Work(SEQ, sequences, 1))
        assert not f.step.ssd_written
        base = sum(f.geo.base[u].span for u, unit in enumerate(f.plan.units) if unit.base == "ssd")
        rows.append(
            [model, f"{f.work.tokens:,}", ram, drives, f"{base / GIB:.0f}", f"{f.step.step_s:.3g}", tokens_per_s(f)]
            + [f"{f.tflops:.0f}", f.step.bound]
        )
    return rows


MIXTURES = "qwen3-30b", "gpt-oss-20b", "gpt-oss-120b", "glm-air", "qwen3-235b"


def mixtures() -> list[Row]:
    """Mixtures of experts by (RTX 4090s, RAM) with two drives: in full with 8-bit moments, and LoRA of attention."""
    rows: list[Row] = []
    for model, rank, (gpus, ram) in product(MIXTURES, (0, 16), ((1, 64), (1, 128), (2, 128))):
        cfg, sequences = with_adapters(find_model(model), rank), 32 if rank else 128
        m = replace(machine(GPUS["rtx4090"], ram * GIB, DRIVE, 2), gpus=gpus)
        sizes, record = sizes_of((16, 8, 4, 2, 1), sequences, SEQ), record_size(shapes.parameters(cfg), m.limits.host)
        wanted = Wanted(sizes, record=record, adam_bits=32 if rank else 8, document=SEQ, gpus=gpus)
        start = [model, f"LoRA {rank}" if rank else "all", f"{sequences * SEQ:,}", gpus, ram]
        try:
            plan = choose(cfg, m.limits, m.rates, wanted).plan
            f = Forecast(cfg, plan, m, m.limits, Work(SEQ, sequences, 1))
            check_drive(f)
        except DoesNotFit as refusal:
            rows.append([*start, f"does not fit: {lacks(refusal)}", *[""] * 3])
            continue
        rows.append([*start, f"{f.step.step_s:.3g}", tokens_per_s(f), f.step.bound, written(f)])
    return rows


def tokens_per_s(f: Forecast) -> str:
    return f"{f.work.tokens / f.step.step_s:,.0f}"


def written(f: Forecast) -> str:
    """TB written per million tokens."""
    x = f.step.ssd_written / f.work.tokens / 1e6
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"
