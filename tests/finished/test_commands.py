"""`trireme sample` and `trireme eval` as a shell calls them, with transformers as the oracle."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from chats import CHATML, make_tokenizer, user
from runs import make_small, records, write_rows
from safetensors.torch import load_file, save_file
from tiny import LLAMA, oracle
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trireme.engine.data.codec import Codec
from trireme.engine.run.config.config_file import SIGNED
from trireme.engine.run.finished.options import sample_options
from trireme.engine.run.finished.sampling import Sampling, probabilities
from trireme.engine.run.main import main

pytestmark = pytest.mark.grid

NEW = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A random model whose tokens are bytes, with a chat template."""
    folder = tmp_path_factory.mktemp("made") / "model"
    reference, _ = oracle("llama", LLAMA | dict(vocab_size=260, max_position_embeddings=256, eos_token_id=1))
    reference.save_pretrained(folder)
    make_tokenizer(folder, chat_template=CHATML, tokenizer_class="PreTrainedTokenizerFast")
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(made)
    return tmp_path


def generation(**keys) -> None:
    """A copy of the model with this generation_config.json, as `own`."""
    shutil.copytree("model", "own")
    Path("own/generation_config.json").write_text(json.dumps(keys))


def said(capsys, *argv: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main(list(argv)) == code
    found = capsys.readouterr()
    return found.out, found.err


def theirs(given: str | list, new: int = NEW, ends: tuple[int, ...] = (1,)) -> str:
    """transformers' greedy answer."""
    tokenizer = AutoTokenizer.from_pretrained("model")
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    if isinstance(given, str):
        ids = tokenizer(given, return_tensors="pt").input_ids
    else:
        ids = tokenizer.apply_chat_template(
            given, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
    out = model.generate(
        ids,
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=list(ends),
        pad_token_id=0,
        attention_mask=torch.ones_like(ids),
    )[0, ids.shape[1] :]
    return tokenizer.decode([token for token in out.tolist() if token not in ends])


def test_a_text_is_continued(here, capsys):
    out, err = said(capsys, "sample", "model", "--prompt", "Once upon", "--as-text", "--max-new-tokens", str(NEW))
    assert out == theirs("Once upon") + "\n"
    assert re.match(
        r"model    model, [\d,]+ parameters, .* in f32 on the CPU\nsampling the most likely token each time\n", err
    )


@pytest.mark.parametrize("system", [[], ["--system", "Be brief."]])
def test_a_message_is_answered(here, capsys, system):
    out, _ = said(capsys, "sample", "model", "--prompt", "Why?", "--max-new-tokens", str(NEW), *system)
    first = [{"role": "system", "content": system[1]}] if system else []
    assert out == theirs([*first, user("Why?")]) + "\n"


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])  # one has the mark of an encoding
def test_a_file_of_prompts(here, capsys, name):
    rows = [
        "Once",
        {"prompt": "And then?"},
        {"messages": [user("a"), {"role": "assistant", "content": "b"}, user("c")]},
    ]
    text = (
        "Once\n\nAnd then?\n"
        if name == "p.txt"
        else "".join(json.dumps(r) + "\n" for r in [{"prompt": "Once"}, *rows[1:]])
    )
    Path(name).write_text(text, "utf-8-sig" if name == "p.txt" else "utf-8")
    out, _ = said(capsys, "sample", "model", "--prompts", name, "--max-new-tokens", str(NEW))
    found = [json.loads(line) for line in out.splitlines()]
    asked = [[user("Once")], [user("And then?")], rows[2]["messages"]][: len(found)]
    assert len(found) == (2 if name == "p.txt" else 3)
    assert [row["messages"] for row in found] == asked
    assert [row["text"] for row in found] == [theirs(each) for each in asked]
    assert all(row["tokens"] == NEW and not row["ended"] for row in found)


def test_a_long_prompt_does_not_shorten_the_other_answers(here, capsys):
    prompts = ["Once", "a" * 251]  # of 256 positions, with the begin token
    Path("p.txt").write_text("\n".join(prompts))
    out, _ = said(capsys, "sample", "model", "--prompts", "p.txt", "--as-text", "--max-new-tokens", str(NEW))
    found = [json.loads(line) for line in out.splitlines()]
    assert [row["tokens"] for row in found] == [NEW, 4]
    assert [row["text"] for row in found] == [theirs(prompts[0]), theirs(prompts[1], 4)]


