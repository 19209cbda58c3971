"""Training that knows it will be packed: it has the loss of the model merged in the format of its base."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from engines import JitterQueues, batches, exchange, final_weights, opened, train
from kernel_checks import DEVICES
from packed_files import FORMATS

from trireme.engine.between import Reader
from trireme.engine.tuning.adapters import trained_values, write_adapter
from trireme.engine.tuning.chosen import adapted, aware
from trireme.engine.tuning.merging import merge_adapter
from trireme.engine.tuning.parts import open_checkpoint
from trireme.kernels.packed.reference import Adapters
from trireme.models import rounded
from trireme.models.config import InputError, Lora, read_config
from trireme.models.encoding import arrays, encoded
from trireme.models.families.packing import BY_ROW, FP8, INT4, INT4_ZEROS, MODELOPT, MX, NF4, NVFP4, WHOLE
from trireme.models.packed import damage, decode
from trireme.models.rounded import decode_sum

pytestmark = pytest.mark.turns

LR, RANK = 0.03, 2
# Scales that are packed again themselves, which training leaves as they are; matrices that merging rounds to bf16, and
# one that is decoded as it is read, since its neighbour is not packed.
CODES = ("fp8", "nf4", "int4", "nvfp4", "mxfp4")  # one form of each: what is not aware has another loss
LESS_EQUAL = ("nf4, double", "nf4, experts", "fp8, powers of two", "fp8, one in bf16")
PACKINGS = {
    "mxfp4": MX, "nvfp4": NVFP4, "modelopt": MODELOPT, "nf4": NF4, "int4": replace(INT4, block=(1, 32)),
    "int4, zeros": replace(INT4_ZEROS, block=(1, 32)), "fp8": replace(FP8, block=(16, 32)), "by row": BY_ROW,
    "by tensor": BY_ROW.scaled(WHOLE, WHOLE),
}  # fmt: skip


# Experts, matrices of each, their rows and columns. The last two are read in strips of rows, of 2^22 numbers at most.
SUMS = [(1, 1, 80, 64), (4, 1, 48, 96), (3, 2, 24, 64), (1, 1, 2064, 2112), (1, 2, 1040, 2112)]


def engine(folder, targets, knows=True, tier="ram", dtype="F32", **change):
    """(an engine with adapters that begin at zero, its config)."""
    cfg, source, _ = opened(folder, lambda cfg: adapted(cfg, Lora(RANK, 8.0, targets)))
    cfg = aware(cfg, None) if knows else cfg
    e, x = exchange(cfg, source, tier, dtype=dtype, **change)
    x.load()
    return e, cfg


def trained(e, steps=3):
    return train(e, batches(e.cfg, steps, 2, 24), lr=LR), final_weights(e)


@pytest.mark.grid("mxfp4")
@pytest.mark.parametrize("form", FORMATS)
def test_the_merged_model_has_the_loss_of_training(made, form, tmp_path):
    (folder, *_), targets = made(form), FORMATS[form].targets if form != "gpt-oss" else ("experts",)
    e, cfg = engine(folder, targets)
    trained(e)
    write_adapter(tmp_path / "adapter", cfg, trained_values(Reader(e.placement)), str(folder))
    probe = batches(cfg, 1, 2, 24)
    ((loss, *_),) = train(e, probe)
    plain, source = read_config(folder), open_checkpoint(folder, cfg.packing)
    merge_adapter(tmp_path / "adapter", plain, source, tmp_path / "same", say=lambda _: None, same=True)
    ((merged, *_),) = train(engine(tmp_path / "same", targets, knows=False)[0], probe)
    assert merged == pytest.approx(loss, rel=1e-3 if form in LESS_EQUAL else 2e-6)
    if form not in CODES:
        return
    e, _ = engine(folder, targets, knows=False)
    trained(e)
    ((other, *_),) = train(e, probe)
    assert abs(other - loss) > 1e-4


@pytest.mark.full
@pytest.mark.parametrize("form", ["fp8, experts", "gpt-oss", "modelopt, experts", "int4, zeros"])
def test_placement_changes_no_bit(made, form):
    (folder, *_), targets = made(form), FORMATS[form].targets
    expected = trained(engine(folder, targets, dtype="BF16")[0], 2)
    ways = [("gpu", {}), ("ssd", dict(halves=True, queues=JitterQueues(1)))]
    if "experts" in targets:
        ways[1:] = [("ram", dict(halves=True, at_once=2)), ("ssd", dict(halves=True, slices=3, queues=JitterQueues(2)))]
    for tier, change in ways:
        seen, weights = trained(engine(folder, targets, True, tier, "BF16", **change)[0], 2)
        assert seen == expected[0], (tier, change)
        assert all(torch.equal(t, expected[1][name]) for name, t in weights.items())


@pytest.mark.parametrize("form", ["mxfp4", "gpt-oss"])
def test_adapters_of_zero_change_no_bit_where_packed_numbers_are_exact(made, form):
    (folder, *_), targets = made(form), FORMATS[form].targets
    first = [
        train(engine(folder, targets, knows)[0], batches(read_config(folder), 1, 2, 24)) for knows in (True, False)
    ]
    assert first[0] == first[1]


def packed(packing, w):
    """(parts of matrices (M, R, C), the same decoded)."""
    shapes, made = packing.shapes(w.shape[1:]), encoded(packing, w, w.abs().amax((1, 2)))
    parts = [part.contiguous().view(len(w), *shape) for part, shape in zip(made, shapes, strict=True)]
    return parts, decode(packing, parts, torch.empty_like(w))


@pytest.mark.grid
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("experts", "each", "rows", "columns"), SUMS)
@pytest.mark.parametrize("name", PACKINGS)
def test_a_sum_in_strips_is_that_of_whole_matrices(name, experts, each, rows, columns, device):
    """But for last bits of sums of several products, which may lie at the edge between two codes."""
    dice, packing = torch.Generator().manual_seed(len(name)), PACKINGS[name]
    parts, base = packed(packing, torch.randn(experts * each, rows, columns, generator=dice))
    a, b = (torch.randn(experts, 3, n, generator=dice) / 3 for n in (columns, each * rows))
    total = base.view(experts, -1, columns) + 2 * b.mT @ a
    expected = packed(packing, total.view(base.shape))[1].view(total.shape)
    parts = parts if experts > 1 else [part.squeeze(0) for part in parts]
    parts, out = [part.to(device) for part in parts], torch.empty_like(total, device=device)
    made = decode_sum(packing, parts, a.to(device), b.to(device), 2.0, out if experts > 1 else out[0], True)
    off = ((made.view(total.shape).cpu() - expected).abs() > 1e-6 * expected.abs().max()).sum()
    assert off <= 2 + total.numel() // 250_000


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OTHERS = {
    "fp8 in bf16": FP8.with_dtypes(("F8_E4M3", "BF16")), "fp8, powers": FP8.with_dtypes(("F8_E4M3", "U8")),
    "int4 in fp32": replace(INT4, block=(1, 128)).with_dtypes(("I32", "F32")),
}  # fmt: skip
F16 = {"fp8 in fp16": FP8.with_dtypes(("F8_E4M3", "F16")), "int4 in fp16": INT4.with_dtypes(("I32", "F16"))}


@pytest.mark.parametrize("name", PACKINGS | OTHERS | F16)
def test_small_numbers_are_encoded_to_what_can_be_read(name):
    """Of which the inverse or the scale in fp16 is none, in whole matrices and in single rows."""
    packing, dice = (PACKINGS | OTHERS | F16)[name], torch.Generator().manual_seed(1)
    w = torch.randn(74, 16, 128, generator=dice) * torch.exp2(-4 * (torch.arange(74.0) % 37)).view(-1, 1, 1)
    w[:, :, ::5], w[37:, 1:] = 0, torch.randn(15, 128, generator=dice)
    parts, again = packed(packing, w)
    assert ((again - w).abs().amax((1, 2)) <= w.abs().amax((1, 2))).all()
    assert not any(map(partial(damage, packing), packing.parts, arrays(parts)))


@pytest.mark.grid("nvfp4-bf16-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PACKINGS | OTHERS)
def test_launches_round_to_the_same_bits(name, dtype, device):
    """Zeros, subnormal and large numbers, ties, and groups with one of them; with adapters whose sums are exact."""
    packing, dice = (PACKINGS | OTHERS)[name], torch.Generator().manual_seed(len(name))
    rows, columns = (256, 384) if name.startswith("fp8") else (48, 256)
    if device == "cpu":  # interpreted
        rows, columns = (128, 256) if name.startswith("fp8") else (24, 256)
    x = torch.randn(3, rows, columns, generator=dice)
    spread, half = (-16, 8) if name.startswith("int4") else (-120, 60), columns // 2
    x[0, ::3] *= torch.exp2(torch.randint(*spread, (len(x[0, ::3]), 1), generator=dice).float())
    quarters = torch.randint(-24, 25, (rows, half), generator=dice) / 4
    x[1, :, :half] = quarters.where(x[1, :, ::2] > -1, 0)
    x[1, :, 0], x[1, 7], x[2, 16:24, 32:64] = 6.0, -0.0, 0
    experts, each = (1, 3) if packing.code == "e4m3" else (3, 1)
    ranks = torch.nn.functional.one_hot(torch.randint(17, (experts, each * rows), generator=dice), 17).mT
    left = ranks * torch.randint(-3, 4, (experts, 17, each * rows), generator=dice).float()
    right = torch.randint(-3, 4, (experts, 17, columns), generator=dice) / 4
    adapters = Adapters(left.contiguous().to(device), right.to(device), 0.5, each, rows)
    for total, added in ((x, None), (x + 0.5 * (left.mT @ right).view(x.shape), adapters)):
        extent = total.abs().amax((1, 2))
        made = zip(encoded(packing, total, extent), packing.shapes((rows, columns)), strict=True)
        parts = [part.contiguous().view(3, *shape) for part, shape in made]
        expected = decode(packing, parts, torch.empty(x.shape, dtype=DTYPES[dtype]))
        out = torch.empty(x.shape, dtype=DTYPES[dtype], device=device)
        assert rounded.try_launch(packing, x.to(device, copy=True), added, extent.to(device), out)
        assert torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_what_it_does_not_go_with_is_refused(made):
    folder, *_ = made("gpt-oss")
    for change, base in ((dict(fp8=True), None), ({}, "nf4")):
        cfg, *_ = opened(folder, lambda cfg: adapted(cfg, Lora(2, 8.0, ("experts",))))
        with pytest.raises(InputError, match="--merge-aware"):
            aware(replace(cfg, **change), base)
    cfg, *_ = opened(folder, lambda cfg: adapted(cfg, Lora(2, 8.0, ("q_proj",))))  # which is in bf16
    with pytest.raises(InputError, match="--merge-aware"):
        aware(cfg, None)
