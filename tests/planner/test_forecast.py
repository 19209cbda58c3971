"""The report before the start: it adds up, names what binds, and says what cannot fit and what would."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command import finetune

from trireme.engine.buffers import buffers, usage, workspace
from trireme.engine.plan import TIERS, DoesNotFit, Limits, Plan
from trireme.engine.planner import host
from trireme.engine.planner.choose import first_plan
from trireme.engine.planner.forecast import Files, Forecast, Work, check_drive
from trireme.engine.planner.lines import cell, disk_line, gpu_lines, memory_lines, time_line, wear_line, wear_warning
from trireme.engine.planner.rates import RAM_SHARE, assume
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.planner.whole import written
from trireme.engine.run import demo, train
from trireme.engine.run.command import parse
from trireme.engine.run.job import prepare
from trireme.engine.run.options import Options, every
from trireme.engine.run.plan import record_size
from trireme.engine.run.report import events, report
from trireme.models.config import ModelConfig, uniform, Rope
from trireme.models.sizes import shapes
from trireme.storage.store import Store

SEVEN_B = uniform("llama", 32000, 4096, 32, 32, 32, 128, 11008, 4096, 1e-5, False, rope=Rope(1e4))


ALL = {"steps": 10**13}


def forecast(machine: str, sequences: int = 16, **more) -> Forecast:
    m = assume(machine)
    plan = first_plan(SEVEN_B, m.limits, Wanted(((8192, 4), (1024, 32)), record=1 << 25), drive=bool(m.ssd))
    return Forecast(SEVEN_B, plan, m, m.limits, Work(2048, sequences, 1000, **more))


@pytest.mark.parametrize(
    "machine", ["gpu=rtx4090,ram=128GiB", "gpu=rtx4090,ram=48GiB,ssd=2TB@7/5", "gpu=h200,ram=64GiB"]
)
def test_the_memory_table_adds_up(machine):
    f = forecast(machine)
    rows = [line for line in memory_lines(f) if re.match(r" {11}\w", line)]
    cells = [[float(x) * 1024 ** (unit == "GiB") for x, unit in re.findall(r"([\d.]+) (GiB|MiB)", r)] for r in rows]
    total = usage(f.geo, f.plan)
    assert cells[-2][:2] == pytest.approx([total["gpu"] / 2**20, total["host"] / 2**20], rel=0.01)
    assert all(tier in TIERS for tier in {b.tier for b in buffers(f.geo, f.plan)})
    assert workspace(f.geo, f.plan)


@pytest.mark.full
def test_a_drive_that_binds_is_named_and_more_of_it_helps():
    f = forecast("gpu=rtx4090,ram=48GiB,ssd=2TB@7/5")
    assert "limited by the SSD" in time_line(f)
    assert re.match(r"[\d.]+ GB read and [\d.]+ GB written a step", wear_line(f, ALL))
    assert {"--adam-bits 8", "--batch-size 32", "twice the drives"} & {change.what for change in f.faster()}


def test_a_larger_step_is_not_offered_where_there_are_no_more_sequences():
    f = forecast("gpu=rtx4090,ram=48GiB,ssd=2TB@7/5")
    names = lambda *given: [name for name, _ in f._changes(*given)]
    assert "--batch-size 32" not in names(31, True)
    assert "--batch-size 32" in names(32, True)
    assert "--adam-bits 8" in names(32, True)
    assert "--adam-bits 8" not in names(32, False)


def test_wear_is_of_the_drive_not_of_its_free_room():
    f = forecast("gpu=rtx4090,ram=48GiB,ssd=2TB@7/5")
    full = replace(f, machine=replace(f.machine, ssd=10**11))
    assert wear_line(f, ALL) == wear_line(full, ALL)
    assert "of the 1.2 PB that drives of this size are often rated for" in wear_line(f, ALL)


@pytest.mark.full
def test_a_run_that_wears_out_the_drives_is_warned_of():
    """From a fifth of what they are rated for on, with what it would write otherwise."""
    f = forecast("gpu=rtx4090,ram=48GiB,ssd=2TB@7/5")
    assert wear_warning(f, {"steps": 239 * 10**12}, 1e6) == ""
    line = wear_warning(f, {"steps": 720 * 10**12}, 10 * 86400.0)
    assert line.startswith("warning: the run writes 720 TB in 10.0 days, 60 % of the 1.2 PB that drives of this size")
    less = float(re.search(r"--adam-bits 8 \((\d+) TB\), --lora 16, fewer and larger steps", line)[1])
    assert "step" not in vars(f.in_8_bits), "predicted as searches do, which is known"
    assert less == pytest.approx(720 * f.in_8_bits.step.ssd_written / f.step.ssd_written, rel=0.01)


def test_wear_is_told_by_what_writes():
    """Of a run in RAM too, where it is more than a thousandth of what drives are rated for."""
    f = forecast("gpu=rtx4090,ram=256GiB,ssd=2TB@7/5")
    assert not f.plan.uses("ssd")
    assert wear_line(f, {"steps": 0, "snapshots": 10**12}) == ""
    line = wear_line(f, {"steps": 0, "snapshots": 3 * 10**12, "checkpoints": 10**12, "start": 10**9})
    assert "nothing written a step, 4 TB written in all (snapshots 3 TB, checkpoints 1 TB): 0.3 % of the 1.2 PB" in line


@pytest.mark.full
@pytest.mark.parametrize("memory", [(14 << 20, 7 << 20), (14 << 20, 16 << 20)], ids=["on the SSD", "in RAM"])
def test_a_store_grows_to_what_was_said(tmp_path, memory, monkeypatch):
    """Before it is removed: what is current, a snapshot, spares of every size; beside so small records headers show."""
    demo.make_text(tmp_path / "stories.txt", 40, seed=1)
    demo.make_checkpoint(tmp_path / "model", tmp_path / "stories.txt", seed=1)
    model, text, out = (str(tmp_path / name) for name in ("model", "stories.txt", "out"))
    given = Options(model=model, data=(text,), out=out, seq_len=64, batch_size=4, max_steps=5, device="cpu",
                    gpu_memory=memory[0], ram=memory[1], save_every=every("2"))  # fmt: skip
    job = prepare(replace(given, dry_run=True))
    part, found, remove = job.forecast.disk_parts(), [], Store.remove

    def measured(store, *more):
        files = {file.stat().st_ino: file.stat().st_size for file in Path(out, "store").rglob("*") if file.is_file()}
        found.append(sum(files.values()))
        remove(store, *more)

    def write(store, name, buffer, later=False):
        stored.append(len(buffer) + sum(len(stripe.header) for stripe in store.shards[name].stripes))
        return real(store, name, buffer, later)

    def create(*args):
        store = new(*args)
        stored.extend(device.io.written for device in store.devices)  # to measure it
        return store

    stored, real, new = [], Store.write, train.new_store
    monkeypatch.setattr(train, "new_store", create)
    monkeypatch.setattr(Store, "remove", measured)
    monkeypatch.setattr(Store, "write", write)
    live = train.finetune(given)
    files = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
    assert live.written == sum(stored) + sum(Path(out, name).stat().st_size for name in files)
    told = sum(written(job.forecast, 5, events(job, 0, None)).values())
    assert 0.98 * told < live.written - stored[0] < 1.1 * told
    said = part["store"] + part["snapshots"] + part["spares"]
    assert 0.98 * said < found[0] < 1.1 * said


def test_unequal_gpus_are_all_made_twice_as_fast(monkeypatch):
    f = replace(forecast("gpu=rtx4090,ram=128GiB"), machine=assume("gpu=rtx4090+rtx3090,ram=128GiB"))
    monkeypatch.setattr(Forecast, "again", lambda self: self)
    (quick,) = (change() for what, change in f._changes(1, False) if what == "a GPU twice as fast")
    speeds = lambda rates: [rates.of(gpu).matmul for gpu in range(2)]
    assert speeds(quick.machine.rates) == [2 * speed for speed in speeds(f.machine.rates)]


@pytest.mark.full
def test_what_a_change_promises_is_what_it_predicts():
    f = forecast("gpu=rtx4090,ram=48GiB,ssd=2TB@7/5")
    assert f.again(adam_bits=8).step.ssd_written < 0.6 * f.step.ssd_written


@pytest.mark.full
def test_what_a_change_promises_is_what_a_plan_for_it_reaches():
    """Twice the drives change what is best to send to them."""
    f = forecast("gpu=rtx4090,ram=48GiB,ssd=2TB@7/5")
    (estimated,) = (change.step_s for change in f.faster() if change.what == "twice the drives")
    twice = replace(f, machine=assume("gpu=rtx4090,ram=48GiB,ssd=2x2TB@7/5"))
    assert estimated == pytest.approx(twice.again().step.step_s, rel=0.02)
    assert estimated < 0.95 * twice.step.step_s


def test_a_change_for_which_the_drives_have_no_room_is_not_offered(monkeypatch):
    f, inputs = forecast("gpu=rtx4090,ram=48GiB,ssd=2TB@7/5"), 10**12
    changed = replace(f, work=replace(f.work, sequences=32), files=Files(tokens=inputs))
    make = lambda self, *_: [("more", lambda: replace(changed, machine=self.machine))]
    monkeypatch.setattr(Forecast, "_changes", make)
    offered = lambda ssd: replace(f, machine=replace(f.machine, ssd=ssd + f.machine.reserve)).faster()
    assert offered(changed.disk())
    assert not offered(changed.disk() - 1)
    changed = replace(changed, files=Files(tokens=inputs, held=10**9))  # by a run that goes on, of what it needs
    assert offered(changed.disk() - 10**9)
    assert not offered(changed.disk() - 10**9 - 1)


@pytest.mark.parametrize("nbytes", [1, 999 << 20, 1001 << 20, 1023 << 20, 1 << 30, 999 << 30, 1001 << 30, 9999 << 30])
def test_cells_of_the_memory_table_keep_apart(nbytes):
    assert len(cell(nbytes)) == 10
    assert cell(nbytes)[0] == " "


def test_a_step_of_less_takes_less():
    few, all_ = (forecast("gpu=rtx4090,ram=128GiB", sequences=n) for n in (4, 16))
    assert replace(all_, work=few.work).step.step_s < all_.step.step_s


def test_inputs_that_nothing_else_holds_go_to_the_drive_and_are_counted_there():
    m = assume("gpu=rtx4090,ram=24GiB,ssd=2TB@7/5")
    plan = simple_plan(SEVEN_B, m.limits, Wanted(((8192, 16),), mode="backward", record=1 << 25))
    f = Forecast(SEVEN_B, plan, m, m.limits, Work(2048, 64, 1000))
    inputs = 16 * 8192 * 4096 * 2 * sum(unit.x == "ssd" for unit in plan.units[1:])
    part = f.disk_parts()
    assert inputs > 30e9
    assert f.disk() == 2 * f.stored() + part["spares"] + part["export"] + inputs
    assert "activations" in disk_line(f)
    assert f.step.ssd_written > inputs
    tight = replace(f, machine=replace(f.machine, ssd=f.disk() - f.stored(), reserve=0))
    assert "short by" in disk_line(tight)
    begun = replace(tight, files=Files(held=tight.stored()))
    assert disk_line(begun).endswith("fits"), "a run that goes on has its store already"


def test_a_long_start_is_said():
    f = forecast("gpu=rtx4090,ram=128GiB")
    held = usage(f.geo, f.plan)["host"]
    half = replace(f, machine=replace(f.machine, rates=replace(f.machine.rates, pin=f.machine.rates.pin / 2)))
    assert f.pinning_s() == held / f.machine.rates.pin > 10
    assert half.pinning_s() == 2 * f.pinning_s()
    assert f"to pin {held / 2**30:.1f} GiB of RAM" in gpu_lines(f)[1]
    assert len(gpu_lines(forecast("gpu=h200,ram=64GiB"))) == 1, "little is in RAM"


def test_short_documents_are_predicted_to_take_less():
    f = forecast("gpu=rtx4090,ram=128GiB")
    of = lambda length: replace(f, work=replace(f.work, document=length)).step
    assert of(128).step_s < f.step.step_s
    assert f.step == of(2048)


def test_without_a_drive_or_with_a_small_one_the_way_out_is_named():
    f = forecast("gpu=rtx4090,ram=48GiB,ssd=2TB@7/5")
    with pytest.raises(DoesNotFit, match=r"Add ssd=1TB, or raise ram to \d+GiB"):
        check_drive(replace(f, machine=replace(f.machine, ssd=0)))
    with pytest.raises(DoesNotFit, match="GB more than the drives take: 5 % of them stays free. Raise ssd to 1TB"):
        check_drive(replace(f, machine=replace(f.machine, ssd=10**11)))


@pytest.mark.full
@pytest.mark.parametrize("gpu", ["24GiB", "64GiB"])
def test_the_ram_that_is_named_is_enough_and_not_more(gpu):
    f = forecast(f"gpu={gpu},ram=24GiB,ssd=2TB@7/5")
    with pytest.raises(DoesNotFit) as refusal:
        check_drive(replace(f, machine=replace(f.machine, ssd=0)))
    ram = int(re.search(r"raise ram to (\d+)GiB", str(refusal.value))[1])
    check_drive(forecast(f"gpu={gpu},ram={ram}GiB"))
    with pytest.raises(DoesNotFit):
        check_drive(forecast(f"gpu={gpu},ram={ram - 4}GiB"))


def test_as_much_more_ram_is_enough_for_the_larger_records_that_it_brings():
    big = replace(SEVEN_B, width=12288, ffn=28672, n_layers=88, n_heads=96, n_kv_heads=96)

    def planned(host: int) -> Plan:
        record = record_size(shapes.parameters(big), host)
        return simple_plan(big, Limits(22 << 30, host), Wanted(((2048, 1),), record=record))

    with pytest.raises(DoesNotFit, match="Raise --ram by") as refusal:
        planned(4 << 30)
    more = float(re.search(r"--ram by ([\d.]+) GiB", str(refusal.value))[1])
    assert planned(int((4 + more) * 2**30)).record > record_size(shapes.parameters(big), 4 << 30)


# ---------------------------------------------------------------- from the command line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Eight layers as wide as LLaMA 7B's that take no room: the weights are a hole in a file."""
    folder, layers = tmp_path_factory.mktemp("eight"), 8
    demo.make_text(folder / "stories.txt", 40, seed=1)
    demo.make_checkpoint(folder / "model", folder / "stories.txt", seed=1)
    config = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": layers,
              "num_attention_heads": 32, "intermediate_size": 11008, "max_position_embeddings": 4096,
              "rms_norm_eps": 1e-5, "tie_word_embeddings": False}  # fmt: skip
    (folder / "model" / "config.json").write_text(json.dumps(config))
    cfg, header, end = replace(SEVEN_B, n_layers=layers), {}, 0
    for u in range(cfg.n_units):
        for name, shape in (item for group in shapes.weight_groups(cfg, u) for item in group):
            nbytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + nbytes]}
            end += nbytes
    text = json.dumps(header).encode()
    with open(folder / "model" / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def dry_run(folder: Path, *more: str) -> int:
    return finetune.main([str(folder / "model"), "--data", str(folder / "stories.txt"), "--dry-run", *more])


@pytest.mark.full
def test_a_machine_that_is_not_at_hand(checkpoint, capsys):
    assert dry_run(checkpoint, "--assume", "gpu=rtx4090,ram=4GiB,ssd=2x2TB@7/5") == 0
    out = capsys.readouterr().out
    for label in ("machine  RTX 4090, 24 GiB", "plan  ", "time  ", "ssd  ", "disk  ", "faster  "):
        assert f"\n{label}" in out, out
    assert out.endswith("Dry run: nothing written.\n")


@pytest.mark.full
def test_what_would_be_faster_is_searched_for_in_dry_runs_alone(checkpoint, monkeypatch):
    model, data = str(checkpoint / "model"), (str(checkpoint / "stories.txt"),)
    given = Options(model=model, data=data, out=str(checkpoint / "out"), assume="gpu=rtx4090,ram=16GiB,ssd=2TB")
    job = prepare(replace(given, dry_run=True))
    again, searched = Forecast.again, []
    monkeypatch.setattr(Forecast, "again", lambda *given, **more: searched.append(1) or again(*given, **more))
    said = list(report(replace(job, options=replace(job.options, dry_run=False))))
    assert not searched
    assert not any(line.startswith("faster") for line in said)
    assert any(line.startswith("faster") for line in report(job))
    assert searched


@pytest.mark.grid
@pytest.mark.parametrize(
    ("machine", "says"),
    [("gpu=rtx4090,ram=4GiB", "Add ssd="), ("gpu=2GiB,ram=16GiB,ssd=2TB", "Use a GPU with"),
     ("gpu=1GiB,ram=16GiB", "1.25 GiB of the GPU"), ("gpu=rtx4090,ram=2GiB,ssd=2TB", "--ram"),
     ("gpu=rtx4090,ram=16GiB,ssd=25GB", "Raise ssd to 1TB")],
)  # fmt: skip
def test_what_cannot_fit_is_refused_with_the_way_out(checkpoint, capsys, machine, says):
    assert dry_run(checkpoint, "--assume", machine) == 3
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_on_a_cpu_without_ram_the_way_out_is_free_ram(checkpoint, tmp_path, monkeypatch, capsys):
    """Then --ram was not given and cannot be raised."""
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    host.MEMINFO.write_text(f"MemAvailable: {1 << 17} kB\n")
    assert dry_run(checkpoint, "--device", "cpu") == 3
    err = capsys.readouterr().err
    more, enough, unit = re.search(
        r"may take (\d+).00 MiB more, ([\d.]+) (GiB|MiB) are enough: free some", err
    ).groups()
    assert more == "128"
    host.MEMINFO.write_text(f"MemAvailable: {int(float(enough) * (1 << 20 if unit == 'GiB' else 1 << 10))} kB\n")
    assert dry_run(checkpoint, "--device", "cpu") == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("tier", "given", "says"),
    [
        ("ram", (), "Raise --ram by"),
        ("gpu", (), "Use a GPU with"),
        ("gpu", ("--gpu-memory", "1536MiB"), "Raise --gpu-memory by"),
    ],
)
def test_the_way_out_leads_out(checkpoint, capsys, tier, given, says):
    """What the line says, added to what was assumed, is enough."""
    machine = {"gpu": "rtx4090", "ram": "16GiB", "ssd": "2TB"}
    assumed = lambda of: ",".join("=".join(part) for part in (machine | ({} if given else {tier: of})).items())
    assert dry_run(checkpoint, "--assume", assumed("1536MiB"), *given) == 3
    more, unit = re.search(rf"{says} ([\d.]+) (GiB|MiB)", capsys.readouterr().err).groups()
    enough = f"{1536 + float(more) * (1024 if unit == 'GiB' else 1)}MiB"
    option = ("--ram",) if tier == "ram" else given[:1]
    argv = (assumed("1536MiB"), *option, enough) if option else (assumed(enough),)
    assert dry_run(checkpoint, "--assume", *argv) == 0


