"""The output folder: refused before the run where it must not be written, compared with its source after it."""

import errno
import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from chats import CHATML
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerFast

from trireme.engine.data.codec import load_codec
from trireme.engine.data.dataset import DataOptions, load_dataset
from trireme.engine.hosts.group import Alone, Place
from trireme.engine.plan import DoesNotFit
from trireme.engine.run import demo
from trireme.engine.run import job as jobs
from trireme.engine.run.begin.resume import new_store, open_run, open_store, remove_given_up
from trireme.engine.run.config.config_file import config_yaml
from trireme.engine.run.options import Options, every, store_folders
from trireme.engine.run.output import folder as output_folder
from trireme.engine.run.output.folder import check_free, common_id, new_run, reopen, run_of, signed, tidy
from trireme.engine.run.screen import Screen
from trireme.engine.run.train import finetune
from trireme.models.config import InputError
from trireme.storage.aio import arena
from trireme.storage.checkpoint import export, open_source
from trireme.storage.files import StoreError
from trireme.storage.folders import FINISHED, IDENTITY, Owner
from trireme.storage.layout import sequential
from trireme.storage.store import Store


@pytest.fixture
def source(tmp_path):
    demo.make_text(tmp_path / "text", 20, seed=1)
    demo.make_checkpoint(tmp_path / "source", tmp_path / "text", seed=1)
    return open_source(tmp_path / "source")


NOBODY = Owner()
RUN, OTHER = "0123456789abcdef" * 2, "f" * 32  # ids


class Interrupted(Exception):
    pass


def options(out, model="no-checkpoint", **more) -> Options:
    return Options(model=str(model), data=("stories.txt",), out=str(out), **more)


def begin(out, model="no-checkpoint", saved=Interrupted, **more):
    return new_run(options(out, model, **more), saved, RUN)


def refused(out, model="no-checkpoint", **more) -> str:
    with pytest.raises(InputError) as error, begin(out, model, **more):
        raise AssertionError("it may not come this far")
    return str(error.value)


def tree(folder: Path) -> dict:
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def test_where_a_run_may_write(tmp_path):
    before = tree(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("new/deep", "empty"):
        assert not check_free(options(tmp_path / name))
        with pytest.raises(Interrupted), begin(tmp_path / name):
            raise Interrupted
        assert [p.name for p in (tmp_path / name).iterdir()] == ["config.yaml"]
        shutil.rmtree(tmp_path / name.split("/")[0])
    assert tree(tmp_path) == before


def small_store(*folders: Path, owner: Owner = NOBODY) -> Store:
    store = Store.create(folders, trial=0, owner=owner)
    store.add("w", sequential([("w", "F32", (8,))]))
    return store


def snapshot(store: Store, step: int = 7) -> None:
    store.write("w", arena(store.shards["w"].layout.span)).result(60)
    store.commit(step, {})


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_a_run_that_failed_without_a_log_keeps_its_snapshot(tmp_path, elsewhere, saved):
    """The disk was full from the first line of the log on."""
    out, drive = tmp_path / "out", tmp_path / "drives" / "one"
    with pytest.raises(OSError, match="full"), begin(out, store=(str(drive),) * elsewhere) as run:
        run.store = small_store(drive if elsewhere else out / "store")
        if saved:
            snapshot(run.store)
        (out / "tokens").mkdir()
        raise OSError("full")
    assert bool(list(tmp_path.glob("**/snapshot-000001-step-7"))) == saved
    assert (out / "config.yaml").exists() == (out / "tokens").exists() == saved
    assert saved or list(tmp_path.iterdir()) == []


def test_a_run_that_comes_second_sweeps_nothing_away(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Interrupted), begin(out):
        assert "another run has just started" in refused(out)
        raise Interrupted
    assert [p.name for p in out.iterdir()] == ["config.yaml"]
    with pytest.raises(ZeroDivisionError), begin(tmp_path / "b", store=(str(tmp_path / "s"),)) as run:
        run.store = small_store(tmp_path / "s")
        (tmp_path / "b" / "log.csv").write_text("gone")
        (tmp_path / "b" / "notes.txt").write_text("somebody's")
        1 / 0  # noqa: B018
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "s").exists()


