"""Text: greedy and sampled as transformers writes it, prompts in files, conversations; the demo."""

import io
import json
import re
import shutil
import sys
import traceback
from pathlib import Path

import pytest
import torch
import transformers

import trireme
from trireme.engine.run.after.demo import STORIES
from trireme.engine.run.after.sample import Sampling, probabilities

pytestmark = pytest.mark.grid
NEW = 12


def generation(**keys) -> None:
    """A copy of the model with this generation_config.json, as `own`."""
    shutil.copytree("model", "own")
    Path("own/generation_config.json").write_text(json.dumps(keys))


def theirs(folder: str, text: str, chat: bool = True) -> str:
    """What transformers writes, greedily."""
    tokenizer, model = (
        transformers.AutoTokenizer.from_pretrained(folder),
        transformers.AutoModelForCausalLM.from_pretrained(folder),
    )
    messages = [{"role": "user", "content": text}]
    chat_ids = lambda: tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = torch.tensor([chat_ids() if chat else tokenizer.encode(text)])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[
        0, ids.shape[1] :
    ]
    return tokenizer.decode(out, skip_special_tokens=True)


@pytest.mark.parametrize("chat", [True, False])
def test_an_answer_is_that_of_transformers(here, said, chat):
    """By the chat template, or as it is."""
    words = ("sample", "model", "--prompt", "Hi there", "--max-new-tokens", NEW, *([] if chat else ["--as-text"]))
    text, lines = said(*words)
    assert text == theirs("model", "Hi there", chat) + "\n"
    assert "error" not in lines


@pytest.mark.full
def test_several_prompts_in_one_load_are_those_one_by_one(here, said):
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "bb"}]}\n\n')
    prompts = ["a", [{"role": "user", "content": "bb"}]]
    for chosen in ({}, dict(temperature=0.8, top_k=20, top_p=0.9, seed=3)):
        options = [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", value)]
        rows = said("sample", "model", "--prompts", "prompts.jsonl", "--max-new-tokens", NEW, *options)[0].splitlines()
        rows = [json.loads(row) for row in rows]
        assert [row["text"] for row in rows] == trireme.sample("model", prompts, max_new_tokens=NEW, **chosen)
        assert rows[0]["prompt" if "prompt" in rows[0] else "messages"]
        assert trireme.sample("model", "a", max_new_tokens=NEW, **chosen) == rows[0]["text"]
        assert all(row["ended"] or row["tokens"] == NEW for row in rows)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8), (0.6, 7, 0.5)]
)
def test_probabilities_are_those_of_transformers_warpers(temperature, top_k, top_p):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 3
    ours = probabilities(Sampling(temperature, top_k, top_p, 0, frozenset()), logits)
    scores = transformers.TemperatureLogitsWarper(temperature)(None, logits)
    scores = transformers.TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = transformers.TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    assert torch.allclose(ours, scores.softmax(-1), atol=1e-6)