def test_a_limit_that_no_option_gave_is_not_to_be_raised():
    """Without --ram and --gpu-memory all free memory is used."""
    for free, says in ((False, r"Raise --ram by [\d.]+ GiB"), (True, r"Free ([\d.]+) GiB of RAM")):
        with pytest.raises(DoesNotFit, match=rf"{says}(, or|\.)") as refusal:
            simple_plan(SEVEN_B, Limits(22 << 30, 1 << 29, free_ram=free), Wanted(((2048, 1),)))
    more = float(re.search(says, str(refusal.value))[1])
    simple_plan(SEVEN_B, Limits(22 << 30, int((0.5 + more * RAM_SHARE) * 2**30)), Wanted(((2048, 1),)))


def test_a_mixture_is_refused_with_its_experts():
    """gpt-oss-120b on 2 GiB: of two GPUs each has a whole layer's, which are nearly all of it as they are packed."""
    job = ["--shape", "gpt-oss-120b", "--lora", "16", "--dry-run", "--assume", "gpu=2xrtx4060,ram=32GiB,ssd=2TB"]
    with pytest.raises(DoesNotFit, match="the 128 experts of one layer take 1.58 GiB of it in MXFP4"):
        prepare(parse([*job, "--gpu-memory", "2GiB"]))


def test_no_drive_is_planned_full():
    """A twentieth stays free where state is on the drive; where it is not, an export may take it."""
    f = forecast("gpu=rtx4090,ram=24GiB,ssd=1TB")
    assert f.plan.uses("ssd")
    assert f.room == 95 * 10**10
    in_ram = replace(f, plan=f.plan.changed(range(f.geo.n_units), weights="host", state="host"))
    assert in_ram.room == 10**12