@pytest.mark.full
@pytest.mark.parametrize("fails", ["before its store", "at its store"])
@pytest.mark.parametrize("other", ["trains before it", "trains meanwhile", "was stopped meanwhile"])
def test_a_run_that_fails_leaves_the_store_of_another_one(tmp_path, fails, other):
    """Both were given the same --store, where there was nothing when the first one began."""
    drive, made = tmp_path / "drives" / "one", []

    def train() -> None:
        made.append(small_store(drive))
        if other == "was stopped meanwhile":
            snapshot(made[0])
            made[0].close()

    if other == "trains before it":
        train()
    refused = pytest.raises(OSError, match="full|in use by process|holds a run already")
    with refused, begin(tmp_path / "b", store=(str(drive),)) as run:
        if other != "trains before it":
            train()
        if fails == "before its store":
            raise OSError(errno.ENOSPC, "full")
        run.store = small_store(drive)
    assert not (tmp_path / "b").exists()
    if other != "was stopped meanwhile":
        snapshot(made[0])
        made[0].close()
    with Store.open([drive]) as store:
        assert store.snapshots[-1].step == 7


def left(out: Path, given: Options) -> None:
    """As the same command leaves the folder when it is killed after its tokens."""
    out.mkdir()
    for name in (".trireme-x1", "store", "tokens", "tokens/tokens-0"):
        (out / name).mkdir()
    (out / "config.yaml").write_bytes(signed(RUN, config_yaml(given)))
    for name in ("log.jsonl", ".log.csv.partial", "tokens/stdin.txt", "tokens/tokens-0/tokens"):
        (out / name).write_text("")


def test_what_was_killed_before_its_first_step_begins_again(tmp_path):
    """By the same command, and only by it; what it left there stays, whatever becomes of the second one."""
    out = tmp_path / "out"
    left(out, options(out))
    before = tree(out)
    assert check_free(options(out))
    with pytest.raises(ZeroDivisionError), begin(out) as run:
        assert not (out / "tokens" / "stdin.txt").exists(), "another pipe, other data"
        run.store = small_store(out / "store")
        1 / 0  # noqa: B018
    assert tree(out) == {path: content for path, content in before.items() if path.name != "stdin.txt"}

    assert f"holds a run. Continue it: --resume {out}" in refused(out, lr=1e-3)
    for name in ("log.jsonl", "notes.txt", "store/snapshot-000001-step-1"):
        path = out / name
        path.mkdir() if "snapshot" in name else path.write_text("{}\n")
        assert "holds a run" in refused(out)
        path.rmdir() if "snapshot" in name else path.write_text("") if "log" in name else path.unlink()
    with Store.create([tmp_path / "drive"], trial=0) as store:
        store.add("w", sequential([("w", "F32", (8,))]))
        snapshot(store)
    given = options(out, store=(str(tmp_path / "drive"),))
    (out / "config.yaml").write_bytes(config_yaml(given))
    assert "holds a run" in refused(out, store=given.store)

    shutil.rmtree(out)
    out.mkdir()
    (out / ".config.yaml.partial").write_text("killed still earlier")
    with pytest.raises(ZeroDivisionError), begin(out):
        1 / 0  # noqa: B018
    assert list(out.iterdir()) == []
    (out / ".config.yaml.partial").write_text("killed still earlier")
    with pytest.raises(Interrupted), begin(out):
        raise Interrupted
    assert [p.name for p in out.iterdir()] == ["config.yaml"]


# ---------------------------------------------------------------- whose a store is


def stopped(out: Path, *stores: Path, run: str = RUN, step: int = 7) -> Options:
    """As a run leaves its folder and its store with the snapshot of a step; 0: without."""
    given = options(out, store=tuple(map(str, stores)), resume=str(out))
    out.mkdir(parents=True)
    (out / "config.yaml").write_bytes(signed(run, config_yaml(given)))
    with small_store(*store_folders(given.store, out), owner=Owner(run, str(out))) as store:
        if step:
            snapshot(store, step)
    return given


def goes_on(given: Options) -> bool:
    """Whether the run in a folder opens its store."""
    store = open_store(given, Screen(), run_of(Path(given.out)))
    if store is not None:
        store.close()
    return store is not None


def test_a_runs_id_is_in_its_folder_and_its_store(tmp_path):
    given = stopped(tmp_path / "out", tmp_path / "drive")
    assert goes_on(given)
    assert run_of(tmp_path / "out") == RUN == common_id(tmp_path / "out", True, Alone())
    assert len(common_id(tmp_path / "new", False, Alone())) == 32
    assert common_id(tmp_path / "new", True, Alone()) == run_of(tmp_path / "new") == ""
    with pytest.raises(StoreError, match="is the store of another run"):
        Store.open([tmp_path / "drive"])


