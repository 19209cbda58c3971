"""Ways out that lead out: what each message tells to do is done, and then the same command works."""

import json
import shutil
from pathlib import Path

import pytest

from trireme.engine.run import main as finetune

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
GOOD = {"prompt": "a b c", "completion": "d e f"}
FILES = {
    "talk.jsonl": [{"messages": TALK}],
    "qa.jsonl": [{"question": "a", "answer": "b"}],
    "dolly.jsonl": [{"instruction": "a", "context": "b", "response": "c"}],
    "chosen.jsonl": [{"prompt": "a", "chosen": "b", "rejected": "c"}],
    "label.jsonl": [GOOD | {"label": True}],
    "bad.jsonl": [GOOD, {"prompt": 1, "completion": "x"}],
    "rows.jsonl": [GOOD] * 4,
    "long.jsonl": [{"prompt": "a b c", "completion": "d e f " * 60}],
    "lists.jsonl": TALK,
    "wrapped.jsonl": [{"messages": TALK}],
    "folder/train.jsonl": [GOOD],
}
ASSUMED = ["--assume", "gpu=24GiB,ram=64GiB"]

# what is wrong: (its options; what the message tells; the options that do so)
HINTS = {
    "a typing error": (["--learnign-rate", "1e-3"], "--learning-rate (= --lr)", ["--learning-rate", "1e-3"]),
    "a shape": (["--shape", "llama-0.4"], "Did you mean llama-0.4b?", ["--shape", "llama-0.4b", *ASSUMED]),
    "a shape beside a model": (["model", "--shape", "llama-0.4b"], "leave model out",
                               ["--shape", "llama-0.4b", *ASSUMED]),
    "a GPU": (["model", "--assume", "gpu=4091,ram=8GiB"], "Perhaps RTX 4090",
              ["model", "--assume", "gpu=RTX 4090,ram=64GiB"]),
    "a GPU that is none": (["model", "--assume", "gpu=x,ram=8GiB"], "write a size like 24GiB",
                           ["model", "--assume", "gpu=24GiB,ram=64GiB"]),
    "a machine": (["model", "--assume", "rtx4090"], "gpu=rtx4090,ram=128GiB,ssd=2x2TB@7/5",
                  ["model", "--assume", "gpu=rtx4090,ram=128GiB,ssd=2x2TB@7/5"]),
    "more positions than there are": (["--seq-len", "4096"], "the model has 512 positions. Lower it",
                                      ["--seq-len", "512"]),
    "no template": (["--data", "talk.jsonl"], "--chat-template chatml",
                    ["--data", "talk.jsonl", "--chat-template", "chatml"]),
    "no tokenizer": (["bare", "--data", "rows.jsonl"], "Give --tokenizer FOLDER",
                     ["bare", "--data", "rows.jsonl", "--tokenizer", "model"]),
    "other columns": (["--data", "qa.jsonl"], "Perhaps --map prompt=question,completion=answer",
                      ["--data", "qa.jsonl", "--map", "prompt=question,completion=answer"]),
    "columns the wrong way round": (
        ["--data", "qa.jsonl", "--map", "question=prompt,answer=completion"], "--map prompt=question,completion=answer",
        ["--data", "qa.jsonl", "--map", "prompt=question,completion=answer"]),
    "three other columns": (["--data", "dolly.jsonl"], "--map instruction=instruction,input=context,output=response",
                            ["--data", "dolly.jsonl", "--map",
                             "instruction=instruction,input=context,output=response"]),
    "preferences": (["--data", "chosen.jsonl"], "--map completion=chosen,unused=rejected",
                    ["--data", "chosen.jsonl", "--map", "completion=chosen,unused=rejected"]),
    "labels": (["--data", "label.jsonl"], "--map unused=label", ["--data", "label.jsonl", "--map", "unused=label"]),
    "a bad row": (["--data", "bad.jsonl"], "--skip-bad drops and counts them", ["--data", "bad.jsonl", "--skip-bad"]),
    "bare messages": (["--data", "lists.jsonl"], 'A conversation is a row: {"messages": [{"role"',
                      ["--data", "wrapped.jsonl", "--chat-template", "chatml"]),
    "a folder": (["--data", "folder"], "Name files, such as folder/train.jsonl", ["--data", "folder/train.jsonl"]),
    "no weight": (["--data", "rows.jsonl:0"], "Leave the file out", []),
    "hardly a weight": (["--data", "rows.jsonl:0.01"], "Raise it", ["--data", "rows.jsonl:0.5"]),
    "all held out": (["--data", "rows.jsonl", "--val", "0.99"], "Give a smaller share, or a file",
                     ["--data", "rows.jsonl", "--val", "rows.jsonl"]),
    "rows too long": (["--data", "long.jsonl", "--seq-len", "32", "--long", "error"], "or --long cut, drop or split",
                      ["--data", "long.jsonl", "--seq-len", "32", "--long", "split"]),
    "updates before the norm": (["--optimizer-mode", "backward"], "Add --max-grad-norm 0",
                                ["--optimizer-mode", "backward", "--max-grad-norm", "0"]),
    "adapters without a rank": (["--lora-alpha", "4"], "--lora 16", ["--lora-alpha", "4", "--lora", "16"]),
    "a rank by another name": (["--lora_r", "8"], "", ["--lora_r", "8"]),
    "the best of nothing": (["--export", "best"], "Give --val", ["--export", "best", "--val", "0.2"]),
    "patience with nothing": (["--patience", "3"], "Give --val", ["--patience", "3", "--val", "0.2"]),
    "held-out data of none": (["model", "--val", "0.1", "no data"], "leave --val out", ["model", "no data"]),
    "a drive twice": (["--store", "a,a"], "Name one on each drive", ["--store", "a,b"]),
    "an interval": (["--save-every", "often"], "write 500 (steps), 0.1 (of the run), 30min or never",
                    ["--save-every", "30min"]),
    "no such run": (["--resume", "none"], "Begin one there", ["--out", "none"]),
    "the checkpoint itself": (["--tokenizer", "model/tokenizer.json"], "is a file; name its folder",
                              ["--tokenizer", "model"]),
}  # fmt: skip


def completed(argv: list[str]) -> list[str]:
    """With a model, data and a dry run where they are not given."""
    argv = argv if argv[:1] in (["model"], ["bare"]) or "--shape" in argv else ["model", *argv]
    without = "no data" in argv or "--shape" in argv
    argv = [word for word in argv if word != "no data"]
    data = [] if without or "--data" in argv else ["--data", "stories.txt"]
    return [*argv, *data, "--dry-run"]


@pytest.mark.parametrize("name", HINTS)
def test_what_a_message_tells_works(here, capsys, name):
    for file, rows in FILES.items():
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree("model", "bare")
    for path in Path("bare").glob("tokenizer*"):
        path.unlink()
    wrong, tells, right = HINTS[name]
    if tells:
        assert finetune.main(completed(wrong)) == 2
        assert tells in capsys.readouterr().err
    assert finetune.main(completed(right)) == 0, capsys.readouterr().err