@pytest.mark.full
def test_what_was_never_measured_on_a_gpu_is_named(checkpoint, capsys):
    said = {}
    for gpu in ("rtx4090", "h100"):
        assert dry_run(checkpoint, "--assume", f"gpu={gpu},ram=48GiB") == 0
        said[gpu] = [line for line in capsys.readouterr().out.splitlines() if "never measured on" in line]
    (line,) = said["rtx4090"]
    assert "never measured on RTX 4090: rates are those of data sheets; attention, the loss and kernel launches" in line
    assert said["h100"] == []


@pytest.mark.full
def test_the_limit_of_an_assumed_machine_is_the_one_that_is_given(checkpoint, capsys):
    assert dry_run(checkpoint, "--assume", "gpu=rtx4090,ram=16GiB,ssd=2TB", "--ram", "8GiB") == 0
    assert re.search(r"\n +limit +22.8 GiB +8.0 GiB\n", capsys.readouterr().out)


@pytest.mark.full
def test_shorter_sequences_are_a_way_out_only_where_they_lead_out(checkpoint, capsys):
    machine = ["--assume", "gpu=2816MiB,ram=16GiB,ssd=2TB", "--batch-size", "1", "--seq-len"]
    assert dry_run(checkpoint, *machine, "4096") == 3
    fit = re.search(r"lower --seq-len \(of 4,096 tokens a micro-batch ([\d,]+) fit\)", capsys.readouterr().err)[1]
    assert dry_run(checkpoint, *machine, fit.replace(",", "")) == 0
    capsys.readouterr()
    assert dry_run(checkpoint, "--assume", "gpu=2GiB,ram=16GiB,ssd=2TB") == 3
    assert "--seq-len" not in capsys.readouterr().err