def test_the_folder_of_a_stranger_cannot_name_another_runs_store(tmp_path):
    """By config.yaml, or by a link; nor one whose config.yaml has lost the id."""
    stopped(tmp_path / "mine", tmp_path / "drive")
    before = tree(tmp_path)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    given = options(theirs, store=(str(tmp_path / "drive"),), resume=str(theirs))
    for config in (signed(OTHER, config_yaml(given)), config_yaml(given)):
        (theirs / "config.yaml").write_bytes(config)
        with pytest.raises(InputError, match=f"drive is another run's, that of {tmp_path}/mine"):
            goes_on(given)
    (theirs / "store").symlink_to(tmp_path / "drive")
    with pytest.raises(InputError, match="is another run's"):
        goes_on(options(theirs, resume=str(theirs)))
    shutil.rmtree(theirs)
    assert tree(tmp_path) == before


def test_a_copy_of_a_run_leaves_the_store_to_the_original(tmp_path):
    """A moved run takes it along; a copied store is the copy's."""
    given = stopped(tmp_path / "mine", tmp_path / "drive")
    copy = replace(given, out=str(tmp_path / "copy"), resume=str(tmp_path / "copy"))
    shutil.copytree(given.out, copy.out)
    with pytest.raises(InputError, match=f"that of the run in {given.out}, of which this folder is a copy. Continue"):
        goes_on(copy)
    shutil.copytree(tmp_path / "drive", tmp_path / "drive-2")
    with pytest.raises(InputError, match="of which this folder is a copy"):
        goes_on(replace(copy, store=(str(tmp_path / "drive"),)))
    assert goes_on(replace(copy, store=(str(tmp_path / "drive-2"),)))
    assert goes_on(given)
    shutil.rmtree(copy.out)
    Path(given.out).rename(copy.out)
    assert goes_on(copy)
    shutil.copytree(copy.out, given.out)  # a copy of what was moved
    with pytest.raises(InputError, match=f"that of the run in {copy.out}, of which this folder is a copy"):
        goes_on(given)


def test_a_copy_of_a_run_with_its_store_inside_is_a_run(tmp_path):
    given = stopped(tmp_path / "mine")
    shutil.copytree(given.out, tmp_path / "copy")
    assert goes_on(replace(given, out=str(tmp_path / "copy"), resume=str(tmp_path / "copy")))
    assert goes_on(given)


@pytest.mark.parametrize("step", [0, 7])
def test_a_second_run_with_the_store_of_another_is_refused(tmp_path, step):
    """Also where that has no snapshot yet; once its folder is removed the store is free."""
    stopped(tmp_path / "mine", tmp_path / "drive", step=step)
    job = SimpleNamespace(
        store_dirs=[tmp_path / "drive"], out=tmp_path / "second", parameters=8, options=options("second", keep=1),
        plan=SimpleNamespace(uses=lambda tier: False), source=SimpleNamespace(auxiliary={}),
    )  # fmt: skip
    job.out.mkdir()
    before = tree(tmp_path)
    with pytest.raises((InputError, StoreError), match="in use by the run in .*mine|holds a run already"):
        new_store(job, Screen(), OTHER)
    assert tree(tmp_path) == before
    if not step:
        shutil.rmtree(tmp_path / "mine")
        new_store(job, Screen(), OTHER).remove()
        assert not (tmp_path / "drive").exists()  # which the run made


def test_folders_made_for_several_stores_go_with_them(tmp_path):
    """Also the one above them."""
    job = SimpleNamespace(
        store_dirs=[tmp_path / "new" / "a", tmp_path / "new" / "b"], out=tmp_path / "mine", parameters=8,
        options=options("mine", keep=1), plan=SimpleNamespace(uses=lambda tier: False),
        source=SimpleNamespace(auxiliary={}),
    )  # fmt: skip
    job.out.mkdir()
    new_store(job, Screen(), OTHER).remove()
    assert list(tmp_path.iterdir()) == [job.out]


