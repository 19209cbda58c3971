"""Tokenizers of checkpoints: the ids of transformers, tokens around a text, pieces of long texts."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from chats import CHATML, make_tokenizer

from trireme.engine.data.codec import load_codec
from trireme.engine.data.read import CONTEXT
from trireme.engine.data.tokenizer import load_tokenizer
from trireme.models.config import InputError

TEXTS = [
    "Hello <|im_start|>user and <extra> it",
    "  two  spaces <|im_end|>\n\n",
    "naïve 日本 🦜",
    "<s>a</s>",
    "[MASK] x [NEW]",
]
ADDED = {
    "content": "<extra>",
    "lstrip": True,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
    "special": True,
}
CHECKPOINTS = {  # what is in the files beside tokenizer.json
    "plain": {},
    "no begin": {"tokenizer_config.json": {"bos_token": "<s>", "add_bos_token": False}},
    "named elsewhere": {"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "<|im_end|>"}},
    "added by number": {"tokenizer_config.json": {"added_tokens_decoder": {"260": ADDED}, "eos_token": "</s>"}},
    "added by name": {"tokenizer_config.json": {}, "added_tokens.json": {"<extra>": 260, "[NEW]": 261}},
    "extra": {"tokenizer_config.json": {"extra_special_tokens": ["<extra>", "[NEW]"]}},
    "additional": {"tokenizer_config.json": {"additional_special_tokens": ["<extra>"], "mask_token": "[MASK]"}},
    "both": {
        "tokenizer_config.json": {},
        "special_tokens_map.json": {"additional_special_tokens": ["<extra>", "[NEW]"]},
    },
}


@pytest.mark.full
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_ids_of_transformers(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    make_tokenizer(tmp_path)
    for file, content in CHECKPOINTS[name].items():
        (tmp_path / file).write_text(json.dumps(content))
    ours, theirs = load_tokenizer(tmp_path), transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for (ids, _), text in zip(ours.encode(TEXTS), TEXTS, strict=True):
        assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.specials.get("eos_token") == theirs.eos_token


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "minimind"])
def test_real_tokenizers(real, name):
    transformers = pytest.importorskip("transformers")
    folder = real / "tokenizers" / name
    ours, theirs = load_tokenizer(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    text = (real / "data" / "tinyshakespeare.txt").read_text()[:20_000]
    for part in (text, *TEXTS):
        ((ids, offsets),) = ours.encode([part], offsets=True)
        assert ids.tolist() == theirs(part, add_special_tokens=False)["input_ids"]
        assert offsets.shape == (len(ids), 2)
    pieces, at = [], 0
    for stop in (*(text.index("\n", i) + 1 for i in range(4_000, 19_000, 4_000)), len(text)):
        pieces.append(ours.part(text[max(0, at - CONTEXT) : at], text[at:stop], text[stop : stop + CONTEXT])[0])
        at = stop
    assert np.concatenate(pieces).tolist() == ours.encode([text])[0][0].tolist()


@pytest.mark.parametrize(
    ("config", "bos", "eos"),
    [
        ({}, (0,), 1),
        ({"add_bos_token": False}, (), 1),
        ({"eos_token": "<|im_end|>"}, (0,), 3),
        ({"eos_token": "absent"}, (0,), 260),  # added, as transformers does
    ],
)
def test_tokens_around_a_text(tmp_path, config, bos, eos):
    found = make_tokenizer(tmp_path, **config)
    assert (found.bos, found.eos) == (bos, eos)
    ids, lead = found.wrap(np.array([5], np.int32))
    assert ids.tolist() == [*bos, 5, *([] if eos is None else [eos])]
    assert lead == len(bos)
    assert found.wrap(ids)[0].tolist() == ids.tolist()  # neither of them twice


def test_dropout_truncation_and_ends(tmp_path):
    make_tokenizer(tmp_path, chat_template=CHATML, eos_token="</s>")
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["model"]["dropout"] = 0.5
    spec["model"]["vocab"]["far"] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    found = load_tokenizer(tmp_path)
    assert len(found.encode(["a long enough text"])[0][0]) == 18
    assert found.stops == ("</s>", "<|im_end|>")
    codec = load_codec(tmp_path)
    assert codec.facts.template_notes == ()
    assert codec.facts.vocab_size == 301
    assert codec.prompt("ab") == [0, 68, 69]
    assert codec.parts([0, 68, 69], [1, 3]) == ["<s>", "ab"]
    codec.close()


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer.json", "[1]", "tokenizer.json"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}', "tokenizer.json"),
        ("tokenizer.json", '{"model": ' + "[" * 10_000, "tokenizer.json"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json"),
        ("tokenizer_config.json", '{"bos_token": "\\ud800"}', "tokenizer.json"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template"),
        ("chat_template.jinja", "{% for %}", "line 1"),
    ],
)
def test_files_that_are_wrong_are_named(tmp_path, file, content, word):
    make_tokenizer(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(InputError) as error:
        load_codec(tmp_path)
    assert word in str(error.value)


def test_a_folder_without_a_tokenizer(tmp_path):
    assert load_codec(tmp_path) is None
    make_tokenizer(tmp_path)
    shutil.move(tmp_path / "tokenizer.json", tmp_path / "other.json")
    assert load_codec(tmp_path) is None
    with pytest.raises(InputError, match="no such file"):
        shutil.move(tmp_path / "other.json", tmp_path / "tokenizer.json")
        load_codec(tmp_path, str(Path("absent.jinja")))
