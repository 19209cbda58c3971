"""Models and data sets named on the hub: the real client against a server of this machine."""

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
import yaml
from hub_server import TOKEN, Repo
from runs import stopped

from trireme.engine.run import main as finetune
from trireme.engine.run.hub import fetch, names
from trireme.engine.run.hub.names import Named
from trireme.models.config import InputError

REST = ("--out", "out", "--seq-len", "64", "--max-steps", "2", "--batch-size", "2")
RUN = ("some/model", "--data", "some/stories", *REST)


def refused(capsys, *argv: str) -> str:
    assert finetune.main(list(argv)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert not Path("out").exists()
    return err


@pytest.mark.full
def test_a_run_by_names_is_the_run_of_the_files(hub, local, capsys):
    """Same weights; config.yaml has the commits; only files that are read came; nothing is asked for again."""
    assert finetune.main(list(RUN)) == 0
    said = capsys.readouterr().out
    model, data = hub.repos["models/some/model"].sha, hub.repos["datasets/some/stories"].sha
    assert f"download some/model@{model}: " in said
    kept = yaml.safe_load(Path("out/config.yaml").read_text())
    assert kept["model"] == f"some/model@{model}"
    assert kept["data"] == [f"hf://datasets/some/stories@{data}/train.txt"]
    assert not {"README.md", "pytorch_model.bin", "model.py", "load.py", "model.onnx"} & set(hub.downloads())
    assert finetune.main(["model", "--data", "stories.txt", *REST[:1], "plain", *REST[2:]]) == 0
    assert Path("out/model.safetensors").read_bytes() == Path("plain/model.safetensors").read_bytes()
    hub.asked.clear()
    assert finetune.main(["--config", "out/config.yaml", "--out", "again"]) == 0
    assert not hub.asked
    assert Path("out/model.safetensors").read_bytes() == Path("again/model.safetensors").read_bytes()


@pytest.mark.full
def test_a_resumed_run_keeps_its_commits(hub, monkeypatch):
    """The newest commits are others by then, and the cache is empty: the run's own are downloaded again."""
    first = hub.repos["models/some/model"].sha
    stopped(finetune.parse(RUN), 1, monkeypatch)
    hub.repos["models/some/model"].files["config.json"] = b"{}"
    hub.repos["datasets/some/stories"].files["train.txt"] = b"other"
    monkeypatch.setenv("HF_HUB_CACHE", str(Path("another").absolute()))
    assert finetune.main(["--resume", "out"]) == 0
    assert yaml.safe_load(Path("out/config.yaml").read_text())["model"] == f"some/model@{first}"


@pytest.mark.full
def test_an_adapter_names_its_base_and_commit(hub, capsys):
    """No local path; sample, merge and a further run find the base by it."""
    assert finetune.main([*RUN, "--lora", "2"]) == 0
    config = json.loads(Path("out/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "some/model"
    assert config["revision"] == hub.repos["models/some/model"].sha
    assert "from_pretrained('some/model')" in capsys.readouterr().out
    assert finetune.main(["sample", "out", "--prompt", "One day", "--max-new-tokens", "2"]) == 0
    assert finetune.main(["merge", "out", "--out", "merged"]) == 0
    assert Path("merged/model.safetensors").exists()


@pytest.mark.full
def test_a_download_that_breaks_off_is_continued(hub, monkeypatch):
    """From where it was; the file is then what the server has."""
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1024)  # what is kept of it, in steps
    hub.break_after["model.safetensors"] = 4096
    found = fetch.folder_of("some/model", finetune.Screen())
    own = hub.repos["models/some/model"].files["model.safetensors"]
    assert Path(found, "model.safetensors").read_bytes() == own
    asked = [range for method, path, range in hub.asked if method == "GET" and path.endswith("/model.safetensors")]
    assert asked == ["", "bytes=4096-"]


@pytest.mark.full
def test_a_dry_run_takes_no_weights(hub, capsys):
    assert finetune.main(["some/model", "--dry-run"]) == 0
    assert "config.json" in hub.downloads()
    assert not [file for file in hub.downloads() if file.endswith(".safetensors")]
    assert finetune.main([*RUN]) == 0  # and they come when they are needed
    assert [file for file in hub.downloads() if file.endswith(".safetensors")]


@pytest.mark.full
def test_private_and_gated(hub, monkeypatch, capsys):
    hub.repos["models/some/model"].private = True
    assert "if it is private, log in (hf auth login), or set HF_TOKEN" in refused(capsys, *RUN)
    hub.repos["models/some/model"] = Repo(hub.repos["models/some/model"].files, gated=True)
    err = refused(capsys, *RUN)
    assert f"access is restricted. Accept the terms at {hub.url}/some/model, then log in" in err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert finetune.main(list(RUN)) == 0


NOT = {
    "a model that is not there": (
        ["some/other"],
        "some/other is not a folder here, and no model some/other was found on the hub",
    ),
    "a revision that is not there": (["some/model@v9"], "some/model has no revision 'v9'. See"),
    "data that is not there": (
        ["some/model", "--data", "some/other"],
        "and no data set some/other was found on the hub",
    ),
    "a file that is not there": (["some/model", "--data", "hf://datasets/some/stories/x.csv"], "has no such file"),
}


@pytest.mark.parametrize(("argv", "says"), NOT.values(), ids=NOT)
def test_what_is_not_there_is_one_line(hub, capsys, argv, says):
    assert says in refused(capsys, *argv, *(() if "--data" in argv else RUN[1:3]), *REST)


def test_a_hub_that_cannot_be_reached_is_one_line(hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "some/model: not found: http://127.0.0.1:9 cannot be reached" in refused(capsys, *RUN)


def test_without_the_client_the_line_says_what_to_type(hub, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    assert "hf download some/model --local-dir model" in refused(capsys, *RUN)
    assert not hub.asked


MODELS = {
    "pickles": ({"config.json": 1, "pytorch_model.bin": 1}, "has no safetensors, only pytorch_model.bin"),
    "GGUF": ({"model.gguf": 1}, "has no config.json, only model.gguf"),
    "an adapter": ({"adapter_config.json": 1, "adapter_model.safetensors": 1}, "is an adapter"),
}


@pytest.mark.parametrize(("there", "says"), MODELS.values(), ids=MODELS)
def test_models_that_are_refused_before_they_are_downloaded(there, says):
    with pytest.raises(InputError, match=says):
        fetch.model_files(Named("model", "a/b"), there)


def test_the_same_weights_in_a_second_form_are_left_out():
    there = dict.fromkeys(["config.json", "model.safetensors", "consolidated.safetensors", "original/x.safetensors"], 1)
    assert list(fetch.model_files(Named("model", "a/b"), there)) == ["config.json", "model.safetensors"]


SETS = {
    "splits": ([f"data/{part}.parquet" for part in ("train-00000-of-00002", "train-00001-of-00002", "test-0")],
               "", [0, 1]),
    "validation": (["train.jsonl", "validation.jsonl"], "", [0]),
    "one of several by a pattern": (["a/train.parquet", "b/train.parquet"], "b/*", [1]),
    "one of several by its folder": (["a/train.parquet", "b/train.parquet"], "b", [1]),
    "a split by name": (["data/train.csv", "data/test.csv"], "data/test.csv", [1]),
    "tables before texts": (["rows.jsonl", "notes.txt", "dataset_infos.json"], "", [0]),
}  # fmt: skip


@pytest.mark.parametrize(("names", "file", "chosen"), SETS.values(), ids=SETS)
def test_files_of_a_data_set(names, file, chosen):
    found, _ = fetch.data_files(Named("dataset", "a/b", file=file), dict.fromkeys(names, 1))
    assert found == [names[k] for k in chosen]


UNCLEAR = {
    "configurations": (["main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"],
                       r"has 2 sets to train on: main/train, socratic/train. Name one: --data 'hf://datasets/a/b/main/train\*'"),
    "scripts": (["load.py"], "no data in a form that is read: load.py"),
    "tests alone": (["test.csv"], "no training data by name: test.csv"),
}  # fmt: skip


@pytest.mark.parametrize(("names", "says"), UNCLEAR.values(), ids=UNCLEAR)
def test_data_sets_that_are_not_guessed(names, says):
    with pytest.raises(InputError, match=says):
        fetch.data_files(Named("dataset", "a/b"), dict.fromkeys(names, 1))


def test_of_too_many_files_a_name_is_shown_that_can_be_given():
    many = {f"data/{i}.jsonl": 1 for i in range(fetch.MOST_FILES + 1)}
    with pytest.raises(InputError, match="Name some: hf://datasets/a/b/FILE"):
        fetch.data_files(Named("dataset", "a/b", file="data"), many)


def test_names_and_paths(tmp_path, monkeypatch):
    """A path stays a path; weights, revisions and files are read and written the same way."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert names.model_name("here/model") is None
    assert names.model_name("./model") is None
    assert names.model_name("../model") is None
    assert names.data_name("rows/a.jsonl") is None
    assert names.data_name("here/a") is None
    for text in ("a/b", "a/b@main", "hf://datasets/a/b@v1/data/x-*.parquet"):
        assert str(names.data_name(text)) == text
    assert names.parted("a/b:2") == ("a/b", ":2")
    with pytest.raises(InputError, match="not part of a name"):
        names.data_name("hf://datasets/a/b/../../c")
    commit, root = "0" * 40, names.cache()
    file = root / f"datasets--a--b/snapshots/{commit}/data/x.csv"
    assert names.written(f"{file}:0.5") == f"hf://datasets/a/b@{commit}/data/x.csv:0.5"
    assert names.written(f"{root}/models--a--b/snapshots/{commit}") == f"{root}/models--a--b/snapshots/{commit}"