@pytest.mark.parametrize("whose", ["the run's", "a copy's", "another run's", "of nobody"])
def test_only_its_own_stores_of_other_hosts_are_removed(tmp_path, whose):
    """OUT/host-1 names them."""
    out, drive = tmp_path / "out", tmp_path / "drive"
    stopped(out, tmp_path / "first")
    given = stopped(out / "host-1", drive, run=OTHER if whose == "another run's" else RUN)
    if whose == "a copy's":
        shutil.copytree(out, tmp_path / "copy")
        out = tmp_path / "copy"
    elif whose == "another run's":  # of a stranger, who cannot know its id
        (out / "host-1" / "config.yaml").write_bytes(signed(RUN, config_yaml(given)))
    elif whose == "of nobody":
        (out / "host-1" / "config.yaml").write_bytes(config_yaml(given))
    before = tree(drive)
    remove_given_up(out, 1)
    assert (out / "host-1").exists() == (whose == "of nobody")
    assert drive.exists() == (whose != "the run's")
    assert whose == "the run's" or tree(drive) == before
    assert goes_on(options(tmp_path / "out", store=(str(tmp_path / "first"),), resume="out"))


@pytest.mark.parametrize(
    ("hosts", "begun"), [(2, ""), (2, "log.jsonl"), (2, "store/snapshot-000001-step-2/a"), (1, "")]
)
def test_what_another_host_has_left_before_its_first_step_is_begun_again(tmp_path, monkeypatch, hosts, begun):
    """Host 0, which ended in order, has removed its own files."""
    monkeypatch.setattr(output_folder, "place", lambda: Place(hosts=hosts))
    host = tmp_path / "out" / "host-1"
    (host / "tokens").mkdir(parents=True)
    (host / "config.yaml").write_text("lr: 1")
    if begun:
        (host / begun).parent.mkdir(parents=True, exist_ok=True)
        (host / begun).write_text("{}")
    given = options(tmp_path / "out")
    if begun or hosts == 1:
        with pytest.raises(InputError, match="is not empty"):
            check_free(given)
    else:
        assert not check_free(given)


@pytest.mark.parametrize("when", ["marked", "lock left"])
@pytest.mark.parametrize("whose", [RUN, OTHER])
def test_another_hosts_store_that_was_killed_while_it_was_removed_is_removed(tmp_path, whose, when):
    out, drive = tmp_path / "out", tmp_path / "drive"
    stopped(out, tmp_path / "first")
    given = stopped(out / "host-1", drive, run=whose)
    (out / "host-1" / "config.yaml").write_bytes(signed(RUN, config_yaml(given)))
    (drive / IDENTITY).rename(drive / FINISHED)
    if when == "lock left":
        for path in drive.iterdir():
            path.unlink() if path.is_file() else shutil.rmtree(path)
        (drive / "store.lock").touch()
    remove_given_up(out, 1)
    assert not (out / "host-1").exists()
    assert drive.exists() == (whose == OTHER and when == "marked")


@pytest.mark.parametrize("whose", [RUN, OTHER])
def test_a_host_of_a_finished_run_removes_its_own_folder_alone(tmp_path, whose):
    """Another run's may lie where its own was, on a disk of its own."""
    given = stopped(tmp_path / "out" / "host-1", tmp_path / "drive", run=whose)
    before = tree(tmp_path)
    group = Alone()
    group.host = 1
    group.first = lambda answer: True  # host 0's: it is finished
    with pytest.raises(InputError, match="that run is finished"):
        open_run(given, Screen(), group, RUN)
    assert tree(tmp_path) == (before if whose == OTHER else {tmp_path / "out": None})


def test_a_link_in_a_runs_folder_is_not_written_through(tmp_path):
    given = stopped(tmp_path / "mine")
    for name in ("merged", "tokens", "tensorboard", "wandb"):
        (tmp_path / "mine" / name).symlink_to(tmp_path)
        with pytest.raises(InputError, match=f"{name} is a link, and a run would write where it leads. Remove it"):
            finetune(replace(given, resume=str(tmp_path / "mine")))
        (tmp_path / "mine" / name).unlink()


def test_a_finished_runs_folder_holds_its_result_alone(tmp_path):
    """Also after one that was killed while it drew its last picture, or wrote a checkpoint that became no best one."""
    result = (
        "best/model.safetensors",
        "step-2/x",
        "step-x.new/x",
        "config.yaml",
        "loss.svg",
        "model.safetensors",
        "notes.txt",
        "store/mine.txt",
    )
    for name in (*result, "tokens/tokens-0/tokens", "best.new/x", "best.old/x", "step-4.new/x", ".loss.svg.partial"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".trireme-x1").mkdir()
    (tmp_path / ".trireme-x1" / "lock").write_text("")  # of a process that was killed while it measured the drive
    tidy(tmp_path)
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == set(result)
    (tmp_path / "store" / "mine.txt").unlink()
    tidy(tmp_path)
    assert not (tmp_path / "store").exists()


