"""An output opens as its source did: files that no longer fit are left out, files that others name are there."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from engines import exchange, opened
from packed_files import write_packed, write_shards
from safetensors.torch import load_file
from tiny import LLAMA, oracle

from trireme.engine.tuning.chosen import train_only
from trireme.engine.tuning.packed_source import Packed
from trireme.engine.tuning.parts import open_checkpoint
from trireme.models.config import InputError, read_config
from trireme.storage.checkpoint import open_source
from trireme.storage.headers import CheckpointError

QUANTIZERS = ("hf_quant_config.json", "quant_config.json", "quantization_config.json", "quantize_config.json")
CONFIGURATION = "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"


@pytest.fixture
def folder(tmp_path) -> Path:
    oracle("llama", LLAMA)[0].bfloat16().save_pretrained(tmp_path / "in")
    return tmp_path / "in"


def set_config(folder: Path, **keys) -> None:
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))


def written(folder: Path, change=lambda cfg: cfg) -> Path:
    """The output of a run without steps."""
    cfg, source, _ = opened(folder, change)
    x = exchange(cfg, source)[1]
    x.load()
    x.save(folder.parent / "out")
    return folder.parent / "out"


@pytest.mark.grid
@pytest.mark.parametrize(("form", "trained"), [("fp8", True), ("modelopt", True), ("modelopt", False)])
def test_files_about_a_packing_go_where_it_is_decoded(form, trained, tmp_path):
    """And config.json has the dtype of what is written."""
    write_packed(tmp_path, form)
    for name in QUANTIZERS:
        (tmp_path / "packed" / name).write_text("{}")
    set_config(tmp_path / "packed", dtype="float16")
    out = written(tmp_path / "packed", lambda cfg: cfg if trained else train_only(cfg, (), ("*norm*",)))
    left = {name for name in QUANTIZERS if (out / name).exists()}
    assert left == (set() if trained else set(QUANTIZERS))
    config = json.loads((out / "config.json").read_text())
    assert ("quantization_config" in config) == (not trained)
    assert config["dtype"] == ("bfloat16" if trained else "float16")
    if trained:
        opener = transformers.AutoModelForCausalLM.from_pretrained(out)
        tensors = load_file(out / "model.safetensors")
        assert all(torch.equal(t, tensors[name]) for name, t in opener.state_dict().items() if name in tensors)


def test_the_key_that_an_older_modelopt_has_not_written_is_named(tmp_path):
    """Put in as the message says, the checkpoint opens."""
    write_packed(tmp_path, "modelopt")
    folder = tmp_path / "packed"
    (folder / "hf_quant_config.json").write_text("{}")
    set_config(folder, quantization_config=None)
    with pytest.raises((InputError, CheckpointError), match="hf_quant_config.json") as refused:
        open_checkpoint(folder, read_config(folder).packing)
    key = re.search(r'Put "quantization_config": ({.*}) into', str(refused.value))[1]
    set_config(folder, quantization_config=json.loads(key))
    assert isinstance(open_checkpoint(folder, read_config(folder).packing), Packed)


def test_code_that_config_names_is_copied_and_not_run(folder):
    set_config(folder, auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    (folder / "configuration_own.py").write_text(CONFIGURATION + "\nopen('ran', 'w')\n")
    out = written(folder)
    assert not Path("ran").exists()
    (out / "configuration_own.py").write_text(CONFIGURATION)
    assert (folder / "configuration_own.py").exists()
    assert type(transformers.AutoConfig.from_pretrained(out, trust_remote_code=True)).__name__ == "OwnConfig"
    set_config(folder, auto_map=None)
    shutil.rmtree(out)
    assert (written(folder) / "configuration_own.py").exists()  # "auto_map": null names it still
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    shutil.rmtree(out)
    assert not (written(folder) / "configuration_own.py").exists()


def test_what_modules_json_names_is_copied(folder):
    """No folder outside, and none that it does not name."""
    named = [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"idx": 2, "path": "../other"}]
    (folder / "modules.json").write_text(json.dumps(named))
    for name in ("1_Pooling", "2_Else", "../other"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(f'{{"of": "{name}"}}')
    out = written(folder)
    assert json.loads((out / "1_Pooling/config.json").read_text()) == {"of": "1_Pooling"}
    assert {p.name for p in out.iterdir() if p.is_dir()} == {"1_Pooling"}


def test_a_single_file_gets_the_name_that_readers_look_for(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    out = written(folder)
    assert [p.name for p in out.glob("*.safetensors")] == ["model.safetensors"]
    assert transformers.AutoModelForCausalLM.from_pretrained(out).config.model_type == "llama"


def test_a_tokenizer_that_is_a_link_is_copied_and_other_links_are_named(folder):
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    (elsewhere / "b").write_text("private")
    (folder / "tokenizer.json").symlink_to(elsewhere / "a")
    (folder / "special_tokens_map.json").symlink_to(elsewhere / "b")
    said = []
    open_source(folder, said.append)
    assert "special_tokens_map.json" in said[0]
    assert "tokenizer.json" not in said[0]
    out = written(folder)
    assert (out / "tokenizer.json").read_text() == (elsewhere / "a").read_text()
    assert not (out / "tokenizer.json").is_symlink()
    assert not (out / "special_tokens_map.json").exists()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(elsewhere / "b")  # which is no tokenizer
    said.clear()
    open_source(folder, said.append)
    assert "tokenizer.json is a link" in said[0]


def test_shards_keep_their_names(folder):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    files = {f"model-0000{i}-of-00002.safetensors": {n: state[n] for n in names[i - 1 :: 2]} for i in (1, 2)}
    write_shards(folder, files)
    out = written(folder)
    assert {p.name for p in out.glob("*.safetensors")} == files.keys()
    opener = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(t, state[name]) for name, t in opener.items())
