"""One bit of a stopped run changes on the drive: the run that is resumed says so, or goes on as if it had not."""

import io
import json
import os
import random
import shutil
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from command import finetune as command
from engines import write_plan
from runs import losses, options, stopped

from trireme.engine.hosts.group import Alone
from trireme.engine.plan import UnitPlan
from trireme.engine.queues.real import InlineQueues
from trireme.engine.run import engine as run_engine
from trireme.engine.run import loop
from trireme.engine.run.begin import resume
from trireme.engine.run.job import Job, prepare
from trireme.engine.run.options import Options, every
from trireme.engine.run.output.folder import run_of
from trireme.engine.run.screen import Screen
from trireme.engine.run.train import finetune
from trireme.storage.aio import arena
from trireme.storage.checkpoint import INDEX
from trireme.storage.files import StoreError
from trireme.storage.shards import DAMAGED
from trireme.storage.snapshots import FORMAT, MANIFEST
from trireme.storage.store import Store
from trireme.storage.untrusted import seal, unseal

pytestmark = pytest.mark.full

FLIPS = 20
WEIGHTS, MOMENTS, LOW = "snapshot-*/weights-*", "snapshot-*/moments-*", "snapshot-*/low-*"
KINDS = {
    "weights": (WEIGHTS,),
    "moments": (MOMENTS,),
    "low halves": (LOW,),
    "manifest": ("snapshot-*/" + MANIFEST,),
    "identity": ("store.id",),
    "auxiliary": ("snapshot-*/*config.json", "snapshot-*/tokenizer.json", "*config.json", "tokenizer.json"),
    "index": (INDEX, "snapshot-*/" + INDEX),
    "spares": ("files/*",),  # by these names: a snapshot's own are other files then
}
ALWAYS = {"weights", "moments", "low halves", "manifest", "identity"}  # every bit of these matters


def given(folder: Path, out: Path, **more) -> Options:
    """Weights and states on the SSD and off it, masters split; low halves are written apart from their moments."""
    return options(folder, out, "gpu", plan=str(folder / "spread.json"), **more)


@pytest.fixture(scope="module")
def spread(checkpoint):
    first = prepare(options(checkpoint, checkpoint / "planned", "gpu", dtype="bf16")).plan
    placement = [UnitPlan("ssd", "ssd"), UnitPlan("host", "ssd"), UnitPlan("host", "host"), UnitPlan("gpu", "gpu")]
    units = tuple(placement[u % 4] for u in range(len(first.units)))
    plan = replace(first, units=units, record=1 << 17, mode="forward", late_moments=("host", "ssd"))
    write_plan(plan, checkpoint / "spread.json")
    return checkpoint


@pytest.fixture(scope="module")
def run(spread):
    """A run that was stopped in its fifth step, with its snapshots of steps 2, 4 and 5."""
    options = given(spread, spread / "stopped", keep=3)
    with pytest.MonkeyPatch.context() as patch:
        stopped(options, 5, patch)
    return options


def copied(run: Options, out: Path, keep: int = 3) -> Options:
    """Another name for each file of the run, which is not written, with its last snapshots alone."""
    shutil.copytree(run.out, out, copy_function=os.link)
    for older in snapshots_of(out)[:-keep]:
        shutil.rmtree(older)
    return replace(run, out=str(out), resume=str(out), keep=keep)


def snapshots_of(out: Path) -> list[Path]:
    return sorted((out / "store").glob("snapshot-*"))


def flip(path: Path, dice: random.Random) -> None:
    """One bit of the file, which parts from other names of it."""
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.unlink()
    path.write_bytes(content)


def resumed(job: Job, run: Options) -> dict[str, bytes]:
    """Everything that the run goes on with, loaded as by a resumed run: spans, what the snapshot says, auxiliary."""
    screen = Screen(io.StringIO())
    with resume.open_store(run, screen, run_of(Path(run.out))) as store:
        said = store.restore()
        e = run_engine.make_engine(job, InlineQueues(), store, screen, Alone())
        with closing(e):
            run_engine.claim_space(e, job, store, anew=False)
            run_engine.Loader(e, job, store, screen, Alone()).go_on()
            found = {"said": json.dumps(said).encode(), "step": b"%d" % store.snapshots[-1].step}
            for name, shard in store.shards.items():
                buffer = arena(shard.layout.span)
                store.read(name, buffer).result()
                found[name] = bytes(buffer[: shard.layout.nbytes])
            names = store.snapshots[-1].auxiliary
            found |= {name: (store.devices[0].path / name).read_bytes() for name in names}
    return found


@pytest.fixture(scope="module")
def job(run):
    return prepare(replace(run, resume=run.out))


@pytest.fixture(scope="module")
def whole(run, job, tmp_path_factory):
    return resumed(job, copied(run, tmp_path_factory.mktemp("whole") / "run"))