def test_where_it_may_not(tmp_path, monkeypatch):
    full, run, file = tmp_path / "full", tmp_path / "run", tmp_path / "file"
    for folder, name in ((full, "x"), (run, "config.yaml")):
        folder.mkdir()
        (folder / name).write_text("")
    file.write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    before = tree(tmp_path)
    assert "is the checkpoint itself" in refused(full, full)
    assert "is not empty (1 entry). Name another folder" in refused(full)
    assert f"holds a run. Continue it: --resume {run}" in refused(run)
    (run / "model.safetensors").write_text("")
    assert f"holds a run and its checkpoint. Continue it: --resume {run}; if it is finished" in refused(run)
    (run / "model.safetensors").rename(run / "adapter_model.safetensors")
    assert f"name another folder; to train its result further, give --adapter {run}, and another --out" in refused(run)
    (run / "adapter_model.safetensors").unlink()
    assert f"{file} is a file" in refused(file)
    assert f"{file} is a file" in refused(file / "below")
    assert "link is a link to nowhere, which is not there" in refused(tmp_path / "link")
    assert "cannot be written to (" in refused(Path("/proc/x"))  # root may, and cannot
    assert "cannot be written to (File name too long" in refused(tmp_path / ("x" * 300))
    assert tree(tmp_path) == before

    for number in (errno.ENOSPC, errno.EIO):  # no wrong input
        with monkeypatch.context() as m:
            m.setattr(
                os, "fsync", lambda fd, number=number: (_ for _ in ()).throw(OSError(number, os.strerror(number)))
            )
            with pytest.raises(OSError, match=os.strerror(number)), begin(tmp_path / "new"):
                raise AssertionError("it may not come this far")
    assert tree(tmp_path) == before


def test_a_faithful_export_passes(source, tmp_path):
    export(source, tmp_path / "out", lambda name: [np.zeros(source.tensors[name].numel, np.float32)])
    output, check, _ = reopen(source, tmp_path / "out")
    assert "model.safetensors, config.json, tokenizer.json, tokenizer_config.json" in output
    assert "38 tensors" in check
    assert "3 other files byte-identical" in check


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda t: t.pop("model.norm.weight"),
            "model.norm.weight is missing here and F32 [128] in model.safetensors in",
        ),
        (lambda t: t.update(lm_head=t["model.norm.weight"]), "lm_head is F32 [128]"),
        (lambda t: t.update({"model.norm.weight": np.ones(128, np.float16)}), "model.norm.weight is F16 [128]"),
        (lambda t: t.update({"model.norm.weight": np.ones((2, 64), np.float32)}), "model.norm.weight is F32 [2, 64]"),
    ],
)
def test_a_difference_is_named(source, tmp_path, spoil, says):
    out = tmp_path / "out"
    export(source, out, lambda name: None)
    tensors = load_file(out / "model.safetensors")
    spoil(tensors)
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(StoreError, match="read back, it is not what was written") as error:
        reopen(source, out)
    assert says in str(error.value)


def test_a_companion_that_differs_is_named(source, tmp_path):
    export(source, tmp_path / "out", lambda name: None)
    with open(tmp_path / "out" / "tokenizer.json", "a") as file:
        file.write(" ")
    with pytest.raises(StoreError, match="tokenizer.json is not the one of"):
        reopen(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("free", "ram", "option"), [(1 << 30, 1 << 30, ""), (9, 1 << 30, "--out"), (4 << 20, 7 << 20, "--store")]
)
def test_a_drive_without_room_is_refused_before_the_start(tmp_path, monkeypatch, free, ram, option):
    """The export always, and the state where it lives there."""
    demo.make_text(tmp_path / "text.txt", 20, seed=1)
    demo.make_checkpoint(tmp_path / "checkpoint", tmp_path / "text.txt", seed=1)
    job = jobs.prepare(Options(
        model=str(tmp_path / "checkpoint"), data=(str(tmp_path / "text.txt"),), out=str(tmp_path / "out"), seq_len=64,
        batch_size=4, gpu_memory=14 << 20 if ram < 1 << 30 else 1 << 30, ram=ram, device="cpu",
    ))  # fmt: skip
    assert job.plan.uses("ssd") == (option == "--store")
    monkeypatch.setattr(jobs.shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=20 * free))
    refused = pytest.raises(DoesNotFit, match=f"name another drive with .*{option}") if option else nullcontext()
    with refused:
        jobs.check_room(job)


