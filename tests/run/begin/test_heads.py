"""Runs with --method reward and classify: losses, scores and weights of transformers, peft and torch's AdamW."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from runs import adamw_of, check_stopped, check_weights, make_small, records, take_step, text, tuned, write_rows
from safetensors.numpy import load_file
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from trireme.engine.run.begin.model import what_is_trained
from trireme.engine.run.command import parse
from trireme.engine.run.job import prepare
from trireme.engine.run.main import main
from trireme.engine.run.options import Options
from trireme.engine.run.train import finetune
from trireme.models.config import InputError
from trireme.models.lora import initial
from trireme.models.sizes import shapes

NAMES = ("cat", "dog", "sea")
CENTRE = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = make_small(tmp_path_factory.mktemp("heads"))
    random = np.random.default_rng(0)
    pairs = [
        dict(prompt=text(random, 2, 6), chosen=" " + text(random, 2, 9), rejected=" " + text(random, 1, 7),
             margin=float(random.choice([0.0, 0.5])), weight=float(random.choice([1.0, 2.0])))
        for _ in range(24)
    ]  # fmt: skip
    rows = [dict(text=text(random, 2, 12), label=str(random.choice(NAMES))) for _ in range(40)]
    write_rows(where / "pairs.jsonl", pairs)
    write_rows(where / "rows.jsonl", rows)
    return where


def run(folder, out, method, **more) -> Options:
    given = dict(method=method, eval_tokens=10**6) | more
    if method != "reward":
        return tuned(folder, out, "rows.jsonl", **given)
    return tuned(folder, out, "pairs.jsonl", **dict(center_rewards_coefficient=CENTRE) | given)


def classifier(opts, labels):
    """transformers' model as a run begins: the checkpoint's weights, our first head."""
    pad = prepare(replace(opts, dry_run=True)).data.options.pad
    config = AutoConfig.from_pretrained(opts.model, num_labels=labels, pad_token_id=pad)
    model = AutoModelForSequenceClassification.from_pretrained(opts.model, config=config, dtype=torch.float32).eval()
    model.score.weight.data = initial("score.weight", tuple(model.score.weight.shape), config.initializer_range)
    return model


def scores(model, mb):
    """Of each document alone, (documents, labels)."""
    ids = torch.from_numpy(mb.ids).long().split(mb.lengths)
    return torch.cat([model(input_ids=each[None]).logits for each in ids])


def loss_of(model, mb, method):
    """(loss, accuracy, margin or 0)"""
    found = scores(model, mb)
    if method == "classify":
        labels = torch.from_numpy(mb.labels[mb.labels >= 0]).long()
        assert len(labels) == len(found)
        return cross_entropy(found, labels), (found.argmax(1) == labels).float().mean().item(), 0.0
    good, bad = found[::2, 0], found[1::2, 0]
    weights = torch.from_numpy(mb.weights[::2])
    each = -logsigmoid(good - bad - torch.from_numpy(mb.reference[::2])) + CENTRE * (good + bad) ** 2
    differ = (good - bad).detach()
    return weights @ each / weights.sum(), (differ > 0).float().mean().item(), differ.mean().item()


def steps_of(opts, model, decay=0.01):
    """[(loss, accuracy, margin, gradient's norm)] of three steps."""
    data, seen = prepare(replace(opts, dry_run=True)).data, []
    adamw = adamw_of(((n, p) for n, p in model.named_parameters() if p.requires_grad), opts.lr, decay)
    for i in range(3):
        (mb,) = data.step(i, opts.batch_size, opts.batch_size)
        loss, *more = loss_of(model, mb, opts.method)
        seen.append((loss.item(), *more, take_step(loss, adamw)))
    return seen


def check_log(out, seen):
    for (loss, accuracy, margin, norm), record in zip(seen, records(out, "loss"), strict=True):
        assert record["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert record["accuracy"] == pytest.approx(accuracy, abs=2e-6)
        assert record.get("margin", 0.0) == pytest.approx(margin, abs=2e-6)


@pytest.mark.full
@pytest.mark.parametrize(("method", "no_pack"), [("reward", False), ("classify", True)])
def test_three_steps_are_those_of_transformers(folder, method, no_pack):
    opts = run(folder, f"{method}-{no_pack}", method, no_pack=no_pack)
    model = classifier(opts, 1 if method == "reward" else 3)
    seen = steps_of(opts, model)
    finetune(opts)
    check_log(opts.out, seen)
    assert model.state_dict().keys() == load_file(f"{opts.out}/model.safetensors").keys()
    check_weights(opts.out, model.state_dict(), opts.lr)
    check_opens(opts.out, opts)
    check_config(opts.out, method)


def check_opens(out, opts, opened=None):
    """transformers reads the output, padded batches too, and says what the last evaluation and `trireme eval` do."""
    held_out, method = prepare(replace(opts, dry_run=True)).data.held_out, opts.method
    opened = opened or AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32).eval()
    total, weight = 0.0, 0.0
    for mb in held_out.batches(1):
        loss, *_ = loss_of(opened, mb, method)
        part = mb.weights[::2].sum() if method == "reward" else len(mb.lengths)
        total, weight = total + loss.item() * part, weight + part
        ids = torch.from_numpy(mb.ids).long().split(mb.lengths)
        padded = torch.nn.utils.rnn.pad_sequence(ids, True, opened.config.pad_token_id)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], True, 0)
        together = opened(input_ids=padded, attention_mask=mask).logits
        torch.testing.assert_close(together, scores(opened, mb), atol=1e-5, rtol=1e-5)
    last = records(opts.out, "eval_loss")[-1]
    assert last["eval_loss"] == pytest.approx(total / weight, rel=1e-5)
    assert last["eval_rows"] == sum(len(mb.lengths) for mb in held_out.batches(1))


