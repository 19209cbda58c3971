"""Runs with --method: the same losses, rewards and weights as TRL's formulas with transformers and torch's AdamW."""

import errno
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from engines import fork
from runs import (
    WORDS,
    adamw_of,
    check_stopped,
    check_weights,
    ended,
    go,
    losses,
    make_small,
    options,
    records,
    take_step,
    text,
    theirs,
    trained_by_peft,
    tuned,
    weights,
    write_rows,
)

from trireme.engine.run.begin import reference
from trireme.engine.run.begin.method import preference_of
from trireme.engine.run.command import parse
from trireme.engine.run.config.config_file import config_yaml, repeats
from trireme.engine.run.job import prepare
from trireme.engine.run.options import Options
from trireme.engine.run.train import finetune
from trireme.models.config import InputError
from trireme.models.losses.preferences import Documents, compare

METHODS = {
    "dpo": dict(method="dpo", beta=0.5, label_smoothing=0.1),
    "ipo": dict(method="ipo", beta=0.4),
    "orpo": dict(method="orpo", beta=0.3),
    "simpo": dict(method="simpo", beta=2.0, simpo_gamma=0.4),
    "kto": dict(method="kto", beta=0.5, desirable_weight=1.2, undesirable_weight=0.8),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = make_small(tmp_path_factory.mktemp("preferences"))
    random = np.random.default_rng(0)
    rows = [
        dict(prompt=text(random, 2, 6), chosen=" " + text(random, 2, 9), rejected=" " + text(random, 1, 7),
             weight=float(random.choice([1.0, 0.5, 2.0])))
        for _ in range(24)
    ]  # fmt: skip
    write_rows(where / "pairs.jsonl", rows)
    return where


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Where the reference's numbers are kept for later runs."""
    monkeypatch.setattr(reference, "cache_folder", lambda: tmp_path)
    return tmp_path / "reference"


def run(folder, out, method="dpo", **more) -> Options:
    return tuned(folder, out, "pairs.jsonl", **METHODS[method] | more)


def logps(model, mb):
    """Of each document of a micro-batch, alone, (documents,) float64 with gradients."""
    found, at = [], 0
    for length in mb.lengths:
        ids = torch.from_numpy(mb.ids[at : at + length]).long()
        labels = torch.from_numpy(mb.labels[at : at + length]).long()
        logits = model(input_ids=ids[None]).logits[0].double()
        each = torch.log_softmax(logits, -1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
        found.append(each[labels >= 0].sum())
        at += length
    return torch.stack(found)


def of(mb, known):
    trained = np.array([int((part >= 0).sum()) for part in np.split(mb.labels, np.cumsum(mb.lengths)[:-1])])
    return Documents(np.array(mb.lengths), trained, mb.weights, known)


def three_steps(opts, model, adamw):
    """[(loss, metrics)]. Gradients by autograd of each document alone."""
    data, preference, before = prepare(replace(opts, dry_run=True)).data, preference_of(opts), theirs(opts.model)
    seen = []
    for i in range(3):
        (mb,) = data.step(i, opts.batch_size, opts.batch_size)
        with torch.no_grad():
            known = logps(before, mb).numpy() if preference.compares else np.zeros(len(mb.lengths))
        values = logps(model, mb)
        found = compare(preference, of(mb, known), values.detach().numpy())
        take_step(values @ torch.from_numpy(found.slopes) / found.weights.sum(), adamw)
        seen.append((found.loss, found.metrics()))
    return seen


def check_log(out, seen):
    for (loss, metrics), record in zip(seen, records(out, "loss"), strict=True):
        assert record["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        for name, value in metrics.items():
            assert record[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_three_steps_are_those_of_the_formulas(folder, method):
    opts = run(folder, f"{method}-run", method)
    model = theirs(opts.model)
    seen = three_steps(opts, model, adamw_of(model.named_parameters(), opts.lr))
    finetune(opts)
    check_log(opts.out, seen)
    check_weights(opts.out, dict(model.named_parameters()), opts.lr)


@pytest.mark.full
def test_adapters_are_trained_as_by_peft(folder):
    """The reference is the base: an adapter begins as nothing."""
    opts = run(folder, "lora", lora=4, lora_alpha=8.0, lora_targets=("q_proj", "v_proj"), weight_decay=0.0)
    seen = three_steps(opts, *trained_by_peft(opts, folder / "begun"))
    finetune(opts)
    check_log(opts.out, seen)


@pytest.mark.full
def test_packing_changes_no_loss_and_evaluations_compare_held_out_pairs(folder, capsys):
    """All pairs in one step: packed or each alone, in one micro-batch or several."""
    outs = {}
    for name, more in {"packed": {}, "alone": dict(no_pack=True), "several": dict(micro_batch=1)}.items():
        finetune(run(folder, name, batch_size=99, max_steps=1, **more))
        outs[name] = records(folder / name)
    said = capsys.readouterr().out
    assert "compared 24 pairs: the reference took" in said
    assert "method   dpo (beta 0.5, label_smoothing 0.1), full fine-tuning" in said
    assert "accuracy" in said
    assert "perplexity" not in said
    for record in outs["packed"]:
        for other in ("alone", "several"):
            (same,) = [r for r in outs[other] if r["step"] == record["step"] and ("loss" in r) == ("loss" in record)]
            for name in record:
                if name.startswith(("loss", "eval_loss", "rewards", "eval_rewards")):
                    assert same[name] == pytest.approx(record[name], rel=1e-4, abs=1e-5), name
    first = next(r for r in outs["packed"] if "eval_loss" in r)
    assert first["step"] == 0
    assert first["eval_loss"] == pytest.approx(np.log(2))
    assert first["eval_rewards/margins"] == 0
    assert not (folder / "packed" / "reference").exists()


@pytest.mark.full
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_stopped_run_goes_on_to_the_same_bits(folder, monkeypatch, method):
    whole, parts = (run(folder, f"{method}-{name}", method, max_steps=4) for name in ("whole", "parts"))
    check_stopped(whole, parts, monkeypatch)


@pytest.mark.full
def test_killed_while_the_reference_is_asked_it_goes_on_there(folder, cache, monkeypatch):
    """What is known is not computed again, here or in a later run of the same weights and data."""
    monkeypatch.setattr(reference, "KEPT_EVERY", 0.0)
    whole, killed = run(folder, "not-killed", max_steps=1), run(folder, "killed", max_steps=1)
    asked, real = [], reference.evaluate

    def counted(e, micro):
        asked.append(sum(len(mb.docs.lengths) for mb in micro))
        return real(e, micro)

    def dies(e, micro):
        if len(asked) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return counted(e, micro)

    pid = fork()
    if not pid:
        reference.evaluate = dies
        go(killed)
    assert ended(pid) == -signal.SIGKILL
    assert not cache.exists()
    monkeypatch.setattr(reference, "evaluate", counted)
    finetune(killed)
    rest = sum(asked)
    asked.clear()
    shutil.rmtree(cache)
    finetune(whole)
    assert 0 < rest < sum(asked) == 48
    asked.clear()
    finetune(run(folder, "later", max_steps=1))
    assert not asked
    assert weights(folder / "later") == weights(killed.out) == weights(whole.out)


def test_a_flipped_bit_of_what_the_reference_says_is_noticed():
    """Of one file in OUT and one in the cache."""
    known = reference.Known("key", np.arange(1.0, 9.0), 5)
    whole = known.encoded(6)
    assert (reference._parsed(whole, 8).values == known.values).all()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        found = reference._parsed(bytes(changed), 8)
        assert found is None or (found.key, found.done, [*found.values]) == ("key", 5, [*known.values]), bit


def test_a_cache_on_a_failing_drive_does_not_end_the_run(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(reference, "replace_synced", fails)
    reference._keep_in_cache(tmp_path / "a.safetensors", reference.Known("key", np.zeros(2), 2), 1)


@pytest.mark.full
@pytest.mark.parametrize("how", ["the same command", "--resume"])
def test_interrupted_while_the_reference_is_asked_it_goes_on_there(folder, tmp_path, monkeypatch, how):
    """What was known stays in OUT, also where there is no cache."""
    monkeypatch.setattr(reference, "cache_folder", lambda: None)
    asked, real = [], reference.evaluate

    def counted(e, micro):
        asked.append(sum(len(mb.docs.lengths) for mb in micro))
        if len(asked) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(e, micro)

    monkeypatch.setattr(reference, "evaluate", counted)
    opts = run(folder, tmp_path / "out", max_steps=1)
    with pytest.raises(KeyboardInterrupt):
        finetune(opts)
    assert sum(asked) < 48
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left >= {"config.yaml", "reference"}
    assert "store" not in left
    finetune(opts if how == "the same command" else replace(opts, resume=opts.out))
    assert sum(asked) == 48, "each document once"
    assert ">loss of dpo<" in (tmp_path / "out" / "loss.svg").read_text()
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "reference").exists()


@pytest.mark.parametrize(("method", "chosen"), [
    ("dpo", dict(beta=0.1, label_smoothing=0.0)),
    ("kto", dict(beta=0.1, desirable_weight=1.0, undesirable_weight=1.0)),
])  # fmt: skip
def test_parameters_that_are_not_given_are_in_the_runs_options(folder, method, chosen):
    given = replace(run(folder, "in-force"), method=method, beta=None, label_smoothing=None)
    found = prepare(given).options
    content = yaml.safe_load(config_yaml(found))
    assert chosen.items() <= content.items()
    assert not {"simpo_gamma", "temperature"} & content.keys()
    assert preference_of(found) == preference_of(given)
    assert repeats(config_yaml(found), given)


def test_options_are_of_their_methods(folder):
    data = ["checkpoint", "--data", "pairs.jsonl"]
    assert preference_of(parse([*data, "--rl", "dpo", "--pref-beta", "0.2"])).beta == 0.2
    assert preference_of(parse([*data, "--method", "kto", "--kto-chosen-weight", "2"])).desirable_weight == 2
    assert preference_of(parse(data)) is None
    assert preference_of(parse([*data, "--label-smoothing", "0.1"])) is None  # of the cross-entropy
    for wrong, says in {
        "--beta 0.1": "--beta 0.1 is for --method dpo and its relatives",
        "--method dpo --simpo-gamma 1": "--simpo-gamma 1 is for --method simpo",
        "--method ipo --label-smoothing 0.1": "is for --method dpo or simpo",
        "--method dpo --long split": "compares whole answers",
        "--method ppo": "is not one of sft, dpo",
    }.items():
        with pytest.raises(InputError, match=says):
            parse([*data, *wrong.split()])


def test_defaults_are_those_of_trl(folder):
    job = prepare(replace(run(folder, "dry", beta=None, label_smoothing=None), lr=None, dry_run=True))
    of = preference_of(job.options)
    assert (of.beta, of.label_smoothing, of.simpo_gamma, of.desirable_weight, job.lr) == (0.1, 0.0, 0.5, 1.0, 1e-6)


@pytest.mark.full
def test_rows_with_weights_are_trained_by_them(folder):
    """A weighted mean over the step's tokens; weights alike change nothing."""
    rows = [dict(prompt="the", completion=f" {word} sat") for word in WORDS[:6]]
    outs = {}
    for name, given in {"alike": [3] * 6, "weighted": [1, 2, 3, 1, 2, 3]}.items():
        path = write_rows(folder / f"{name}.jsonl", (row | {"weight": w} for row, w in zip(rows, given, strict=True)))
        opts = replace(options(folder, folder / f"rows-{name}", "gpu"), data=(str(path),), max_steps=1, batch_size=9)
        if name == "weighted":
            (mb,) = prepare(replace(opts, dry_run=True)).data.step(0, 9, 9)
        finetune(opts)
        outs[name] = list(losses(folder / f"rows-{name}").values())
    for name, by in {"alike": np.ones(len(mb.lengths)), "weighted": mb.weights}.items():
        model = theirs(opts.model)
        loss = (torch.from_numpy(by) @ -logps(model, mb)) / (by @ of(mb, None).trained)
        norm = take_step(loss, adamw_of(model.named_parameters(), opts.lr))
        np.testing.assert_allclose(outs[name][0], (loss.item(), norm), rtol=1e-5)
    assert outs["weighted"][0] != pytest.approx(outs["alike"][0], rel=1e-3)
