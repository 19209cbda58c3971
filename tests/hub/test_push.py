"""Uploads of a run's output: the real client against a server of this machine."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hub_server import TOKEN, Repo

from trireme.engine.run import main as finetune
from trireme.engine.run import train
from trireme.engine.run.hub import push
from trireme.engine.run.screen import Screen
from trireme.models.config import InputError

REST = ("--out", "out", "--seq-len", "64", "--max-steps", "2", "--batch-size", "2", "--val", "0.1")
RUN = ("some/model", "--data", "some/stories", *REST, "--push", "me/tuned")


@pytest.fixture
def known(hub, monkeypatch):
    """The hub, to a user who has logged in."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def refused(capsys, *argv: str) -> str:
    assert finetune.main(list(argv)) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: ")
    return err


def card(repo: Repo) -> tuple[dict, str]:
    _, head, body = repo.files["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(head), body


@pytest.mark.full
def test_a_run_uploads_its_output_and_a_card(known, local, capsys):
    """All that transformers needs; nothing that names this machine."""
    argv = ["some/model", "--data", "stories.txt", *REST, "--lr", "1e-4", "--push", "me/tuned"]
    assert finetune.main(argv) == 0
    repo = known.repos["models/me/tuned"]
    assert repo.private
    assert repo.files["model.safetensors"] == Path("out/model.safetensors").read_bytes()
    assert {"config.json", "tokenizer.json", "loss.svg", "README.md"} <= repo.files.keys()
    assert not {"config.yaml", "log.jsonl", "log.csv"} & repo.files.keys()
    head, body = card(repo)
    assert head == {"base_model": "some/model", "library_name": "transformers", "pipeline_tag": "text-generation",
                    "tags": ["trireme"]}  # fmt: skip
    assert "- `stories.txt`\n- held out: 0.1 of the rows" in body
    assert "--lr 0.0001\n" in body
    log = Path("out/log.jsonl").read_text().splitlines()
    losses = [json.loads(line)["eval_loss"] for line in log if "eval_loss" in line]
    assert f"| held-out loss | {losses[0]:.4f} | {losses[-1]:.4f} |" in body
    assert not [name for name, content in repo.files.items() if str(Path.cwd()).encode() in content]
    assert f"uploaded {known.url}/me/tuned" in capsys.readouterr().out


@pytest.mark.full
def test_an_adapter_is_uploaded_with_its_base_and_opens_from_there(known, capsys):
    """As a model of the hub that names its base there; a second upload of another run is refused."""
    assert finetune.main([*RUN, "--lora", "2"]) == 0
    repo = known.repos["models/me/tuned"]
    assert json.loads(repo.files["adapter_config.json"])["base_model_name_or_path"] == "some/model"
    head, body = card(repo)
    assert (head["base_model"], head["library_name"], head["datasets"]) == ("some/model", "peft", ["some/stories"])
    assert re.search(r"- `hf://datasets/some/stories@[0-9a-f]{40}/train.txt`\n", body)
    assert "there is a model of that name on the hub already" in refused(capsys, "push", "out", "me/tuned")
    assert "is an adapter" in refused(capsys, "sample", "me/tuned", "--prompt", "x")


@pytest.mark.full
def test_an_upload_that_fails_leaves_a_finished_run(known, monkeypatch, capsys):
    """And the line says how it is uploaded later."""
    known.writable = False
    err = refused(capsys, *RUN)
    assert "me/tuned: not uploaded: the hub answered 403, Forbidden: this token may not write" in err
    assert err.endswith("The run is done; to upload it: trireme push out me/tuned")
    assert Path("out/model.safetensors").exists()
    known.writable = True
    assert finetune.main(["push", "out", "me/tuned"]) == 0
    assert "model.safetensors" in known.repos["models/me/tuned"].files


@pytest.mark.full
def test_an_upload_that_is_interrupted_leaves_a_finished_run(known, monkeypatch, capsys):
    """Also where the process was killed before it, the resumed run says how it is uploaded."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "push", interrupted)
    assert finetune.main(list(RUN)) == 130
    line = "interrupted. The run is done; to upload it: trireme push out me/tuned"
    assert capsys.readouterr().err.splitlines()[-1] == line
    assert refused(capsys, "--resume", "out").endswith("and another --out. To upload it: trireme push out me/tuned.")


EARLY = {
    "no token": (
        RUN,
        "me/tuned: not uploaded: no token was found: log in (hf auth login), or set HF_TOKEN",
    ),
    "no owner": ((*RUN[:-1], "tuned"), "--push tuned: expected OWNER/NAME"),
    "a local base": (("model", *RUN[1:], "--lora", "2"), "adapters name their base, and model is a folder of this"),
}


@pytest.mark.parametrize(("argv", "says"), EARLY.values(), ids=EARLY)
def test_what_cannot_be_uploaded_is_refused_before_training(hub, local, capsys, argv, says):
    assert says in refused(capsys, *argv)
    assert not Path("out").exists()


def test_a_wrong_token(hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    err = refused(capsys, *RUN)
    assert "the hub answered 401" in err
    assert "If it is the token: log in (hf auth login)" in err


def test_a_name_that_is_taken(known, capsys):
    assert "there is a model of that name on the hub already" in refused(capsys, *RUN[:-1], "some/model")
    assert not Path("out").exists()


def test_a_folder_that_is_no_model(known, capsys):
    Path("empty").mkdir()
    assert "empty holds no model to upload" in refused(capsys, "push", "empty", "me/tuned")
    assert "no folder or no name is given" in refused(capsys, "push", "empty")


def test_paths_of_this_machine_are_left_out(known, local):
    """Of config.json the folder that it was read from; an adapter of a local base is refused."""
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"_name_or_path": "/home/me/model"}))
    push.push(Path("model"), "me/tuned", Screen())
    assert json.loads(known.repos["models/me/tuned"].files["config.json"]) == {
        key: value for key, value in config.items() if key != "_name_or_path"
    }
    Path("model/adapter_config.json").write_text('{"base_model_name_or_path": "/home/me/model"}')
    with pytest.raises(InputError, match="is '/home/me/model', a folder of this machine"):
        push.push(Path("model"), "me/other", Screen())
    Path("model/adapter_config.json").unlink()
    Path("model/config.json").write_text("{")
    with pytest.raises(InputError, match=r"model/config.json: the file is not valid JSON .* Restore it"):
        push.push(Path("model"), "me/other", Screen())