@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_is_silent(run, job, whole, kind, tmp_path):
    dice, noticed = random.Random(kind), 0
    for i in range(FLIPS):
        ours = copied(run, tmp_path / str(i), keep=1)
        store = Path(ours.out) / "store"
        path = dice.choice(sorted(p for pattern in KINDS[kind] for p in store.glob(pattern) if p.is_file()))
        flip(path, dice)
        found, error = whole, None
        try:
            found = resumed(job, ours)
        except StoreError as e:
            error = e
        assert found == whole, path
        if error:
            noticed += 1
            assert Path(error.filename).name == path.name
            assert "\n" not in error.strerror
        shutil.rmtree(ours.out)
    assert noticed == FLIPS if kind in ALWAYS else noticed < FLIPS


def flip_last(path: Path) -> None:
    """The last bit of the file: of its data."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)


def test_the_last_whole_snapshot_is_named_and_is_a_way_back(run, job, tmp_path):
    ours = copied(run, tmp_path / "run")
    oldest, middle, last = snapshots_of(tmp_path / "run")
    flip_last(middle / "weights-00002.safetensors")
    flip_last(last / "moments-00001-0000.safetensors")
    with pytest.raises(StoreError) as e:
        resumed(job, ours)
    assert e.value.filename == str(last / "moments-00001-0000.safetensors")
    way = f"The last whole snapshot is of step 2: to go back to it, remove {last.name}, {middle.name}"
    assert e.value.strerror == f"{DAMAGED}. {way}"
    for folder in (last, middle):
        shutil.rmtree(folder)
    assert resumed(job, ours)["step"] == b"2"
    flip_last(oldest / "low-00001-0000.safetensors")
    with pytest.raises(StoreError) as e:
        resumed(job, ours)
    way = "There is no older snapshot (--keep 1 keeps one): restore the file from a copy of the run, or start again"
    assert e.value.strerror == f"{DAMAGED}. {way}"


@pytest.mark.parametrize("name", ["weights-00001", "moments-00000-0000"])
def test_a_manifest_without_a_span_of_the_model_is_refused(run, job, tmp_path, name):
    ours, path = copied(run, tmp_path / "run"), snapshots_of(tmp_path / "run")[-1] / MANIFEST
    content = unseal(path.read_bytes(), FORMAT, "manifest")
    del content["shards"][name]
    path.unlink()
    path.write_bytes(seal(FORMAT, content))
    with pytest.raises(StoreError, match="is the state of another model, or in other shards"):
        resumed(job, ours)


def test_a_resumed_run_reads_each_span_once(run, job, tmp_path, monkeypatch):
    ours, read = copied(run, tmp_path / "run"), Counter()
    real = Store._read

    def counted(store, name, buffer, verify=False, later=False):
        read[name, verify] += 1
        return real(store, name, buffer, verify, later)

    monkeypatch.setattr(Store, "_read", counted)
    found = resumed(job, ours)
    spans = {name for name in found if name.split("-")[0] in ("weights", "moments", "low")}
    assert read == {(name, how): 1 for name in spans for how in (True, False)}  # `resumed` itself reads unverified


def test_from_the_shell_it_is_one_line_and_the_way_back_ends_in_the_same_bits(run, spread, tmp_path, capsys):
    undisturbed = replace(run, out=str(tmp_path / "undisturbed"))
    finetune(undisturbed)
    copied(run, tmp_path / "run")
    last = snapshots_of(tmp_path / "run")[-1]
    flip_last(last / "weights-00003.safetensors")
    capsys.readouterr()
    assert command.main(["--resume", str(tmp_path / "run")]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {last}/weights-00003.safetensors: {DAMAGED}. The last whole snapshot is of step 4")
    assert line.endswith(f"remove {last.name}. When that is fixed: --resume {tmp_path / 'run'}")
    shutil.rmtree(last)
    assert command.main(["--resume", str(tmp_path / "run")]) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
    whole, again = (tmp_path / name / "model.safetensors" for name in ("undisturbed", "run"))
    assert again.read_bytes() == whole.read_bytes()


def test_what_a_drive_changes_before_the_export_is_not_exported(run, tmp_path, monkeypatch):
    """The weights that the last step wrote to the SSD, or the low halves of those that are in RAM."""
    finish = loop.Run._finish

    def disturbed(self):
        self.live.apply_updates()
        (version,) = self.live.store.shards[name].current
        with open(version.file.path, "r+b") as file:
            file.seek(-5000, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-5000, os.SEEK_END)
            file.write(bytes([byte ^ 8]))
        finish(self)

    for name in ("weights-00000", "low-00001-0000"):
        ours = replace(run, out=str(tmp_path / name), save_every=every("4"), keep=1)
        with monkeypatch.context() as patch, pytest.raises(StoreError) as e:
            patch.setattr(loop.Run, "_finish", disturbed)
            finetune(ours)
        assert e.value.strerror == f"{DAMAGED}. The last snapshot without this file is of step 4"
        assert not (tmp_path / name / "model.safetensors").exists()
        finetune(replace(ours, resume=ours.out))
        assert (tmp_path / name / "model.safetensors").exists()
