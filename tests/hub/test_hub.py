"""Names on the hub, downloads and uploads: the real client against a server of this machine."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hub_server import TOKEN, Repo

from trireme.engine.run import cli
from trireme.engine.run.after import hub as names
from trireme.models.config import InputError

REST = ("--out", "out", "--seq-len", "64", "--max-steps", "2", "--batch-size", "2")
RUN = ("some/model", "--data", "some/stories", *REST)
HF = "hf://datasets/"


def refused(capsys, *argv):
    assert cli.main(list(argv)) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: ")
    return err


@pytest.mark.full
def test_a_run_downloads_what_is_read_trains_and_repeats_without_the_hub(hub, capsys, monkeypatch):
    """No code and no pickle comes; a second run of one commit asks for nothing."""
    assert cli.main(list(RUN)) == 0
    assert {"model.safetensors", "config.json", "tokenizer.json", "train.txt"} <= {*hub.downloads()}
    assert not {"pytorch_model.bin", "model.onnx", "load.py"} & {*hub.downloads()}
    config = yaml.safe_load(Path("out/config.yaml").read_text())
    assert re.fullmatch(r"some/model@[0-9a-f]{40}", config["model"])
    assert re.fullmatch(rf"{HF}some/stories@[0-9a-f]{{40}}/train.txt", config["data"][0])
    hub.asked.clear()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert cli.main(["--config", "out/config.yaml", "--out", "again"]) == 0
    assert not hub.asked
    assert Path("out/model.safetensors").read_bytes() == Path("again/model.safetensors").read_bytes()


@pytest.mark.full
def test_a_dry_run_downloads_no_weights(hub):
    assert cli.main(["some/model", "--dry-run", "--data", "some/stories", "--out", "out"]) == 0
    assert "model.safetensors" not in hub.downloads()


NOT = {
    "another name": (("some/other", *RUN[1:]), "some/other"),
    "another set": (("some/model", "--data", "some/other", *REST), "some/other"),
    "another revision": (("some/model@v9", *RUN[1:]), "v9"),
    "a file that is not there": (("some/model", "--data", f"{HF}some/stories/x.csv", *REST), "train.txt"),
    "an adapter": (("some/adapter", *RUN[1:]), "--adapter"),
    "pickles": (("some/pickles", *RUN[1:]), "safetensors"),
    "GGUF": (("some/gguf", *RUN[1:]), "config.json"),
    "terms": (("some/gated", *RUN[1:]), "some/gated"),
    "local data first": (("some/model", "--data", "nope.jsonl", *REST), "nope.jsonl"),
}


@pytest.mark.parametrize("case", NOT)
def test_what_is_not_there_is_one_line(hub, capsys, case):
    files = hub.repos["models/some/model"].files
    hub.repos["models/some/adapter"] = Repo({"adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    hub.repos["models/some/pickles"] = Repo({"config.json": files["config.json"], "pytorch_model.bin": b""})
    hub.repos["models/some/gguf"] = Repo({"model.gguf": b""})
    hub.repos["models/some/gated"] = Repo(files, gated=True)
    argv, culprit = NOT[case]
    assert culprit in refused(capsys, *argv)
    assert "model.safetensors" not in hub.downloads()
    assert not Path("out").exists()


def test_a_hub_that_cannot_be_reached_is_one_line(hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9" in refused(capsys, *RUN)


SETS = {
    "splits": (
        [f"data/{part}.parquet" for part in ("train-00000-of-00002", "train-00001-of-00002", "test-0")], "", [0, 1]),
    "validation": (["train.jsonl", "validation.jsonl"], "", [0]),
    "one of several by a pattern": (["a/train.parquet", "b/train.parquet"], "b/*", [1]),
    "one of several by its folder": (["a/train.parquet", "b/train.parquet"], "b", [1]),
    "a split by name": (["data/train.csv", "data/test.csv"], "data/test.csv", [1]),
    "tables before texts": (["rows.jsonl", "notes.txt", "dataset_infos.json"], "", [0]),
    "configurations": (
        ["main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"], "", "main/train"),
    "scripts": (["load.py"], "", "load.py"),
    "tests alone": (["test.csv"], "", "test.csv"),
}  # fmt: skip


@pytest.mark.parametrize("case", SETS)
def test_files_of_a_data_set_are_chosen_or_named(case):
    """Those to train on; where it is not clear which, the message names some."""
    files, file, wanted = SETS[case]
    if isinstance(wanted, list):
        assert names.chosen_files(names.Name("a/b", file=file), files) == [files[k] for k in wanted]
        return
    with pytest.raises(InputError, match=wanted):
        names.chosen_files(names.Name("a/b", file=file), files)


def test_a_name_is_written_as_it_was_read_and_a_path_stays_a_path(tmp_path, monkeypatch):
    """A path stays a path; weights, revisions and files are read and written the same way."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for text in ("here/model", "./model", "../model"):
        assert names.name_of(text) is None
    assert names.name_of("rows/a.jsonl", of_data=True) is names.name_of("here/a", of_data=True) is None
    for text in ("a/b", "a/b@main", f"{HF}a/b@v1/data/x-*.parquet"):
        assert str(names.name_of(text, of_data=True)) == text
    commit, root = "0" * 40, names.cache()
    file = root / f"datasets--a--b/snapshots/{commit}/data/x.csv"
    assert names.as_saved(f"{file}:0.5") == f"{HF}a/b@{commit}/data/x.csv:0.5"
    assert names.as_saved(f"{root}/models--a--b/snapshots/{commit}") == f"a/b@{commit}"