def check_config(out, method):
    config = AutoConfig.from_pretrained(out)
    assert config.architectures == ["LlamaForSequenceClassification"]
    assert config.pad_token_id is not None
    if method == "classify":
        assert config.id2label == dict(enumerate(NAMES))
        assert config.label2id == {name: i for i, name in enumerate(NAMES)}
        assert config.problem_type == "single_label_classification"
    else:
        assert config.num_labels == 1


@pytest.mark.full
@pytest.mark.parametrize("method", ["reward", "classify"])
def test_adapters_and_head_are_trained_as_by_peft(folder, method, capsys):
    opts = run(folder, f"lora-{method}", method, lora=4, lora_alpha=8.0, lora_targets=("q_proj", "v_proj"), merge=True)
    begun = replace(opts, out=str(folder / f"begun-{method}"), max_steps=1, lr=1e-30, merge=False)
    finetune(begun)
    labels = 1 if method == "reward" else 3
    model = peft.PeftModel.from_pretrained(classifier(opts, labels), begun.out, is_trainable=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    stored = load_file(f"{begun.out}/adapter_model.safetensors")
    assert sum(p.numel() for p in parameters) == sum(t.size for t in stored.values())
    seen = steps_of(opts, model, decay=0.0)
    finetune(opts)
    out = Path(opts.out)
    check_log(out, seen)
    check_opens(out / "merged", opts)
    check_config(out / "merged", method)
    again = peft.PeftModel.from_pretrained(classifier(opts, labels), out)
    check_opens(out, opts, again.eval())
    assert main(["merge", str(out), "--out", str(folder / f"by-hand-{method}")]) == 0
    check_opens(folder / f"by-hand-{method}", opts)
    held = evaluated(out, opts, capsys)
    assert held == evaluated(out / "merged", opts, capsys)


def evaluated(folder, opts, capsys):
    """What `trireme eval` says of the training data."""
    capsys.readouterr()
    assert main(["eval", str(folder), "--data", opts.data[0], "--seq-len", "64", "--device", "cpu"]) == 0
    return capsys.readouterr().out.split(": ", 1)[1]


@pytest.mark.full
@pytest.mark.parametrize("method", ["reward", "classify"])
def test_a_stopped_run_goes_on_to_the_same_bits(folder, monkeypatch, method):
    whole, parts = (run(folder, f"{name}-{method}", method, max_steps=4, micro_batch=1) for name in ("whole", "parts"))
    check_stopped(whole, parts, monkeypatch)
    assert Path(whole.out, "config.json").read_bytes() == Path(parts.out, "config.json").read_bytes()


@pytest.mark.full
def test_a_head_that_is_there_is_trained_further(folder):
    """Of transformers, in float16 and in shards: it begins with the head's weights, and other names stay."""
    model = classifier(run(folder, "", "classify"), 3)
    model.config.id2label, model.config.label2id = dict(enumerate(NAMES)), {name: i for i, name in enumerate(NAMES)}
    model.half().save_pretrained(folder / "made", max_shard_size="200KB")
    opts = run(folder, "further", "classify", model=str(folder / "made"), tokenizer=str(folder / "checkpoint"))
    model = AutoModelForSequenceClassification.from_pretrained(folder / "made", dtype=torch.float32).eval()
    seen = steps_of(opts, model)
    finetune(opts)
    out = Path(opts.out)
    check_log(out, seen)
    check_config(out, "classify")
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == json.loads((folder / "made" / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.full
def test_an_untied_output_matrix_is_left_out(folder, tmp_path):
    """Also of several files, whose index then has the head in its place."""
    config = json.loads((folder / "checkpoint" / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.bfloat16)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "untied", max_shard_size="300KB")
    assert config["tie_word_embeddings"] is not None
    given = dict(model=str(tmp_path / "untied"), tokenizer=str(folder / "checkpoint"), max_steps=1)
    opts = run(folder, "from-untied", "reward", **given)
    finetune(opts)
    out = Path(opts.out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    assert "score.weight" in index["weight_map"]
    opened = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in opened.parameters())
    assert opened.score.weight.shape == (1, model.config.hidden_size)


def test_a_dry_run_counts_the_head(folder):
    """In place of the output matrix, also of a model that is not here."""
    plain = prepare(replace(run(folder, "dry", "sft"), method="sft", data=(), val=None, dry_run=True))
    scored = prepare(run(folder, "dry", "classify", data=(), val=None, labels=("a", "b"), dry_run=True))
    assert plain.cfg.tied
    assert scored.parameters == plain.parameters + 2 * plain.cfg.width
    cfg = what_is_trained(Options(shape="llama-3.1-8b", dry_run=True, method="reward"))
    assert (cfg.scores, shapes.parameters(cfg)) == (1, 8030261248 - 128255 * 4096)


def test_defaults_are_those_of_fine_tuning(folder):
    job = prepare(replace(run(folder, "dry", "reward", center_rewards_coefficient=None), lr=None, dry_run=True))
    assert job.lr == 2e-5
    assert prepare(replace(run(folder, "dry", "classify"), max_steps=None, dry_run=True)).options.epochs == 3


def test_what_does_not_belong_together_is_refused(folder, tmp_path):
    data = ["checkpoint", "--data", "rows.jsonl"]
    for wrong, says in {
        "--labels a,b": "--labels a,b is for --method classify",
        "--method classify --beta 0.1": "--beta 0.1 is for --method dpo and its relatives",
        "--method dpo --center-rewards-coefficient 0.1": "is for --method reward",
        "--method classify --long split": "--method classify reads whole rows",
        "--method classify --labels a": "neither a number of classes",
        "--method classify --label-smoothing 0.1": "is for --method dpo or simpo",
        "--method reward --teacher .": "a teacher is for --method sft, not reward",
    }.items():
        with pytest.raises(InputError, match=says):
            parse([*data, *wrong.split()])
    opts = replace(run(folder, "refused", "classify"), dry_run=True)
    with pytest.raises(InputError, match="how many classes"):
        prepare(replace(opts, data=(), val=None))
    model = classifier(opts, 3)
    model.save_pretrained(tmp_path)
    there = replace(opts, model=str(tmp_path), tokenizer=str(folder / "checkpoint"), method="sft")
    with pytest.raises(InputError, match=r"has a score head \(3 labels\), and no output matrix"):
        prepare(there)
    with pytest.raises(InputError, match="has a score head already, 3 labels"):
        prepare(replace(there, method="reward"))
    with pytest.raises(InputError, match="is a classifier of 3 labels: LABEL_0"):
        prepare(replace(there, method="classify", labels=("a", "b")))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"problem_type": "regression"}))
    with pytest.raises(InputError, match="one class of several"):
        prepare(replace(there, method="classify"))


@pytest.mark.parametrize("command", ["sample", "score"])
def test_a_score_head_writes_no_text(folder, tmp_path, command, capsys):
    classifier(run(folder, "", "classify"), 3).save_pretrained(tmp_path / "made")
    more = (
        ["--prompt", "x"]
        if command == "sample"
        else ["--data", str(folder / "rows.jsonl"), "--out", str(tmp_path / "o")]
    )
    assert main([command, str(tmp_path / "made"), "--tokenizer", str(folder / "checkpoint"), *more]) == 2
    assert "the model has a score head, no output matrix" in capsys.readouterr().err