def test_a_conversation(here, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nWhy?\n/new\nWhy?\n"))
    out, err = said(capsys, "sample", "model", "--chat", "--max-new-tokens", str(NEW))
    first = theirs([user("Hi")])
    second = theirs([user("Hi"), {"role": "assistant", "content": first}, user("Why?")])
    assert out == f"{first}\n{second}\n{theirs([user('Why?')])}\n"
    assert second != theirs([user("Why?")])
    assert "/new begins another" in err


def test_a_conversation_that_is_not_utf_8_is_one_line(here, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"))
    _, err = said(capsys, "sample", "model", "--chat", code=2)
    assert "error: standard input is not UTF-8" in err


@pytest.mark.full
def test_underscores_are_hyphens_in_names_of_options_only():
    words = ["a_b", "--prompt=c_d=e_f", "--max_new_tokens=3", "--chat_template", "g_h"]
    given = sample_options(words)
    assert (given.folder, given.prompt, given.max_new_tokens) == ("a_b", "c_d=e_f", 3)
    assert given.chat_template == "g_h"


def test_drawn_text_repeats_with_the_seed(here, capsys):
    draw = lambda seed: said(capsys, "sample", "model", "--prompt", "a", "--temperature", "1", "--seed", seed)[0]
    assert draw("1") == draw("1") != draw("2")


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.7, 0.01])
def test_what_is_drawn_from_is_transformers(top_k, top_p):
    logits = torch.randn((3, 40), generator=torch.Generator().manual_seed(1)) * 3
    scores = TemperatureLogitsWarper(0.6)(None, logits)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    assert torch.allclose(probabilities(Sampling(0.6, top_k, top_p), logits), scores.softmax(-1))