# ---------------------------------------------------------------- uploads


@pytest.mark.full
def test_an_output_is_uploaded_with_a_card_and_without_paths_of_this_machine(hub, local, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    config = json.loads(Path("model/config.json").read_text()) | {"_name_or_path": "/home/me/model"}
    Path("model/config.json").write_text(json.dumps(config))
    assert cli.main(["model", "--data", "stories.txt", "--val", "0.1", *REST, "--lr", "1e-4"]) == 0
    hub.writable = False
    assert "me/tuned" in refused(capsys, "push", "out", "me/tuned")
    hub.writable = True
    assert cli.main(["push", "out", "me/tuned"]) == 0
    repo = hub.repos["models/me/tuned"]
    assert repo.private
    assert repo.files["model.safetensors"] == Path("out/model.safetensors").read_bytes()
    assert {"config.json", "tokenizer.json", "README.md"} <= repo.files.keys()
    assert not {"config.yaml", "log.jsonl", "report.html"} & repo.files.keys()
    _, head, body = repo.files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(head) == {"library_name": "transformers", "tags": ["trireme"]}
    assert "me/tuned" in body
    here = (str(Path.cwd()).encode(), b"/home/me")
    assert not [n for n, content in repo.files.items() if any(p in content for p in here)]
    assert "there is a model of that name" in refused(capsys, "push", "out", "me/tuned")


@pytest.mark.full
def test_an_adapter_names_its_base_on_the_hub(hub, local, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert cli.main([*RUN, "--lora", "2"]) == 0
    assert cli.main(["push", "out", "me/adapter"]) == 0
    repo = hub.repos["models/me/adapter"]
    assert json.loads(repo.files["adapter_config.json"])["base_model_name_or_path"] == "some/model"
    head = yaml.safe_load(repo.files["README.md"].decode().split("---\n", 2)[1])
    assert (head["base_model"], head["library_name"]) == ("some/model", "peft")
    assert cli.main(["model", "--data", "stories.txt", *REST[:1], "out2", *REST[2:], "--lora", "2"]) == 0
    assert "model is a folder of this machine" in refused(capsys, "push", "out2", "me/b")
    assert "there is a model of that name" in refused(capsys, "push", "out", "me/adapter")
    monkeypatch.delenv("HF_TOKEN")
    assert "HF_TOKEN" in refused(capsys, "push", "out", "me/tuned")