def test_documents_and_labels_are_predicted_as_they_are(tmp_path):
    """The data are known before the plan: short documents and masked prompts are what is predicted."""
    demo.make_text(tmp_path / "stories.txt", 40, seed=1)
    demo.make_checkpoint(tmp_path / "model", tmp_path / "stories.txt", seed=1)
    rows = [{"prompt": f"{i} " * (8 + i), "completion": "yes"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, rows, out = (str(tmp_path / name) for name in ("model", "rows.jsonl", "out"))
    job = prepare(Options(model=model, data=(rows,), out=out, seq_len=256, batch_size=4, device="cpu"))
    f, data = job.forecast, job.data
    lengths = data.pieces["length"]
    assert lengths.mean() < data.document < lengths.max() < 256
    assert 0 < data.trained < 0.2
    batch = f.work.batch(f.plan)
    assert set(batch.lengths[:-1]) == {data.document}
    assert sum(batch.lengths) == batch.tokens < 4 * 256
    assert batch.learned == round(data.trained * batch.tokens)
    on_disk = sum(file.stat().st_size for file in Path(out).glob("tokens/*/tokens"))
    assert f.disk_parts()["tokens"] == f.files.held == on_disk > 0
    assert ", tokens " in disk_line(f)


@pytest.mark.parametrize("val", ["0.1", None])
def test_what_is_exported_is_as_large_as_the_source_and_twice_more_for_the_best(tmp_path, val):
    """Whatever it is computed in. The best of the last snapshot, the best so far and the result are there at once."""
    demo.make_text(tmp_path / "stories.txt", 40, seed=1)
    demo.make_checkpoint(tmp_path / "model", tmp_path / "stories.txt", seed=1)
    model, text, out = (str(tmp_path / name) for name in ("model", "stories.txt", "out"))
    given = Options(model=model, data=(text,), val=val, out=out, seq_len=64, max_steps=1, device="cpu", dtype="bf16")
    f, size = prepare(given).forecast, (tmp_path / "model" / "model.safetensors").stat().st_size
    part = f.disk_parts()
    assert size > 3 * f.geo.weights[0].span
    assert part["export"] == size
    assert part["best"] == (2 * size if val else 0)
    assert f.disk() == sum(part.values())
    assert (", twice that for the best and the one before it" in disk_line(f)) == bool(val)
    shutil.copytree(model, Path(out) / "best")
    held = prepare(given).files.held
    assert held - f.files.held == pytest.approx(size, abs=1 << 16), (
        "a run that goes on has it already; drives count in blocks"
    )


def test_another_machine_is_for_dry_runs(checkpoint, capsys):
    data = ["--data", str(checkpoint / "stories.txt"), "--assume", "gpu=rtx4090,ram=64GiB"]
    assert finetune.main([str(checkpoint / "model"), *data]) == 2
    assert "--dry-run" in capsys.readouterr().err