SETTINGS = {
    "sampled": (
        dict(do_sample=True, temperature=0.6, top_k=20, top_p=0.95),
        [],
        "temperature 0.6, top-k 20, top-p 0.95",
    ),
    "as transformers by default": (dict(do_sample=True), [], "temperature 1, top-k 50"),
    "greedy": (dict(temperature=0.6), [], "the likeliest"),
    "options go first": (dict(do_sample=True, top_k=20), ["--temperature", "0"], "the likeliest"),
    "not used": (dict(repetition_penalty=1.3), [], "repetition_penalty 1.3"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_generation_config_is_the_default(case, here, said):
    keys, options, words = SETTINGS[case]
    generation(**keys)
    assert words in said("sample", "own", "--prompt", "x", "--max-new-tokens", "2", *options)[1]


def test_a_value_of_generation_config_that_cannot_be_meant(here, said):
    generation(do_sample=True, temperature="hot")
    assert "temperature" in said("sample", "own", "--prompt", "x", code=2)[1].splitlines()[-1]


PROMPTS = {
    "no rows": ("\n\n", "p.jsonl"),
    "no JSON": ("{\n", "p.jsonl"),
    "another key": ('{"text": "x"}\n', "p.jsonl prompt 1"),
    "an answer": (
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
        "prompt 1",
    ),
    "no role": ('{"messages": [{"content": "y"}]}\n', "p.jsonl prompt 1"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_that_cannot_be_read_are_named(case, here, said):
    content, culprit = PROMPTS[case]
    Path("p.jsonl").write_text(content)
    assert culprit in said("sample", "model", "--prompts", "p.jsonl", code=2)[1].splitlines()[-1]


@pytest.mark.full
def test_prompts_of_a_text_file_are_its_lines(here, said):
    """More than share passes over the layers."""
    Path("p.txt").write_text("the cat\n\n" + "a dog\n" * 70)
    words = ("sample", "model", "--prompts", "p.txt", "--max-new-tokens", 2, "--temperature", 0)
    answers = [json.loads(line) for line in said(*words)[0].splitlines()]
    assert [answer["prompt"] for answer in answers] == ["the cat", *["a dog"] * 70]
    assert len({json.dumps(answer) for answer in answers}) == 2


def talk(said, monkeypatch, lines: str, *options: str) -> tuple[str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return said("sample", "model", "--chat", "--max-new-tokens", NEW, *options)


@pytest.mark.full
def test_a_conversation_remembers_and_begins_anew(here, said, monkeypatch):
    """/help and /quit are not sent to the model; an empty line ends it, too."""
    once, _ = talk(said, monkeypatch, "Hi\n")
    twice, _ = talk(said, monkeypatch, "Hi\nHi\n/quit\nHi\n")
    anew, lines = talk(said, monkeypatch, "Hi\n/new\n/help\nHi\n\nHi\n")
    assert anew == once * 2
    assert twice.startswith(once)
    assert twice != anew
    assert "/new" in lines
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": once.strip()},
        {"role": "user", "content": "Hi"},
    ]
    assert twice[len(once) :].strip("\n") == trireme.sample("model", messages, max_new_tokens=NEW)


@pytest.mark.full
def test_the_oldest_turns_are_left_out_where_the_model_is_full(here, said, monkeypatch):
    """The model has 256 positions."""
    long = "a long line of words to fill it"
    text, lines = talk(said, monkeypatch, f"{long}\n" * 8)
    assert text.count("\n") >= 8
    assert re.search(r"oldest \d+ turns? left out", lines)
    assert "warning" not in lines


@pytest.mark.full
@pytest.mark.parametrize("name", ["alpaca", "alpaca lora"])
def test_a_model_that_learned_alpaca_is_asked_in_its_wording(name, finished, said):
    """Its rows had no chat template; --chat has one now, and so has transformers."""
    out, _ = finished(name)
    wording = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nName the cat\n\n### Response:\n"
    )
    for folder in (out, out / "merged") if "lora" in name else (out,):
        asked = trireme.sample(folder, "Name the cat", max_new_tokens=NEW)
        assert asked == trireme.sample(folder, wording, max_new_tokens=NEW, as_text=True)
    messages = [{"role": "user", "content": "Name the cat"}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).endswith(wording)


# ---------------------------------------------------------------- Python, and the demo


@pytest.mark.full
def test_python_has_the_options_of_the_command_line(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, data = finished("full")
    heard, options = [], dict(data=data, max_steps=2, seq_len=64, batch_size=2, device="cpu", show=False)
    run = trireme.finetune(model=out.parent / "checkpoint", **options, on_step=heard.append)
    assert trireme.finetune(model=run.folder, **options, dry_run=True).losses == []
    assert run.folder == Path("runs/checkpoint")
    assert [step for step, _ in run.losses] == [record["step"] for record in heard] == [1, 2]
    assert str(run.folder) in repr(run)
    assert len(trireme.sample(run.folder, ["the cat", "a"], max_new_tokens=3)) == 2
    plan = trireme.plan(shape="llama-3.2-1b", assume="gpu=rtx4090,ram=64GiB", lora=8)
    assert len(repr(plan).splitlines()) == 5
    assert plan.step_s > 0
    assert "seq_len: tokens per sequence" in trireme.finetune.__doc__
    with pytest.raises(trireme.Error, match="modell") as refused:
        trireme.finetune(modell="x")
    assert "During handling" not in "".join(traceback.format_exception(refused.value))
    with pytest.raises(trireme.Error) as refused:
        trireme.plan(shape="llama-3.3-70b", assume="gpu=rtx4090,ram=16GiB")
    assert refused.value.code == 3
    with pytest.raises(trireme.Error, match="prompt"):
        trireme.sample(run.folder, 7)


@pytest.mark.full
def test_the_demo_ends_in_a_sentence_that_it_was_given(tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    text = said("--demo", "--out", "out")[0]
    before, after = (re.search(rf"^{when} +(.*)$", text, re.M)[1] for when in ("before", "after"))
    assert after in STORIES
    assert after.endswith(".")
    assert before not in STORIES
