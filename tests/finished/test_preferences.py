"""`trireme eval --method`: pairs and labelled answers, by TRL's formulas with transformers' log-probabilities."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from chats import make_tokenizer
from runs import text, write_rows
from tiny import LLAMA, oracle
from transformers import AutoModelForCausalLM, AutoTokenizer

from trireme import InputError, evaluate
from trireme.engine.run.config.config_file import options_of
from trireme.engine.run.finished import model as opening
from trireme.engine.run.main import main

pytestmark = pytest.mark.grid


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Two models of one shape: `before` training, and after it."""
    folder = tmp_path_factory.mktemp("preferences")
    for name, seed in (("before", 1), ("after", 2)):
        model, _ = oracle("llama", LLAMA | dict(vocab_size=260, max_position_embeddings=256, eos_token_id=1))
        torch.manual_seed(seed)
        with torch.no_grad():
            for each in model.parameters():
                each.add_(0.02 * torch.randn_like(each))
        model.save_pretrained(folder / name)
        make_tokenizer(folder / name, tokenizer_class="PreTrainedTokenizerFast")
    random = np.random.default_rng(0)
    words = lambda few, many: text(random, few, many)
    pairs = [
        dict(prompt=words(1, 4), chosen=" " + words(1, 5), rejected=" " + words(1, 4), weight=1 + i) for i in range(4)
    ]
    labelled = [dict(prompt=p["prompt"], completion=p["chosen"], label=i % 2 == 0) for i, p in enumerate(pairs)]
    write_rows(folder / "pairs.jsonl", pairs)
    write_rows(folder / "labelled.jsonl", labelled)
    return folder