@pytest.mark.parametrize(("save_every", "refused"), [("1", True), ("0.5", True), ("30min", False), ("never", False)])
def test_a_drive_without_room_for_the_first_snapshot_is_refused(tmp_path, monkeypatch, save_every, refused):
    demo.make_text(tmp_path / "text.txt", 20, seed=1)
    demo.make_checkpoint(tmp_path / "checkpoint", tmp_path / "text.txt", seed=1)
    job = jobs.prepare(Options(
        model=str(tmp_path / "checkpoint"), data=(str(tmp_path / "text.txt"),), out=str(tmp_path / "out"), seq_len=64,
        batch_size=4, device="cpu", max_steps=2, save_every=every(save_every),
    ))  # fmt: skip
    part = job.forecast.disk_parts()
    free = part["export"] + part["store"]
    monkeypatch.setattr(jobs.shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=20 * free))
    jobs.check_room(job)
    monkeypatch.setattr(jobs.shutil, "disk_usage", lambda path: SimpleNamespace(free=free - 1, total=20 * free))
    ways = "name another drive with --out or --store, or set --save-every never"
    with pytest.raises(DoesNotFit, match=ways) if refused else nullcontext():
        jobs.check_room(job)


TALK = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A fox. I live in a wood."}]


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "template", "same"),
    [
        ("--chat-template", "chatml", ["config.json", "tokenizer.json"]),
        ("--chat-template", "plain", ["config.json", "tokenizer.json"]),
        ("--chat-template FILE", "file", ["config.json", "tokenizer.json"]),
        ("--tokenizer", "chatml", ["config.json"]),
        ("--tokenizer", None, ["config.json"]),
    ],
)
def test_the_output_has_the_tokenizer_and_the_template_that_were_trained_with(
    source, tmp_path, capsys, given, template, same
):
    """It chats, in transformers, with the very tokens of the training data."""
    model = tmp_path / "source"
    config = json.loads((model / "tokenizer_config.json").read_text())
    old = json.dumps(config | {"chat_template": "{{ raise_exception('the old one') }}"})
    (model / "tokenizer_config.json").write_text(old)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("the old one")
    more, tokenizer = {}, model
    if given == "--tokenizer":
        tokenizer = tmp_path / "other"
        tokenizer.mkdir()
        (tokenizer / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
        (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "clean_up": 1}))
        (tokenizer / "chat_template.jinja").write_text(CHATML)
        (tokenizer / "config.json").write_text("{}")
        (model / "merges.txt").write_text("of the old one")
        more["tokenizer"] = str(tokenizer)
    if template:
        more["chat_template"] = template
        if template == "file":
            more["chat_template"] = str(tmp_path / "mine.jinja")
            (tmp_path / "mine.jinja").write_text(CHATML)
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": TALK}) for _ in range(8)))
    out = tmp_path / "out"
    finetune(
        Options(
            model=str(model),
            data=(str(tmp_path / "chats.jsonl"),),
            out=str(out),
            seq_len=128,
            batch_size=2,
            max_steps=2,
            device="cpu",
            **more,
        )  # fmt: skip
    )
    trained = load_codec(tokenizer, more.get("chat_template"))
    row = load_dataset([str(tmp_path / "chats.jsonl")], trained, DataOptions(seq_len=128))
    expected = next(row.batches(1)).ids[: int(row.pieces["length"][0])].tolist()
    theirs = PreTrainedTokenizerFast.from_pretrained(out)
    assert theirs.apply_chat_template(TALK, tokenize=True, return_dict=False) == expected
    assert load_codec(out).facts.vocab_size == trained.facts.vocab_size
    for name in same:
        assert (out / name).read_bytes() == (model / name).read_bytes()
    assert not (out / "additional_chat_templates").exists()
    assert not (out / "merges.txt").exists()
    (check,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("check ")]
    assert check.endswith("; as trained with: " + ", ".join(sorted(
        ({"tokenizer.json", "tokenizer_config.json"} if given == "--tokenizer" else {"tokenizer_config.json"})
        | {"chat_template.jinja"})))  # fmt: skip
