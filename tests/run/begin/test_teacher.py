"""Runs with --teacher: loss and weights of transformers with autograd, of whole distributions, and torch's AdamW."""

import json
import os
import re
import shutil
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engines import fork
from runs import (
    adamw_of,
    check_close,
    check_same,
    check_weights,
    ended,
    go,
    make_small,
    records,
    stopped,
    take_step,
    text,
    theirs,
    trained_by_peft,
    tuned,
    weights,
    write_rows,
)
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from trireme.engine.run import demo
from trireme.engine.run.begin import teacher
from trireme.engine.run.begin.method import teaching_of
from trireme.engine.run.command import parse
from trireme.engine.run.finished import evaluate, options, score
from trireme.engine.run.job import prepare
from trireme.engine.run.options import Options
from trireme.engine.run.screen import Screen
from trireme.engine.run.train import finetune
from trireme.models.config import InputError, Teaching

K = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = make_small(tmp_path_factory.mktemp("teacher"))
    demo.make_checkpoint(where / "teacher", where / "stories.txt", seed=2)
    soft = load_file(where / "teacher" / "model.safetensors")
    loud = {name: value * (4.0 if value.ndim > 1 else 1.0) for name, value in soft.items()}  # it prefers something
    save_file(loud, where / "teacher" / "model.safetensors", {"format": "pt"})
    random = np.random.default_rng(0)
    words, weight = partial(text, random), lambda: float(random.choice([1.0, 0.5, 2.0]))
    rows = [dict(prompt=words(2, 6), completion=" " + words(2, 9), weight=weight()) for _ in range(24)]
    write_rows(where / "rows.jsonl", rows)
    return where


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Where scores are kept for later runs."""
    monkeypatch.setattr(teacher, "cache_folder", lambda: tmp_path)
    return tmp_path / "teacher"


def run(folder, out, **more) -> Options:
    given = dict(teacher=str(folder / "teacher"), top_k=K, distill_weight=0.7, temperature=1.5)
    return tuned(folder, out, "rows.jsonl", **given | more)


def parts_of(student, says, mb, teaching):
    """(cross-entropies, divergences) of all labels of a micro-batch, and their weights; each document alone."""
    ces, kls, weights, at = [], [], [], 0
    for i, length in enumerate(mb.lengths):
        ids = torch.from_numpy(mb.ids[at : at + length]).long()
        labels = torch.from_numpy(mb.labels[at : at + length]).long()
        rows = torch.nonzero(labels >= 0)[:, 0]
        logp = torch.log_softmax(student(input_ids=ids[None]).logits[0].double(), -1)[rows]
        with torch.no_grad():
            said = torch.log_softmax(says(input_ids=ids[None]).logits[0].double(), -1)[rows]
        top, best = said.topk(teaching.k)
        q = torch.cat([top.half().double().exp(), (1 - top.exp().sum(1, keepdim=True))], 1)
        own = logp.gather(1, best).exp()
        p = torch.cat([own, 1 - own.sum(1, keepdim=True)], 1)
        p, q = (t ** (1 / teaching.temperature) for t in (p, q))
        p, q = (t / t.sum(1, keepdim=True) for t in (p, q))
        ces.append(-logp.gather(1, labels[rows, None])[:, 0])
        kls.append(teaching.temperature**2 * (q * (q / p).log()).sum(1))
        weights.append(torch.full((len(rows),), 1.0 if mb.weights is None else float(mb.weights[i])))
        at += length
    return torch.cat(ces), torch.cat(kls), torch.cat(weights).double()


def three_steps(opts, model, adamw):
    """[(loss, ce, kl)]."""
    data, teaching, says = prepare(replace(opts, dry_run=True)).data, teaching_of(opts), theirs(opts.teacher)
    seen = []
    for i in range(3):
        (mb,) = data.step(i, opts.batch_size, opts.batch_size)
        ce, kl, by = parts_of(model, says, mb, teaching)
        ce, kl = ((by * each).sum() / by.sum() for each in (ce, kl))
        loss = (1 - teaching.weight) * ce + teaching.weight * kl
        take_step(loss, adamw)
        seen.append((loss.item(), ce.item(), kl.item()))
    return seen


def check_log(out, seen):
    for values, record in zip(seen, records(out, "loss"), strict=True):
        assert [record[name] for name in ("loss", "ce", "kl")] == pytest.approx(values, rel=1e-5, abs=2e-6)


@pytest.mark.full
@pytest.mark.parametrize("more", [{}, dict(distill_weight=1.0, temperature=1.0, micro_batch=1)], ids=["mixed", "alone"])
def test_three_steps_are_those_of_the_definition(folder, more, capsys):
    opts = run(folder, f"full-{len(more)}", **more)
    model = theirs(opts.model)
    seen = three_steps(opts, model, adamw_of(model.named_parameters(), opts.lr))
    finetune(opts)
    check_log(opts.out, seen)
    check_weights(opts.out, dict(model.named_parameters()), opts.lr)
    said = capsys.readouterr().out
    assert "the teacher x" in said
    assert re.search(rf"^teacher  {opts.teacher}, .* parameters: scored [\d.k]+ tokens in ", said, re.M)
    assert " kl " in said


@pytest.mark.full
def test_adapters_are_trained_as_by_peft(folder):
    peft = pytest.importorskip("peft")
    opts = run(folder, "lora", lora=4, lora_alpha=8.0, lora_targets=("q_proj", "v_proj"), weight_decay=0.0)
    model, adamw = trained_by_peft(opts, folder / "begun")
    seen = three_steps(opts, model, adamw)
    finetune(opts)
    check_log(opts.out, seen)
    written = load_file(folder / "lora" / "adapter_model.safetensors")
    check_close(written, peft.get_peft_model_state_dict(model), opts.lr)


def scored(folder, out, *more):
    data = ["--data", str(folder / "rows.jsonl"), "--seq-len", "64", "--top-k", str(K), "--out", str(out), *more]
    assert score.score(options.score_options([str(folder / "teacher"), *data])) == 0
    return str(out)


@pytest.mark.full
def test_scores_teach_as_their_model_does(folder, tmp_path, cache, capsys, monkeypatch):
    """Packed or not, in one micro-batch or several; a later run asks the teacher nothing."""
    one = dict(batch_size=99, max_steps=1)
    finetune(run(folder, "asked", **one))
    assert len(list(cache.glob("*/scores.json"))) == 1
    given = scored(folder, tmp_path / "scores")
    capsys.readouterr()
    finetune(run(folder, "given", teacher=given, top_k=None, **one))
    assert "by the scores in" in capsys.readouterr().out
    (place,), real = cache.iterdir(), teacher.taught_by

    def reads(*given):
        assert teacher._locked(place) is None  # no other run removes them meanwhile
        return real(*given)

    with monkeypatch.context() as later:
        later.setattr(teacher, "taught_by", reads)
        finetune(run(folder, "later", **one))
    assert "are kept from an earlier run" in capsys.readouterr().out
    assert weights(folder / "asked") == weights(folder / "given") == weights(folder / "later")
    for name, more in {"alone": dict(no_pack=True), "several": dict(micro_batch=1)}.items():
        finetune(run(folder, name, teacher=given, **one | more))
        for a, b in zip(records(folder / "asked"), records(folder / name), strict=True):
            for key in ("loss", "ce", "kl", "eval_loss", "eval_ce", "eval_kl"):
                assert (key in a) == (key in b)
                assert key not in a or a[key] == pytest.approx(b[key], rel=1e-5), key
    last = records(folder / "asked")[-1]
    assert last["eval_loss"] == pytest.approx(0.3 * last["eval_ce"] + 0.7 * last["eval_kl"], rel=1e-5)


@pytest.mark.full
def test_a_stopped_run_goes_on_to_the_same_bits(folder, monkeypatch, cache):
    whole, parts = (run(folder, name, max_steps=4) for name in ("whole", "parts"))
    finetune(whole)
    monkeypatch.chdir(folder)
    stopped(replace(parts, teacher="teacher"), 2, monkeypatch)  # config.yaml, which goes on, has the whole path
    shutil.rmtree(cache)
    finetune(replace(parts, resume=parts.out))
    check_same(whole, parts)


@pytest.mark.full
def test_a_run_does_not_go_on_with_another_teacher(folder, monkeypatch, tmp_path):
    shutil.copytree(folder / "teacher", tmp_path / "teacher-model")
    parts = run(folder, "other", teacher=str(tmp_path / "teacher-model"))
    stopped(parts, 2, monkeypatch)
    os.utime(tmp_path / "teacher-model" / "model.safetensors")
    with pytest.raises(InputError, match="is not what the run began with, or its files were touched"):
        finetune(replace(parts, resume=parts.out))


def test_of_two_runs_with_one_teacher_the_second_waits_for_the_first(tmp_path, monkeypatch, capsys):
    """As in a search over learning rates: both would write the same files of the cache."""
    monkeypatch.setattr(teacher, "WAIT", 0.001)
    there, order = threading.Event(), []

    class Told(Screen):
        def say(self, line):
            super().say(line)
            there.set()

    def second() -> None:
        with teacher._claimed(tmp_path / "key", Told()):  # the first has removed the folder, as it wrote nothing
            assert teacher._locked(tmp_path / "key") is None
            order.append("second")

    with teacher._claimed(tmp_path / "key", Screen()):
        waits = threading.Thread(target=second)
        waits.start()
        assert there.wait(60)
        order.append("first")
    waits.join(60)
    assert order == ["first", "second"]
    assert not (tmp_path / "key").exists()
    assert capsys.readouterr().out == "teacher  another run computes the same scores: waiting for it\n"


def test_scores_are_removed_whole_and_by_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(teacher, "KEPT", 1 << 80)  # no room
    for name in ("new", "old", "locked"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores.json").write_text("{}")
    (tmp_path / "killed" / "000").mkdir(parents=True)
    (tmp_path / "killed" / "000" / "part-00000.safetensors").write_text("scores")
    fd = teacher._locked(tmp_path / "locked")
    with monkeypatch.context() as killed:
        killed.setattr(teacher.shutil, "rmtree", lambda *_, **__: None)
        teacher._make_room(tmp_path / "new")
    assert [(tmp_path / name / "scores.json").exists() for name in ("new", "old", "locked")] == [True, False, True]
    teacher._make_room(tmp_path / "new")
    os.close(fd)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["locked", "new"]
    monkeypatch.setattr(Path, "iterdir", lambda _: iter([tmp_path / "gone"]))  # another run has removed it
    teacher._make_room(tmp_path / "new")


@pytest.mark.full
def test_killed_while_the_teacher_is_asked_it_goes_on_there(folder, cache, monkeypatch):
    monkeypatch.setattr(teacher, "PART", 1)
    whole, killed = run(folder, "not-killed", max_steps=1), run(folder, "killed", max_steps=1)
    asked, real = [], evaluate.forward

    def counted(*given):
        asked.append(given)
        return real(*given)

    def dies(*given):
        if len(asked) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return counted(*given)

    pid = fork()
    if not pid:
        evaluate.forward = dies
        go(killed)
    assert ended(pid) == -signal.SIGKILL
    assert not list(cache.glob("*/scores.json"))
    monkeypatch.setattr(evaluate, "forward", counted)
    finetune(killed)
    rest = len(asked)
    asked.clear()
    shutil.rmtree(cache)
    finetune(whole)
    assert rest == len(asked) - 2
    assert weights(whole.out) == weights(killed.out)


@pytest.mark.full
def test_a_cache_that_cannot_be_used_is_passed_over(folder, cache):
    cache.write_bytes(b"")  # a file in the place of a folder
    opts = run(folder, "passed-over", max_steps=1)
    finetune(opts)
    assert (folder / "passed-over" / "model.safetensors").exists()
    assert not (folder / "passed-over" / "teacher").exists()


@pytest.mark.full
def test_interrupted_without_a_cache_the_same_command_goes_on(folder, monkeypatch):
    monkeypatch.setattr(teacher, "cache_folder", lambda: None)
    monkeypatch.setattr(teacher, "PART", 1)
    opts, asked, real = run(folder, "left", max_steps=1), [], evaluate.forward

    def leaves(*given):
        asked.append(given)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(evaluate, "forward", leaves)
    with pytest.raises(KeyboardInterrupt):
        finetune(opts)
    assert len(list((folder / "left" / "teacher").glob("*/000/part-*"))) == 2
    finetune(opts)
    assert (folder / "left" / "model.safetensors").exists()
    assert not (folder / "left" / "teacher").exists()
    assert len({tuple(mb.ids[:9].tolist()) for _, group, *_ in asked for mb in group}) == len(asked) - 1


def test_hosts_with_a_teacher_are_refused(folder):
    with pytest.raises(InputError, match="runs with one are on one host. Start it without torchrun"):
        prepare(run(folder, "hosts"), group=SimpleNamespace(hosts=2))


def test_options_are_of_a_teacher(tmp_path):
    data = ["checkpoint", "--data", "rows.jsonl"]
    assert teaching_of(parse([*data, "--teacher", "big"])) == Teaching(64, 0.5, 1.0)
    assert teaching_of(parse([*data, "--teacher-model", "big", "--kd-temperature", "2"])) == Teaching(64, 0.5, 2.0)
    assert teaching_of(parse(data)) is None
    (tmp_path / "scores.json").write_text("{}")
    for wrong, says in {
        "--distill-weight 0.1": "--distill-weight 0.1 is for --teacher FOLDER",
        "--top-k 9": "--top-k 9 is for --teacher",
        "--teacher big --method dpo": "a teacher is for --method sft, not dpo",
        "--teacher big --distill-weight 2": "2",
        "--kd-alpha 1": "--teacher DIR, with --distill-weight",
        f"--teacher {tmp_path}": "its content.* Score the data again",
    }.items():
        with pytest.raises(InputError, match=says):
            parse([*data, *wrong.split()])


@pytest.mark.full
def test_scores_of_something_else_are_refused(folder, tmp_path):
    good = scored(folder, tmp_path / "good")

    def refuses(says, change=lambda place: None, where=good, **more):
        place = tmp_path / "changed"
        shutil.copytree(where, place)
        change(place)
        with pytest.raises(InputError, match=says):
            finetune(run(folder, "refused", teacher=str(place), **{"top_k": None} | more))
        shutil.rmtree(place)
        assert not (folder / "refused").exists()

    def names(**more):
        def change(place):
            said = json.loads((place / "scores.json").read_text())
            (place / "scores.json").write_text(json.dumps(said | more))

        return change

    def damaged(name, value):
        def change(place):
            (path,) = place.glob("000/*.safetensors")
            with safe_open(path, "numpy") as file:
                said = file.metadata()
            tensors = load_file(path)
            tensors[name] = value(tensors[name])
            save_file(tensors, path, said)

        return change

    refuses("has 5 tokens of each", top_k=4)
    refuses("has another tokenizer", names(tokenizer="other"))
    refuses("is of an older version", names(format="trireme scores 1"))
    refuses("which distillation needs", names(top_k=0))
    refuses("is not a file of scores with 6 tokens per label", names(top_k=6))
    refuses("has no scores of stories.txt", data=(str(folder / "stories.txt"),))
    refuses("lacks 18 of the data's 18", lambda place: next(place.glob("000/*")).unlink())
    short = scored(folder, tmp_path / "short", "--seq-len", "8")
    refuses("lacks 8 of the data.s 18 documents or parts", where=short)
    refuses("are not a distribution", damaged("logps", lambda t: t + np.float16(1)))
    refuses("are not a distribution", damaged("ids", lambda t: t * 0))
    refuses("or others", damaged("label", lambda t: t + 1))
    refuses("cannot be read", lambda place: next(place.glob("000/*")).write_bytes(b"1"))
