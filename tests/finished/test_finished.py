"""eval, score and merge of finished runs: the run's own numbers, those of transformers, wherever the weights lie."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from chats import make_tokenizer
from runs import CLASSES, FINISHED, PAIRS, records, write_rows
from safetensors.numpy import load_file

import trireme
from trireme.engine.run.after import opened
from trireme.engine.run.folder import RUN

pytestmark = pytest.mark.grid
METHOD = {"dpo": ["--method", "dpo"]}


@pytest.mark.full
@pytest.mark.parametrize("name", FINISHED)
def test_eval_says_what_the_run_has_said_last(name, finished, said):
    out, data = finished(name)
    printed, _ = said("eval", out, "--data", data, *METHOD.get(name, []))
    wanted = records(out, "eval_loss")[-1]
    assert f"loss {wanted['eval_loss']:.4f}" in printed
    figures = trireme.evaluate(out, data, **({"method": "dpo"} if name == "dpo" else {}))
    assert figures["loss"] == pytest.approx(wanted["eval_loss"], abs=1e-6)
    key = "rewards/accuracies" if name == "dpo" else "accuracy"
    assert figures[key] == pytest.approx(wanted[f"eval_{key}"], abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", ["full", "lora"])
def test_small_memory_changes_no_bit(name, finished, said, tmp_path):
    """Weights are read from the drive in each pass, in place or from a copy."""
    out, data = finished(name)
    whole = trireme.evaluate(out, data)
    small = ("--gpu-memory", "3MiB", "--ram", "2MiB")
    assert "read from the drive" in said("eval", out, "--data", data, *small)[1]
    assert trireme.evaluate(out, data, gpu_memory="3MiB", ram="2MiB") == whole
    text, lines = said("eval", out, "--data", data, "--dtype", "bf16", "--gpu-memory", "2MiB", "--ram", "1MiB")
    assert "copied" in lines
    assert text == said("eval", out, "--data", data, "--dtype", "bf16")[0]
    words, small = ("sample", out, "--prompt", "the cat", "--max-new-tokens", "6"), ("--gpu-memory", "4MiB", *small[2:])
    text, lines = said(*words, *small)
    assert "read from the drive" in lines
    assert text == said(*words)[0]


def test_rows_of_token_ids_need_no_tokenizer(byte_model, tmp_path):
    rows = write_rows(tmp_path / "ids.jsonl", [{"input_ids": list(range(5, 60))}])
    without = shutil.copytree(byte_model, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    assert trireme.evaluate(without, rows) == trireme.evaluate(byte_model, rows)


@pytest.mark.full
def test_loss_is_that_of_transformers(finished, tmp_path):
    """Of the merged model and of the adapter."""
    out, data = finished("lora")
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    ids = torch.tensor(transformers.AutoTokenizer.from_pretrained(out / "merged").encode("the cat sat on the mat"))
    write_rows(tmp_path / "ids.jsonl", [{"input_ids": ids.tolist(), "labels": ids.tolist()}])
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:]))
    for folder in (out, out / "merged"):
        figures = trireme.evaluate(folder, tmp_path / "ids.jsonl")
        assert figures["loss"] == pytest.approx(loss, abs=2e-5)
        assert figures["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("name", ["lora", "alpaca lora"])
def test_merged_later_it_is_the_same(name, finished, said, tmp_path):
    out, _ = finished(name)
    said("merge", out, "--out", tmp_path / "later")
    names = {p.name for p in (out / "merged").iterdir()}
    assert {p.name for p in (tmp_path / "later").iterdir()} == names
    assert all((tmp_path / "later" / n).read_bytes() == (out / "merged" / n).read_bytes() for n in names)


@pytest.mark.full
def test_an_adapter_of_classes_keeps_them(finished, tmp_path):
    out, _ = finished("classify lora")
    cats = write_rows(tmp_path / "cats.jsonl", [row for row in CLASSES if row["label"] == "cat"])
    plan = trireme.plan(model=out.parent / "checkpoint", adapter=out, data=cats, method="classify", device="cpu")
    assert any("classify (cat, dog)" in line for line in plan.report)


def test_an_adapter_keeps_the_tokenizer_and_template_of_its_folder(byte_model, said, tmp_path):
    """As other trainers leave them there: in evaluations, merged, and where it is trained on."""
    rows = [[dict(role="user", content="a"), dict(role="assistant", content=f"b{i}")] for i in range(4)]
    data, out = write_rows(tmp_path / "rows.jsonl", [dict(messages=row) for row in rows]), tmp_path / "adapter"
    trireme.finetune(model=byte_model, data=data, lora=2, rope_factor=2, merge=True, max_steps=1, out=out, device="cpu")
    template = "{% for m in messages %}#{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    make_tokenizer(out, eos="<|im_end|>", chat_template=template, tokenizer_class="PreTrainedTokenizerFast")
    said("merge", out, "--out", tmp_path / "merged")
    losses = [trireme.evaluate(folder, data)["loss"] for folder in (out, tmp_path / "merged")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert json.loads((tmp_path / "merged/config.json").read_text())["eos_token_id"] == 3
    on = dict(model=byte_model, adapter=out, data=data, merge=True, device="cpu", max_steps=1)
    trireme.finetune(**on, out=tmp_path / "on")
    assert "rope_factor: 2" in (tmp_path / "on/config.yaml").read_text()
    report = trireme.plan(**on).report
    assert any("#assistant:[b" in line for line in report)


def test_a_longer_context_is_planned_without_the_weights(byte_model, tmp_path):
    bare = shutil.copytree(byte_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    data = write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    assert trireme.plan(model=bare, data=data, rope_factor=2, device="cpu").report


def test_a_merged_model_ends_with_the_token_that_its_adapter_adds(byte_model, said, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(byte_model)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<{i}>" for i in range(14)]})
    tokenizer.eos_token = "<13>"
    base = transformers.AutoModelForCausalLM.from_pretrained(byte_model)
    base.resize_token_embeddings(len(tokenizer))
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    peft.get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    said("merge", tmp_path / "adapter", "--model", byte_model, "--out", tmp_path / "merged")
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["vocab_size"] == len(tokenizer) > 270
    assert config["eos_token_id"] == tokenizer.eos_token_id


def test_a_config_of_other_sizes_takes_no_memory(byte_model, said, tmp_path, monkeypatch):
    wrong = shutil.copytree(byte_model, tmp_path / "model")
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | dict(head_dim=10**6)))
    monkeypatch.setattr(opened, "build", None)
    assert "config.json" in said("eval", wrong, "--data", write_rows(tmp_path / "a.jsonl", [{"text": "a"}]), code=2)[1]


# ---------------------------------------------------------------- scores


@pytest.mark.full
@pytest.mark.parametrize("name", ["classify", "reward"])
def test_labels_and_rewards_are_those_of_transformers(name, finished, said, tmp_path):
    """Rows need no label, and may be of any form; those of the file are not read."""
    out, _ = finished(name)
    rows = [{"text": row["text"]} for row in CLASSES] if name == "classify" else [
        {"text": row["prompt"] + row[side]} for row in PAIRS for side in ("chosen", "rejected")
    ]  # fmt: skip
    write_rows(tmp_path / "texts.jsonl", rows)
    said(*(words := ("score", out, "--data", tmp_path / "texts.jsonl", "--out", tmp_path / "scores")))
    assert "scores/000.jsonl" in said(*words, code=2)[1]  # which may be of another model, or a user's
    records = [json.loads(line) for line in (tmp_path / "scores/000.jsonl").read_text().splitlines()]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert [record["row"] for record in records] == list(range(len(rows)))
    for row, record in zip(rows, records, strict=True):
        ids = torch.tensor([tokenizer.encode(row["text"], add_special_tokens=False)])
        with torch.no_grad():
            scores = model(ids).logits[0]
        if name == "reward":
            assert record["reward"] == pytest.approx(float(scores), abs=1e-4)
        else:
            chances = scores.softmax(0).tolist()
            assert list(record["probabilities"].values()) == pytest.approx(chances, abs=1e-5)
            assert record["label"] == model.config.id2label[int(scores.argmax())]
            assert record["probability"] == pytest.approx(max(chances), abs=1e-5)


@pytest.fixture
def scored(finished, said, tmp_path):
    """(the model, the folder of scores, what calls the command again)"""
    out, data = finished("full")
    words = ("score", out, "--data", data, "--out", tmp_path / "scores", "--top-k", "3")
    said(*words)
    return out, tmp_path / "scores", lambda code=0, *others: said(*words, *others, code=code)


@pytest.mark.full
def test_log_probabilities_are_those_of_transformers(scored):
    out, folder, _ = scored
    (part,) = (folder / "000").iterdir()
    scores = load_file(part)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    texts, n = Path(out.parent / "stories.txt").read_text().split("\n<|endoftext|>\n"), scores["trained"][0]
    ids = torch.tensor(tokenizer.encode(texts[scores["document"][0]], add_special_tokens=False))
    ids = ids[scores["start"][0] :][: n + 1]
    with torch.no_grad():
        logps = model(ids[None]).logits[0].log_softmax(-1)[:-1]
    assert scores["label"][:n].tolist() == ids[1:].tolist()
    own = logps.gather(1, ids[1:, None])[:, 0]
    assert scores["logp"][0] == pytest.approx(float(own.sum()), abs=1e-3)
    top = logps.topk(3)
    assert np.array_equal(scores["ids"][:n], top.indices.numpy())
    assert np.allclose(scores["logps"][:n], top.values.numpy(), atol=2e-2)
    rest = torch.log1p(-top.values.exp().sum(1))
    assert np.allclose(scores["rest"][:n], rest.numpy(), atol=1e-3)


def test_ids_without_a_token_are_no_likely_ones(byte_model, said, tmp_path):
    """They are the rest: a student's vocabulary may have other padding."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat")
    said("score", byte_model, "--data", tmp_path / "a.txt", "--out", tmp_path / "scores", "--top-k", "256")
    scores = load_file(tmp_path / "scores/000/part-00000.safetensors")
    assert scores["ids"].max() <= 260
    shares = np.exp(scores["logps"].astype(float)).sum(1) + np.exp(scores["rest"])
    assert np.allclose(shares, 1, atol=2e-2)