def test_the_smallest_temperature_draws_the_likeliest():
    logits = torch.randn((3, 40), generator=torch.Generator().manual_seed(1))
    assert torch.equal(probabilities(Sampling(1e-320), logits).argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("command", ["eval", "sample", "score"])
@pytest.mark.parametrize("kind", ["tied", "twice", "codes", "mlx"])
def test_weights_that_cannot_be_told_are_refused(here, capsys, command, kind):
    """Copies of a matrix that differ: transformers takes the head's. Numbers that only a quantization explains."""
    shutil.copytree("model", "own")
    state = load_file("own/model.safetensors")
    name, short = "model.layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"
    config = json.loads(Path("own/config.json").read_text())
    config |= {"tie_word_embeddings": True} if kind == "tied" else {}
    config |= {"quantization": {"group_size": 64, "bits": 4}} if kind == "mlx" else {}
    state |= {short: state[name] + 1} if kind == "twice" else {}
    state |= {name: state[name].to(torch.int8)} if kind == "codes" else {}
    save_file(state, "own/model.safetensors", {"format": "pt"})
    Path("own/config.json").write_text(json.dumps(config))
    Path("rows.jsonl").write_text('{"text": "Once upon a time."}')
    words = {
        "tied": "lm_head.weight and model.embed_tokens.weight are tied by config.json but differ in the files of own",
        "twice": f"{short} and {name} are two names of one tensor but differ in the files of own. Remove one",
        "codes": f"own/model.safetensors: {name} is I8; a weight must be F64, F32, F16, BF16. Take the BF16 original",
        "mlx": 'own/config.json: "quantization" says that the weights are quantized by MLX',
    }
    given = ["--prompt", "Once"] if command == "sample" else ["--data", "rows.jsonl"]
    given += ["--out", "out"] if command == "score" else []
    _, err = said(capsys, command, "own", *given, code=2)
    assert f"error: {words[kind]}" in err.splitlines()[-1]


def test_generation_config_is_followed(here, capsys):
    greedy = theirs("Once")
    generation(
        do_sample=True, temperature=0.5, top_p=0.9, top_k=None, repetition_penalty=1.1, eos_token_id=[1, 7], num_beams=1
    )
    _, err = said(capsys, "sample", "own", "--prompt", "Once", "--as-text")
    assert "warning: own/generation_config.json: not used: repetition_penalty 1.1\n" in err
    assert "sampling temperature 0.5, top-k 50, top-p 0.9, seed 42\n" in err  # null is the default of transformers 5
    out, _ = said(
        capsys, "sample", "own", "--prompt", "Once", "--as-text", "--temperature", "0", "--max-new-tokens", str(NEW)
    )
    assert out == greedy + "\n"


def test_an_end_token_of_generation_config_ends(here, capsys):
    tokenizer = AutoTokenizer.from_pretrained("model")
    end = tokenizer("A").input_ids[-1]
    generation(eos_token_id=[1, end])
    out, _ = said(capsys, "sample", "own", "--prompt", "Once", "--as-text", "--max-new-tokens", str(NEW))
    assert out == theirs("Once", ends=(1, end)) + "\n"
    assert "A" in theirs("Once")
    assert "A" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no prompt given. Use --prompt TEXT, --chat or --prompts FILE."),
        (["--prompt", "a", "--chat"], "--prompt and --chat: only one at a time."),
        (["--prompt", "a", "--top-p", "0.5"], "--top-p is for sampling, and decoding is greedy."),
        (["--prompt", "a", "--temperature", "-1"], "--temperature: '-1' is not a number"),
        (["--prompt", "a", "--beams", "3"], "unknown option --beams. See trireme sample --help."),
        (["--prompt", "a" * 300], "tokens: the model has 256 positions. Shorten it."),
        (["--prompt", "a" * 300, "--ram", "1MiB"], "tokens: the model has 256 positions. Shorten it."),
        (["--prompts", "."], "error: --prompts .: Is a directory. Name a file of prompts."),
        (["--prompts", "gone.txt"], "--prompts gone.txt: "),
        (["--prompts", "rows.csv"], "--prompts rows.csv: expected .jsonl, or text with a prompt a line. Convert it."),
        (["--prompts", "rows.jsonl.gz"], "--prompts rows.jsonl.gz: expected .jsonl, or text"),
        (
            ["--prompts", "other.jsonl"],
            "other.jsonl line 1: expected 'prompt', a string, or 'messages', not empty; its keys are 'text'.",
        ),
        (["--prompt", "a", "--as-text", "--system", "b"], "--system: texts are continued as they are"),
        (["--prompt", "a", "--as-text", "--chat-template-kwargs", "{}"], "--chat-template-kwargs: texts are continued"),
        (
            ["--prompt", "a", "--chat-template-kwargs", "[1]"],
            "--chat-template-kwargs: '[1]' is not a JSON object",
        ),
        (
            ["--prompt", "a", "--chat-template-kwargs", '{"a-b": 1}'],
            "sets 'a-b', which is not a variable name; leave",
        ),
        (["--prompt", "a", "--model", "x"], "--model x: model is not an adapter. Leave --model out."),
    ],
)
def test_what_is_wrong_is_one_line(here, capsys, argv, message):
    write_rows(Path("other.jsonl"), [{"text": "a"}])
    _, err = said(capsys, "sample", "model", *argv, code=2)
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in line


# ---------------------------------------------------------------- of runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run of all weights into `out`, and one of an adapter into `adapter`."""
    folder = make_small(tmp_path_factory.mktemp("runs"), "model")
    (folder / "held.txt").write_text(
        "\n<|endoftext|>\n".join(["The sea was calm.", "Once there was a rower named Timo."])
    )
    train = [str(folder / "model"), "--data", str(folder / "stories.txt"), "--val", str(folder / "held.txt")]
    train += ["--seq-len", "64", "--max-steps", "4", "--batch-size", "4", "--lr", "4e-3"]
    assert main([*train, "--export-every", "2", "--out", str(folder / "out")]) == 0
    assert main([*train, "--lora", "2", "--chat-template", "chatml", "--out", str(folder / "adapter")]) == 0
    return folder


@pytest.mark.parametrize("run", ["out", "adapter"])
def test_eval_finds_the_loss_that_the_run_found(runs, capsys, run):
    loss, accuracy = [(r["eval_loss"], r["eval_accuracy"]) for r in records(runs / run, "eval_loss")][-1]
    out, _ = said(capsys, "eval", str(runs / run), "--data", str(runs / "held.txt"), "--seq-len", "64")
    assert f"held.txt: loss {loss:.4f}, perplexity {torch.tensor(loss).exp():.4g}, accuracy {accuracy:.4f}, on " in out
    assert re.search(r"on \d+ trained tokens of \d+, 1 sequence\n", out)