def logps(folder, rows, key):
    """(sums, numbers of tokens) of transformers, of answers with their end token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    sums, counts = [], []
    for prompt, answer in ((row["prompt"], row[key]) for row in rows):
        ids = [*tokenizer(prompt + answer).input_ids, tokenizer.eos_token_id]
        begins = len(tokenizer(prompt).input_ids)  # tokens are bytes
        with torch.no_grad():
            each = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        found = each.gather(1, torch.tensor(ids[1:])[:, None])[begins - 1 :, 0]
        sums.append(float(found.sum()))
        counts.append(len(found))
    return np.array(sums), np.array(counts)


def sigma(x):
    return 1 / (1 + np.exp(-x))


def test_dpo_of_held_out_pairs(here, capsys):
    rows = [json.loads(line) for line in (here / "pairs.jsonl").read_text().splitlines()]
    (c, _), (r, _) = (logps(here / "after", rows, side) for side in ("chosen", "rejected"))
    (c0, _), (r0, _) = (logps(here / "before", rows, side) for side in ("chosen", "rejected"))
    good, bad, weights = 0.3 * (c - c0), 0.3 * (r - r0), np.arange(1, 5)
    loss = float((weights * -np.log(sigma(good - bad))).sum() / weights.sum())
    options = dict(method="dpo", beta=0.3, reference=here / "before", seq_len=128)
    found = evaluate(here / "after", here / "pairs.jsonl", **options)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["rewards/margins"] == pytest.approx(float((good - bad).mean()), rel=1e-4)
    assert found["rewards/accuracies"] == (good > bad).mean()
    assert found["logps/rejected"] == pytest.approx(float(r.mean()), rel=1e-5)
    assert found["pairs"] == 4
    words = [str(here / "after"), "--data", str(here / "pairs.jsonl"), "--seq-len", "128", "--method", "dpo"]
    assert main(["eval", *words, "--beta", "0.3", "--reference", str(here / "before")]) == 0
    out = capsys.readouterr()
    margin, accuracy = float((good - bad).mean()), float((good > bad).mean())
    assert f": loss {loss:.4f}, accuracy {accuracy:.4f}, margin {margin:.4g}, on 4 pairs of " in out.out
    assert "method   dpo (beta 0.3, label_smoothing 0)" in out.err


def test_orpo_and_simpo_need_no_reference(here):
    rows = [json.loads(line) for line in (here / "pairs.jsonl").read_text().splitlines()]
    (c, n), (r, m) = (logps(here / "after", rows, side) for side in ("chosen", "rejected"))
    c, r, weights = c / n, r / m, np.arange(1, 5)
    odds = (c - np.log1p(-np.exp(c))) - (r - np.log1p(-np.exp(r)))
    losses = {"orpo": -c - 0.1 * np.log(sigma(odds)), "simpo": -np.log(sigma(0.1 * (c - r) - 0.5))}
    for method, each in losses.items():
        found = evaluate(here / "after", here / "pairs.jsonl", method=method, seq_len=128)
        assert found["loss"] == pytest.approx(float((weights * each).sum() / weights.sum()), rel=1e-5)


def test_kto_of_labelled_answers(here):
    rows = [json.loads(line) for line in (here / "labelled.jsonl").read_text().splitlines()]
    others = [rows[1], *rows[:-1]]  # whose answers measure the KL
    mixed = [row | {"completion": other["completion"]} for row, other in zip(rows, others, strict=True)]
    ratios = [
        np.subtract(*(logps(here / name, part, "completion")[0] for name in ("after", "before")))
        for part in (rows, mixed)
    ]
    kl, signs = max(0.0, ratios[1].mean()), np.where([row["label"] for row in rows], 1, -1)
    loss = float((1 - sigma(signs * 0.1 * (ratios[0] - kl))).mean())
    found = evaluate(here / "after", here / "labelled.jsonl", method="kto", reference=here / "before", seq_len=128)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["kl"] == pytest.approx(kl, rel=1e-5)
    assert found["answers"] == 4


def test_the_model_itself_as_reference_has_no_margin(here):
    found = evaluate(here / "after", here / "pairs.jsonl", method="dpo", reference=here / "after", seq_len=128)
    assert (found["loss"], found["rewards/margins"]) == (pytest.approx(math.log(2), rel=1e-12), 0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(method="dpo"), "compares with the model before training, which .*after does not name: --reference DIR"),
        (dict(method="dpo", reference="/nowhere"), "--reference /nowhere: no such folder. Name the model before"),
        (dict(method="dpo", reference="/nowhere", data="absent.jsonl"), "--reference /nowhere: no such folder"),
        (dict(method="orpo", reference="x"), "--reference is for --method dpo, ipo, kto"),
        (dict(label_smoothing=0.1), "--label-smoothing is for --method dpo or simpo: .*without it. Leave it out"),
        (dict(beta=0.2), "--beta 0.2 is for --method dpo and its relatives"),
        (dict(method="orpo", simpo_gamma=1), "--simpo-gamma 1 is for --method simpo"),
        (dict(), "`eval` with --method dpo"),
    ],
)
def test_what_is_wrong_is_one_line(here, options, says):
    options = dict(options)
    name = options.pop("data", "pairs.jsonl")
    with pytest.raises(InputError, match=says):
        evaluate(here / "after", here / name, seq_len=128, **options)


def _renamed(vocab, old, new):
    return {new if token == old else token: i for token, i in vocab.items()}


def test_a_reference_with_other_tokens_is_refused(here, tmp_path):
    """By an id that is another token there; not for one token more or with a name of its own, another way to cut up
    texts, or no tokenizer."""
    loss = lambda folder: evaluate(here / "after", here / "pairs.jsonl", method="dpo", reference=folder, seq_len=128)[
        "loss"
    ]
    expected = loss(here / "before")
    made = shutil.copytree(here / "before", tmp_path / "before")
    path = made / "tokenizer.json"
    found = json.loads(path.read_text())
    vocab = found["model"]["vocab"]
    added = dict(
        id=260, content="<more>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=True
    )
    path.write_text(json.dumps(found | {"added_tokens": [*found["added_tokens"], added], "post_processor": None}))
    assert loss(made) == expected
    a, b = sorted((vocab["a"], vocab["b"]))
    path.write_text(json.dumps(found | {"model": found["model"] | {"vocab": _renamed(vocab, "a", "<|reserved|>")}}))
    assert loss(made) == expected
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(found))
    with pytest.raises(InputError, match=rf"before has another tokenizer: token {a} is 'b' there, and 'a' in the data"):
        loss(made)
    path.unlink()
    assert loss(made) == expected


def test_weights_of_rows_count_as_in_a_run(here):
    """The loss is the weighted mean over trained tokens."""
    rows = [dict(prompt="a", completion=" b c", weight=3.0), dict(prompt="the old", completion=" d", weight=0.5)]
    write_rows(here / "weighted.jsonl", rows)
    sums, counts = logps(here / "after", rows, "completion")
    weights = np.array([3.0, 0.5])
    found = evaluate(here / "after", here / "weighted.jsonl", seq_len=128)
    assert found["loss"] == pytest.approx(-float((weights * sums).sum() / (weights * counts).sum()), rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("more", [[], ["--lora", "2"]])
def test_a_run_is_found_with_what_it_began_with(here, tmp_path, monkeypatch, more):
    """Its last evaluation: the reference is the checkpoint of its config.yaml, or the adapter's base."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pairs, out = str(here / "pairs.jsonl"), tmp_path / "out"
    words = [str(here / "before"), "--data", pairs, "--val", pairs, "--method", "dpo", "--seq-len", "128"]
    words += ["--max-steps", "2", "--batch-size", "2", "--lr", "1e-2", "--beta", "0.4", *more]
    assert main([*words, "--device", "cpu", "--out", str(out)]) == 0
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    last = [record for record in records if "eval_loss" in record][-1]
    read = []
    monkeypatch.setattr(opening, "options_of", lambda folder: read.append(folder) or options_of(folder))
    found = evaluate(out, pairs, method="dpo", beta=0.4, seq_len=128, device="cpu")
    assert read.count(out) == 1
    assert last["eval_loss"] != pytest.approx(math.log(2), abs=1e-3)
    for name in ("loss", "rewards/margins", "rewards/chosen", "logps/rejected"):
        assert found[name] == pytest.approx(last[f"eval_{name}"], rel=1e-5, abs=2e-6)