@pytest.mark.full
def test_scores_are_continued_and_never_mixed(scored, tmp_path):
    """Parts that are there stay, damaged ones are made again, and others' are refused."""
    _, folder, again = scored
    (part,) = (folder / "000").iterdir()
    before, scores = part.read_bytes(), load_file(part)
    stamp = part.stat().st_mtime_ns
    again()
    assert part.stat().st_mtime_ns == stamp
    part.unlink()
    again()
    for damaged in (before[:-1] + bytes([before[-1] ^ 1]), before[:100], b""):
        part.write_bytes(damaged)
        again()
        assert all(np.array_equal(values, scores[name]) for name, values in load_file(part).items())
    assert "Name another --out" in again(2, "--seq-len", "32")[1]
    assert "Name another folder" in again(2, "--top-k", "4")[1]


# ---------------------------------------------------------------- refusals

REFUSED = {  # case -> (words, what the line names); FULL, CLASSES, ADAPTER: folders of finished runs
    "no folder": (["eval", "nowhere", "--data", "x.txt"], "nowhere"),
    "a base without an adapter": (["eval", "FULL", "--model", "x", "--data", "x.txt"], "adapter_config.json"),
    "too long": (["eval", "FULL", "--data", "x.txt", "--seq-len", "99999"], "positions"),
    "a reference without a method": (["eval", "FULL", "--data", "x.txt", "--reference", "FULL"], "--reference"),
    "preferences of a classifier": (["eval", "CLASSES", "--data", "x.txt", "--method", "dpo"], "--method"),
    "rewards of a language model": (["eval", "FULL", "--data", "x.txt", "--method", "reward"], "--method reward"),
    "a number format of training": (["eval", "FULL", "--data", "x.txt", "--dtype", "fp8"], "--dtype"),
    "text of a classifier": (["sample", "CLASSES", "--prompt", "x"], "trireme score"),
    "no prompt": (["sample", "FULL"], "--prompt TEXT"),
    "no file of prompts": (["sample", "FULL", "--prompts", "nowhere.txt"], "nowhere.txt"),
    "a prompt beyond the positions": (["sample", "FULL", "--prompt", "x y " * 999], "a prompt of"),
    "two kinds of prompts": (["sample", "FULL", "--prompt", "x", "--chat"], "--chat"),
    "chat without a template": (["sample", "FULL", "--chat"], "--chat-template plain"),
    "a system message without one": (["sample", "FULL", "--prompt", "x", "--system", "y"], "--chat-template plain"),
    "sampling that is greedy": (["sample", "FULL", "--prompt", "x", "--top-p", "0.5"], "--temperature"),
    "no folder of scores": (["score", "FULL", "--data", "x.txt"], "--out DIR"),
    "no adapter": (["merge", "FULL", "--out", "y"], "adapter_config.json"),
    "no place": (["merge", "ADAPTER"], "--out DIR"),
    "a full place": (["merge", "ADAPTER", "--out", "ADAPTER"], "Name another folder"),
    "another base": (["merge", "ADAPTER", "--out", "y", "--model", "bytes"], "for this model"),
    "no name": (["push", "FULL"], "OWNER/NAME"),
    "a run that has not ended": (["eval", "begun", "--data", "x.txt"], "--resume begun"),
    "no tokenizer": (["sample", "begun/bare", "--prompt", "x"], "--tokenizer DIR"),
    "stops that are words": (["sample", "bytes", "--prompt", "x"], "eos_token_id"),
    "a row without text": (["sample", "FULL", "--prompts", "rows.jsonl"], "rows.jsonl prompt 1"),
    "training a classifier on text": (["CLASSES", "--data", "x.txt"], "--method classify"),
    "other classes": (["CLASSES", "--data", "x.txt", "--method", "classify", "--labels", "A,B"], "--labels"),
}


@pytest.mark.full
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_one_line(case, finished, said, tmp_path, monkeypatch, byte_model):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(byte_model, "bytes")
    Path("bytes/generation_config.json").write_text('{"eos_token_id": "</s>"}')
    Path("begun", RUN).mkdir(parents=True)
    shutil.copytree(byte_model, "begun/bare", ignore=shutil.ignore_patterns("tokenizer*"))
    Path("x.txt").write_text("the cat sat\n")
    write_rows(tmp_path / "rows.jsonl", [{"messages": 3}])
    before = sorted(tmp_path.rglob("*"))
    folders = {"FULL": "full", "CLASSES": "classify", "ADAPTER": "lora"}
    words, culprit = REFUSED[case]
    argv = [str(finished(folders[word])[0]) if word in folders else word for word in words]
    _, err = said(*argv, code=2)
    line = err.splitlines()[-1]
    assert line.startswith("error: ")
    assert culprit in line
    assert sorted(tmp_path.rglob("*")) == before