def test_eval_reads_data_with_the_system_message_of_a_run(here, capsys):
    """Where it is given; else a line says that the run had one."""
    Path("moody.jinja").write_text("{{ mood or '' }}" + CHATML)
    write_rows(Path("chat.jsonl"), [{"messages": [user("a"), {"role": "assistant", "content": "b"}]}])
    shutil.copytree("model", "own")
    Path("own/config.yaml").write_text(f"{SIGNED}\nsystem: S\n")
    given = ("eval", "own", "--data", "chat.jsonl", "--chat-template", "moody.jinja")
    tokens = lambda *more: int(re.search(r"on 2 trained tokens of (\d+)", said(capsys, *given, *more)[0])[1])
    assert tokens("--system", "S") == tokens() + len("system\nS\n") + 2
    assert tokens("--chat-template-kwargs", '{"mood": "xy"}') == tokens() + 2
    assert "the run had --system, and data is read without it here" in said(capsys, *given)[1]


def test_variables_of_the_template_are_given_to_it(here, capsys, monkeypatch):
    """A row's own come first. Those that it does not read are named, and those that the run had and are not given."""
    Path("moody.jinja").write_text("{{ mood or '' }}" + CHATML)
    shutil.copytree("model", "own")
    Path("own/config.yaml").write_text(f"{SIGNED}\nchat_template_kwargs: '{{}}'\nsystem: S\n")
    answered = [user("a"), {"role": "assistant", "content": "b"}]
    rows = [{"prompt": "a"}, {"prompt": "a", "chat_template_kwargs": {"mood": "z"}}, {"messages": answered}]
    write_rows(Path("p.jsonl"), rows)
    asked = []
    prompt = Codec.prompt
    monkeypatch.setattr(Codec, "prompt", lambda self, *a: asked.append(prompt(self, *a)) or asked[-1])
    more = ("--chat-template", "moody.jinja", "--chat-template-kwargs", '{"mood": "xy", "tone": 1}')
    _, err = said(capsys, "sample", "own", "--prompts", "p.jsonl", *more, "--max-new-tokens", "1")
    assert len(asked[0]) == len(asked[1]) + 1
    assert asked[0][2:] == asked[1][1:]
    assert "warning: the chat template does not read chat_template_kwargs.tone\n" in err
    assert "warning: the run had --system, and the prompt is formatted without it here\n" in err
    assert "the run had --chat" not in err
    assert "warning: 1 prompt of 3 with an answer at the end: another comes after it\n" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    said(capsys, "sample", "own", "--chat", *more, "--max-new-tokens", "1")
    assert asked[3] == asked[0]


def test_eval_names_options_that_it_does_not_read_once(runs, tmp_path, capsys):
    shutil.copytree(runs / "adapter", tmp_path / "theirs")
    (tmp_path / "theirs/config.yaml").write_text("tokenizer: /t\n")
    given = ("--data", str(runs / "held.txt"), "--seq-len", "64")
    assert said(capsys, "eval", str(tmp_path / "theirs"), *given)[1].count("is not of a run of this program") == 1


def test_eval_of_several_files_has_a_line_of_each(runs, capsys):
    data = ["--data", str(runs / "held.txt"), "--data", str(runs / "stories.txt")]
    lines = said(capsys, "eval", str(runs / "out"), *data)[0].splitlines()
    assert [line.split(": loss")[0].rpartition("/")[2] for line in lines] == [
        "held.txt",
        "stories.txt",
        "eval     all 2 files",
    ]


@pytest.mark.parametrize("folder", ["out", "out/step-2", "adapter"])
def test_a_runs_folders_speak(runs, capsys, folder):
    out, err = said(capsys, "sample", str(runs / folder), "--prompt", "Once", "--as-text", "--max-new-tokens", "4")
    assert out.strip()
    assert ("with its adapter of rank 2" in err) == (folder == "adapter")


def test_an_adapter_has_the_template_of_its_run(runs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    assert said(capsys, "sample", str(runs / "adapter"), "--chat", "--max-new-tokens", "4")[0].endswith("\n")
    _, err = said(capsys, "sample", str(runs / "out"), "--chat", code=2)
    assert "has no chat template. Add --chat-template plain, or use --prompt." in err


def test_a_prompt_without_tokens_is_one_line(tmp_path, capsys):
    """Nothing begins a text by itself with this tokenizer."""
    model = make_small(tmp_path) / "checkpoint"
    _, err = said(capsys, "sample", str(model), "--prompt", "", code=2)
    assert "error: a prompt without tokens: there is nothing to continue. Write some text." in err


def test_eval_without_data(runs, capsys):
    assert "no data given. Name it: --data FILE" in said(capsys, "eval", str(runs / "out"), code=2)[1]
    _, err = said(capsys, "eval", str(runs / "out"), "--data", str(runs / "held.txt"), "--seq-len", "9999", code=2)
    assert "--seq-len 9999: the model has 512 positions" in err


def test_rows_of_prompts_are_read_as_in_training(here, capsys):
    """System, tools, variables and parts reach the template; what is not read is named, or refused by its line."""
    rows = [
        {"messages": [user("a")], "system": "S"},
        {"prompt": [user("a")]},
        {"prompt": "a", "id": 7},
        {"messages": [{"role": "human", "content": [{"type": "text", "text": "a"}]}]},
    ]
    ask = ("sample", "model", "--prompts", "p.jsonl", "--max-new-tokens", "4")
    write_rows(Path("p.jsonl"), rows)
    out, err = said(capsys, *ask)
    found = [json.loads(line) for line in out.splitlines()]
    system = {"role": "system", "content": "S"}
    asked = [[system, user("a")], [user("a")], [user("a")], [user("a")]]
    assert [row["text"] for row in found] == [theirs(each, 4) for each in asked]
    assert found[0]["messages"] == asked[0]
    assert "prompts  not used: id" in err
    write_rows(Path("p.jsonl"), rows[1:2])
    out, _ = said(capsys, *ask, "--system", "S")
    assert json.loads(out)["messages"] == asked[0]


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        ({"messages": [user([{"type": "image"}])]}, [], "p.jsonl line 1: messages[0] holds a part of type 'image'"),
        ({"prompt": "a", "messages": [user("a")]}, [], "p.jsonl line 1: 'prompt' and 'messages' are both there."),
        ({"prompt": "a", "tools": [{"name": "f"}]}, [], "p.jsonl line 1: the chat template does not write the tool"),
        ({"messages": [user("a")]}, ["--as-text"], "p.jsonl line 1: messages need a chat template. Give"),
        ({"prompt": "a", "system": "S"}, ["--as-text"], "p.jsonl line 1: 'system' is for a chat template"),
        ({"prompt": 5}, [], "p.jsonl line 1: expected 'prompt'"),
    ],
)
def test_a_row_that_cannot_be_asked_is_one_line(here, capsys, row, more, message):
    write_rows(Path("p.jsonl"), [row])
    assert message in said(capsys, "sample", "model", "--prompts", "p.jsonl", *more, code=2)[1]


@pytest.mark.full
@pytest.mark.parametrize("data", ["held.txt", "classes.jsonl"])
def test_merge_writes_what_a_run_with_merge_writes(runs, tmp_path, capsys, data):
    """Its --rope-factor, chat template and names of classes too."""
    write_rows(runs / "classes.jsonl", [{"text": f"Once {i}", "label": ["good", "bad"][i % 2]} for i in range(4)])
    words = [str(runs / "model"), "--data", str(runs / data), "--lora", "2", "--merge", "--seq-len", "64"]
    words += ["--max-steps", "1", "--batch-size", "2", "--rope-factor", "2", "--chat-template", "chatml"]
    words += ["--method", "classify"] if data == "classes.jsonl" else []
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    said(capsys, "merge", str(tmp_path / "out"), "--out", str(tmp_path / "merged"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "merged").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "out" / "merged").iterdir()}
    assert "chat_template.jinja" in files


def test_an_adapter_of_a_quantized_base_is_said_to_differ(runs, tmp_path, capsys):
    """Its base is read as the checkpoint has it."""
    shutil.copytree(runs / "adapter", tmp_path / "adapter")
    with (tmp_path / "adapter" / "config.yaml").open("a") as file:
        file.write("base: nf4\n")
    says = "warning: the run quantized the checkpoint (--base nf4); here it is read as it is"
    data = ["--data", str(runs / "held.txt"), "--seq-len", "64"]
    assert says in said(capsys, "eval", str(tmp_path / "adapter"), *data)[1]
    assert says not in said(capsys, "eval", str(runs / "adapter"), *data)[1]
