"""Tokenizers and templates of strangers: the tokens that transformers makes, what is trained, where a turn stops."""

import json
import random

import numpy as np
import pytest
import tokenizers
from chats import CHATML, TALK, bracketed, encoded, make_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trireme.engine.data import tokens, versions
from trireme.engine.data.chat import ChatTemplate
from trireme.engine.data.codec import load_codec
from trireme.engine.data.dataset import DataOptions, load_dataset
from trireme.engine.data.encode import encode
from trireme.engine.data.files import text
from trireme.engine.data.formats.examples import Chat, Text
from trireme.engine.data.specials import cut_up
from trireme.engine.data.templates import BUILT_IN, load_template
from trireme.engine.data.tokens import load_tokenizer
from trireme.models.families.table import FAMILIES

TREE = [{"role": "user", "content": "Name a tall tree."}, {"role": "assistant", "content": "A redwood."}]
ASKED = "<|im_start|>user\nName a tall tree.<|im_end|>\n<|im_start|>assistant\n"
CONFIG = {"eos_token": "<|im_end|>", "bos_token": "<s>"}


def without_added(folder):
    """The tokenizer.json of a folder with its special tokens in the vocabulary alone."""
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["added_tokens"] = []
    path.write_text(json.dumps(spec))


def peer(folder):
    return PreTrainedTokenizerFast.from_pretrained(folder)


# ---------------------------------------------------------------- Mistral's pattern


@pytest.fixture(scope="module")
def large():
    """A tokenizer.json with more than 100,000 tokens; one of them joins a small letter to a capital one."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "oW", *(f"<{i}>" for i in range(100_000))]
    model = {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": [["o", "W"]]}
    return {"version": "1.0", "model": model, "added_tokens": [], "decoder": {"type": "ByteLevel"} | BYTES}


SPLIT = {"type": "Split", "pattern": {"Regex": "\\p{L}+|[^\\p{L}]+"}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
OLD = {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]}


V4 = {"model_type": "mistral3", "transformers_version": "4.57.1"}
PATTERNS = [  # pre-tokenizer, config.json, fix_mistral_regex, (whether the pattern is that of the file, and noted)
    (OLD, V4, None, (True, True)),
    (OLD, V4, True, (False, False)),
    (OLD, {"model_type": "mistral"}, True, (False, False)),
    (BYTES, {"model_type": "mistral"}, True, (False, False)),
    (OLD, {"model_type": "mistral", "transformers_version": "5.0.0.dev0"}, True, (False, False)),
    (OLD, {"model_type": "mistral", "transformers_version": "5.1.0"}, True, (True, False)),
    (OLD, V4 | {"model_type": "llama"}, True, (True, False)),
    (OLD, {}, True, (True, False)),
]


@pytest.mark.parametrize(("before", "model", "fix", "expected"), PATTERNS)
def test_where_the_pattern_of_mistral_is_corrected(before, model, fix, expected):
    spec = {"pre_tokenizer": before}
    made, notes = versions.corrected(spec, 131_072, {"fix_mistral_regex": fix}, model)
    assert (made == spec, bool(notes)) == expected
    assert versions.corrected(spec, 100_000, {"fix_mistral_regex": fix}, model) == (spec, ())
    if made != spec:
        assert versions.corrected(made, 131_072, {}, model) == (made, ())


@pytest.mark.full
@pytest.mark.parametrize(("before", "model", "fix", "expected"), [PATTERNS[i] for i in (0, 1, 3, 5)])
def test_the_pattern_of_mistral_is_corrected_where_transformers_does(tmp_path, large, before, model, fix, expected):
    (tmp_path / "tokenizer.json").write_text(json.dumps(large | {"pre_tokenizer": before}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({} if fix is None else {"fix_mistral_regex": fix}))
    if model:
        (tmp_path / "config.json").write_text(json.dumps(model))
    ours, said = load_tokenizer(tmp_path), "HelloWorld 12 oW, don't"
    assert ours.encode([said])[0][0].tolist() == peer(tmp_path)(said, add_special_tokens=False)["input_ids"]
    assert (ours.encode(["oW"])[0][0].tolist() == [256]) == expected[0]
    assert any("fix_mistral_regex" in note for note in ours.notes) == expected[1]


# ---------------------------------------------------------------- built anew


def spec_of(model, before, normalizer=None, decoder=None):
    """A small tokenizer.json of English letters, digits and spaces, as `model` has them."""
    special = [("<s>", 0), ("</s>", 1), ("<unk>", 2)]
    if model == "bytes":
        pieces = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "12", "ĊĊ", "Ġa", "'t"]
        merges = [["1", "2"], ["Ċ", "Ċ"], ["Ġ", "a"], ["'", "t"]]
    else:
        pieces, merges = ["▁", *(f"<0x{i:02X}>" for i in range(256)), *"abcdehlo", "▁a", "he"], [["▁", "a"], ["h", "e"]]
    names = [*(name for name, _ in special), *pieces]
    if model == "unigram":
        made = {"type": "Unigram", "vocab": [[name, -1.0] for name in names], "unk_id": 2}
    else:
        made = {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": merges}
        made |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"} if model == "pieces" else {}
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    added = [{"id": i, "content": name, **flags} for name, i in special]
    parts = {"pre_tokenizer": before, "normalizer": normalizer, "decoder": decoder and {"type": decoder} | BYTES}
    return {"version": "1.0", "model": made, "added_tokens": added, "post_processor": None, **parts}


GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}
FIRST = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
TO_WORDS = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPENDED = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, TO_WORDS]}
SPACED = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
QWEN = {"type": "Sequence", "pretokenizers": [SPLIT | {"pattern": {"Regex": versions._QWEN2}}, BYTES]}
PLAIN = "PreTrainedTokenizerFast"
ANEW = {  # tokenizer.json, tokenizer_class, model_type, more of tokenizer_config.json, whether a note says so
    "digits": (spec_of("bytes", DIGITS), "GPT2Tokenizer", "llama", {}, True),
    "gpt2": (spec_of("bytes", GPT2), "GPT2TokenizerFast", "llama", {}, False),
    "digits as they are": (spec_of("bytes", DIGITS), "GPT2Tokenizer", "granite", {}, False),
    "digits by type": (spec_of("bytes", DIGITS), None, "starcoder2", {}, True),
    "olmoe": (spec_of("bytes", GPT2, {"type": "NFC"}), "GPTNeoXTokenizerFast", "olmoe", {}, False),
    "no NFC": (spec_of("bytes", GPT2), "GPTNeoXTokenizer", "gpt_neox", {}, True),
    "llama 2": (spec_of("pieces", None, PREPENDED), "LlamaTokenizer", "llama", {"legacy": False}, True),
    "llama 2, legacy": (spec_of("pieces", None, PREPENDED), "LlamaTokenizerFast", "llama", {"legacy": True}, True),
    "llama 2, newer": (spec_of("pieces", FIRST), "LlamaTokenizer", "llama", {"legacy": False}, False),
    "llama 3": (spec_of("bytes", DIGITS, decoder="ByteLevel"), "LlamaTokenizerFast", "llama", {}, False),
    "mistral": (spec_of("pieces", None, PREPENDED), "LlamaTokenizer", "mistral", {"legacy": False}, False),
    "unigram": (spec_of("unigram", FIRST), "LlamaTokenizer", "llama", {}, True),
    "gemma": (spec_of("pieces", SPACED, TO_WORDS), "GemmaTokenizer", "gemma2", {}, False),
    "gemma otherwise": (spec_of("pieces", FIRST), "GemmaTokenizer", "gemma2", {}, True),
    "qwen": (spec_of("bytes", QWEN, {"type": "NFC"}), "Qwen2Tokenizer", "qwen3", {}, False),
    "qwen otherwise": (spec_of("bytes", GPT2), PLAIN, "qwen2", {}, True),
    "qwen by its class": (spec_of("bytes", GPT2), PLAIN, "qwen3", {}, False),
    "unnamed": (spec_of("pieces", None, PREPENDED), None, "llama", {}, False),
    "no type": (spec_of("bytes", DIGITS), "GPT2Tokenizer", None, {}, True),
}


@pytest.mark.parametrize("name", ANEW)
def test_a_note_names_what_transformers_5_builds_anew(tmp_path, name):
    """It is there exactly where AutoTokenizer has other tokens; what is read is tokenizer.json, as it is."""
    spec, named, kind, more, noted = ANEW[name]
    tokens_of = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>")
    config = tokens_of | ({"tokenizer_class": named} if named else {}) | more
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if kind:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    mine, auto, whole = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path), peer(tmp_path)
    texts = [text.replace("{0}", "</s>") for text in versions._PROBES]
    ids = [made[0].tolist() for made in mine.encode(texts)]
    assert ids == [whole(text, add_special_tokens=False).input_ids for text in texts]
    differ = sum(a != auto(text, add_special_tokens=False).input_ids for a, text in zip(ids, texts, strict=True))
    assert [f"{differ} of {len(texts)} sample texts have other tokens" in note for note in mine.notes] == [True] * noted
    assert bool(differ) == noted
    if noted and kind != "qwen2":  # what the note says helps
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": PLAIN}))
        auto = AutoTokenizer.from_pretrained(tmp_path)
        assert f'"tokenizer_class": "{PLAIN}" in tokenizer_config.json' in mine.notes[0]
        assert ids == [auto(text, add_special_tokens=False).input_ids for text in texts]


def test_a_tokenizer_that_transformers_5_cannot_build_anew_is_read(tmp_path):
    """Its class has no prefix of pieces within a word, and no merge of two such pieces."""
    spec = spec_of("bytes", GPT2)
    spec["model"] |= {"vocab": {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3, "##b": 4, "ab": 5}, "merges": [["a", "##b"]]}
    spec["model"] |= {"continuing_subword_prefix": "##", "unk_token": "<unk>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPTNeoXTokenizer"}')
    with pytest.raises(Exception, match="out of vocabulary"):
        AutoTokenizer.from_pretrained(tmp_path)
    (note,) = load_tokenizer(tmp_path).notes
    assert note.startswith("transformers 5 cannot read the tokenizer, as it rebuilds GPTNeoXTokenizer: ")


def test_classes_of_model_types_are_those_of_transformers():
    from transformers.models.auto import tokenization_auto as auto

    for kind, own in auto.TOKENIZER_MAPPING_NAMES.items():
        if kind in (*FAMILIES, *versions._OWN, *versions._AS_IT_IS) and own != "TokenizersBackend":
            assert versions._OWN.get(kind) == own.removesuffix("Fast")
        elif kind in FAMILIES or kind in versions._AS_IT_IS:
            assert kind in {*versions._AS_IT_IS} - {*versions._OWN}
    assert {*versions._OWN} & auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS == {*versions._FORCED}


# ---------------------------------------------------------------- special tokens


@pytest.mark.parametrize(
    "config",
    [
        CONFIG | {"additional_special_tokens": ["<|im_start|>"]},
        CONFIG | {"extra_special_tokens": ["<|im_start|>"]},
        CONFIG | {"extra_special_tokens": ["<|im_start|>"], "split_special_tokens": True},
        CONFIG | {"extra_special_tokens": {"turn_token": "<|im_start|>"}},
        CONFIG | {"turn_token": "<|im_start|>", "pad_token": "<|pad|>"},  # no token of the vocabulary: a new one
        CONFIG | {"added_tokens_decoder": {"2": {"content": "<|im_start|>", "special": False, "lstrip": True}}},
        {"eos_token": {"content": "<|im_end|>", "__type": "AddedToken", "rstrip": True, "normalized": False}},
    ],
)
def test_special_tokens_are_those_that_transformers_adds(tmp_path, config):
    """tokenizer.json has them in its vocabulary, but lists none."""
    make_tokenizer(tmp_path, bos="")
    without_added(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHATML}))
    ours, theirs = load_tokenizer(tmp_path), peer(tmp_path)
    said = "a <|im_start|> b<|im_end|>  c <s> <|pad|></s>"
    assert ours.encode([said])[0][0].tolist() == theirs.encode(said, add_special_tokens=False)
    made = encoded({"messages": TREE}, ours, load_template(ours))
    assert made.ids.tolist() == theirs.apply_chat_template(TREE, return_dict=False)
    assert ours.eos == theirs.eos_token_id == 3
    assert made.ids.tolist().count(3) == (0 if "split_special_tokens" in config else 2)


def test_the_older_files_of_special_tokens(tmp_path):
    make_tokenizer(tmp_path, bos="")
    without_added(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    added = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": added}))
    (tmp_path / "added_tokens.json").write_text('{"<|im_start|>": 2}')
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    said = "<|im_start|>a<|im_end|></s>"
    assert ours.encode([said])[0][0].tolist() == theirs.encode(said, add_special_tokens=False)
    assert ours.eos == theirs.eos_token_id == 3
    config = {"eos_token": "</s>", "added_tokens_decoder": {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))  # then the older file is not read
    assert load_tokenizer(tmp_path).eos == 1


TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<new>", "abc", "[X]"]


def random_config(dice):
    """(tokenizer_config.json, special_tokens_map.json): tokens by any key, as texts or with flags, some twice."""
    flags = lambda: {key: dice.random() < 0.4 for key in ("lstrip", "rstrip", "normalized", "single_word")}
    plain = lambda: {"content": dice.choice(TOKENS), **flags()}
    typed = lambda: (
        plain() | {"__type": "AddedToken"} | ({"special": dice.random() < 0.5} if dice.random() < 0.5 else {})
    )
    token = lambda: dice.choice(TOKENS) if dice.random() < 0.5 else typed()
    some = lambda *names: [name for name in names if dice.random() < 0.4]
    config = {name: token() for name in some("bos_token", "eos_token", "pad_token", "unk_token", "foo_token")}
    for name in some("additional_special_tokens", "extra_special_tokens")[:1]:
        config[name] = [token() for _ in range(dice.randrange(3))]
    if dice.random() < 0.3:
        ids = dice.sample(range(8), dice.randrange(4))
        config["added_tokens_decoder"] = {str(i): plain() | {"special": dice.random() < 0.5} for i in ids}
    older = {name: dice.choice([dice.choice(TOKENS), plain()]) for name in some("bos_token", "eos_token")}
    return config, older | {name: [dice.choice(TOKENS)] for name in some("additional_special_tokens")}


@pytest.mark.full
def test_special_tokens_of_any_configuration_are_those_of_transformers(tmp_path):
    said, compared = "x <s> y  </s>  <|im_start|> abc <|im_end|><new> [X] [x] zabcz ", 0
    make_tokenizer(tmp_path, bos="")
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    for seed in range(150):
        dice = random.Random(seed)
        config, older = random_config(dice)
        kept = [token for token in whole["added_tokens"] if dice.random() < 0.5]
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {"added_tokens": kept}))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
        try:
            theirs = peer(tmp_path)
        except Exception:  # an unknown token that it cannot have
            continue
        ours = load_tokenizer(tmp_path)
        assert ours.encode([said])[0][0].tolist() == theirs.encode(said, add_special_tokens=False), seed
        if "eos_token" in config | older and theirs.eos_token_id is not None:
            assert ours.eos == theirs.eos_token_id, seed
        compared += 1
    assert compared > 100


def test_added_tokens_are_part_of_what_makes_tokens(tmp_path):
    """The cache must not give the tokens of before; and where nothing is added, its key stays."""
    first = make_tokenizer(tmp_path).fingerprint
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert load_tokenizer(tmp_path).fingerprint == first
    (tmp_path / "special_tokens_map.json").write_text('{"additional_special_tokens": ["abc"]}')
    assert load_tokenizer(tmp_path).fingerprint != first


# ---------------------------------------------------------------- around a text


@pytest.mark.parametrize(
    ("post", "config", "around"),
    [
        ("<s> $A </s>", {"cls_token": "<s>", "sep_token": "</s>"}, ([0], [1])),  # BERT: no eos_token
        ("</s> $A", {"bos_token": "</s>", "eos_token": "</s>"}, ([1], [1])),  # GPT-2: one token for both
        ("<s> $A </s>", {"bos_token": "<s>", "eos_token": "</s>"}, ([0], [1])),
        ("$A </s>", {"eos_token": "</s>"}, ([], [1])),
        ("<s> <|im_start|> $A", {"eos_token": "</s>"}, ([0, 2], [1])),
        ("$A", {"eos_token": "</s>"}, ([], [1])),
    ],
)
def test_what_stands_before_and_behind_a_text(tmp_path, post, config, around):
    """By hand; where transformers puts an end, it is the same."""
    core = make_tokenizer(tmp_path, bos="").core
    ids = {token: core.token_to_id(token) for token in ("<s>", "</s>", "<|im_start|>")}
    core.post_processor = tokenizers.processors.TemplateProcessing(single=post, special_tokens=list(ids.items()))
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    (made,) = encode([Text("a cat")], tokenizer, None)
    (plain,) = tokenizer.encode(["a cat"])
    assert made.ids.tolist() == [*around[0], *plain[0].tolist(), *around[1]]
    whole = peer(tmp_path).encode("a cat")
    assert made.ids.tolist()[: len(whole)] == whole


# ---------------------------------------------------------------- borders


def test_a_token_that_takes_the_spaces_beside_it_is_trained_by_what_it_is(tmp_path):
    """As Phi-3's <|assistant|>, which takes the answer's first blanks."""
    core = make_tokenizer(tmp_path, bos="").core
    core.add_special_tokens([tokenizers.AddedToken(t, rstrip=True) for t in ("<|user|>", "<|assistant|>")])
    core.add_special_tokens([tokenizers.AddedToken("<|end|>", lstrip=True)])
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    source = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    talk = [{"role": "user", "content": "f?"}, {"role": "assistant", "content": "  return 1  "}]
    template = ChatTemplate({"default": source}, {})
    made = encoded({"messages": talk}, tokenizer, template)
    assert tokenizer.decode(made.ids) == "<|user|>f?<|end|>\n<|assistant|>return 1<|end|>\n"  # as the library decodes
    assert tokenizer.decode(made.ids[made.trained]) == "return 1<|end|>"
    tagged = source.replace("m.content + '<|end|>\n'", "''").replace(
        "{% endfor %}", "{% generation %}{{ m.content }}{% endgeneration %}<|end|>{% endfor %}"
    )
    made = encoded({"messages": talk}, tokenizer, ChatTemplate({"default": tagged}, {}))
    assert tokenizer.decode(made.ids[made.trained]) == "return 1"  # lstrip: the end is not inside


@pytest.mark.grid
@pytest.mark.parametrize("name", ["stories260k", "tokenizers/gpt2", "tokenizers/minimind"])
@pytest.mark.parametrize("wide", [False, True])
def test_a_text_has_the_tokens_of_the_whole_in_a_txt_file_too(real, name, wide, tmp_path, monkeypatch):
    """One mark of a word more at each border was the fault. Also in one line, without a line end."""
    monkeypatch.setattr(text, "_PIECE", 20_000)
    monkeypatch.setattr(text, "_LINE", 20_000)
    said = (real / "data" / "tinyshakespeare.txt").read_text()[:60_000].strip("\n")
    said = " ".join(said.split()) if wide else said
    (tmp_path / "a.txt").write_text(said)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": said}))
    tokenizer = load_tokenizer(real / name)
    codec = load_codec(real / name)
    found = []
    for kind in ("txt", "jsonl"):
        data = load_dataset([str(tmp_path / f"a.{kind}")], codec, DataOptions(seq_len=1 << 20))
        (batch,) = data.batches(9)
        found.append(batch.ids.tolist())
    assert found[0] == found[1]
    (whole,) = tokenizer.encode([said])
    assert np.array_equal(tokenizer.wrap(whole[0])[0], found[0])


def test_parts_where_no_border_is_settled_are_joined_without_a_gap(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "OVERLAP", 8)
    tokenizer = make_tokenizer(tmp_path)
    said = "é" * 50
    parts = [tokenizer.part(said, start, start + 10)[0].tolist() for start in range(0, 50, 10)]
    assert sum(parts, []) == tokenizer.encode([said])[0][0].tolist()


# ---------------------------------------------------------------- ends of turns

GLM = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def glm(tmp_path, stops):
    """A tokenizer with GLM's turns, in which the next turn's opening ends the one before."""
    core = make_tokenizer(tmp_path, bos="").core
    names = ["<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>"]
    core.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in names])
    core.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": GLM}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ids = [core.token_to_id(name) for name in names[:stops]]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer = load_tokenizer(tmp_path)
    return tokenizer, load_template(tokenizer)


def test_the_next_turns_opening_is_learned_where_generation_stops_at_it(tmp_path):
    tokenizer, template = glm(tmp_path, 3)
    talk = [*TREE, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "None."}]
    assert bracketed({"messages": talk}, tokenizer, template) == (
        "[gMASK]<sop><|user|>\nName a tall tree.<|assistant|>\n[A redwood.<|user|>]\nAnd?"
        "<|assistant|>\n[None.<|endoftext|>]"
    )
    assert not template.notes()
    called = [*TREE, {"role": "observation", "content": "7"}, {"role": "assistant", "content": "Seven."}]
    assert "[A redwood.]<|tool|>" in bracketed({"messages": called}, tokenizer, template)  # no stop of the model


def test_without_such_a_stop_it_is_noted(tmp_path):
    tokenizer, template = glm(tmp_path, 1)
    assert bracketed({"messages": TREE}, tokenizer, template).endswith("<|assistant|>\n[A redwood.]")
    assert "no mark, so stopping is not learned" in template.notes()[0]
    assert template.fingerprint != glm(tmp_path, 3)[1].fingerprint


@pytest.mark.parametrize(
    ("inside", "outside", "says"),
    [
        ("{{ m.content }}", "<|im_end|>\n", "leave out the end of the turn (<|im_end|>), so stopping is not learned"),
        ("{{ m.content }}", "", "leave out the end of the turn, so stopping is not learned"),
        ("{{ m.content }}<|im_end|>", "\n", None),
    ],
)
def test_tags_that_leave_out_the_end_are_noted(tmp_path, inside, outside, says):
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        + inside + "{% endgeneration %}" + outside + "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )  # fmt: skip
    tokenizer = make_tokenizer(tmp_path, bos="", eos="<|im_end|>", chat_template=source)
    template, theirs = load_template(tokenizer), peer(tmp_path)
    notes = template.notes()
    assert [says in note for note in notes] == [True] if says else not notes
    made = encoded({"messages": TREE}, tokenizer, template)
    expected = theirs.apply_chat_template(TREE, return_dict=True, return_assistant_tokens_mask=True)
    assert made.ids.tolist() == expected["input_ids"]
    assert made.trained.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("source", [CHATML, BUILT_IN["chatml"]])
@pytest.mark.parametrize(("eos", "stops", "noted"), [("</s>", [], 1), ("</s>", [1, 3], 0), ("<|im_end|>", [], 0)])
def test_an_end_at_which_nothing_stops_is_noted(tmp_path, source, eos, stops, noted):
    tokenizer = make_tokenizer(tmp_path, bos="", eos=eos, chat_template=source)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops} if stops else {}))
    notes = load_template(load_tokenizer(tokenizer.folder)).notes()
    says = "answers end in <|im_end|>, at which the model's generation does not stop (</s>): stop there"
    assert notes == [says] * noted


# ---------------------------------------------------------------- templates


def test_variables_of_a_row_reach_the_template(tmp_path):
    source = "{% if enable_thinking is not defined or enable_thinking %}Think.{% endif %}" + CHATML
    tokenizer = make_tokenizer(tmp_path, bos="", chat_template=source)
    template, theirs = load_template(tokenizer), peer(tmp_path)
    for given in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        row = {"messages": TREE, "chat_template_kwargs": given}
        made = encoded(row, tokenizer, template)
        assert made.ids.tolist() == theirs.apply_chat_template(TREE, return_dict=False, **given)
        assert tokenizer.decode(made.ids[made.trained]) == "A redwood.<|im_end|>"
        row["chat_template_kwargs"] = json.dumps(given)
        assert encoded(row, tokenizer, template).ids.tolist() == made.ids.tolist()
    made = encoded({"messages": TREE, "chat_template_kwargs": {"other": 1}}, tokenizer, template)
    assert made.unread == ("chat_template_kwargs.other",)
    made = encoded({"messages": TREE, "chat_template_kwargs": {"role": 1}}, tokenizer, template)
    assert made.unread == ("chat_template_kwargs.role",)  # a word of the template, and no variable
    with pytest.raises(ValueError, match="sets 'messages'"):
        encoded({"messages": TREE, "chat_template_kwargs": {"messages": []}}, tokenizer, template)


def test_parts_are_joined_as_servers_join_them(tmp_path):
    """By line ends; a template that takes lists gets one."""
    parts = [{"type": "text", "text": "First: a."}, {"type": "text", "text": "Second: b."}]
    talk = [{"role": "user", "content": parts}, TREE[1]]
    tokenizer = make_tokenizer(tmp_path, bos="", chat_template=CHATML)
    assert "user\nFirst: a.\nSecond: b.<|im_end|>" in bracketed({"messages": talk}, tokenizer, load_template(tokenizer))
    lists = CHATML.replace(
        "'\n' + m.content + '<|im_end|>\n' }}",
        "'\n' }}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% endif %}{{ '<|im_end|>\n' }}",
    )
    tokenizer = make_tokenizer(tmp_path, bos="", chat_template=lists)
    made = encoded({"messages": talk}, tokenizer, load_template(tokenizer))
    assert made.ids.tolist() == peer(tmp_path).apply_chat_template(talk, return_dict=False)
    assert "First: a.Second: b." in tokenizer.decode(made.ids)
    both = [talk[0], {"role": "assistant", "content": parts}]  # a template that takes lists of users alone
    alone = lists.replace("m.content is string", "m.role == 'assistant'").replace(
        "{{ m.content }}", "{{ m.content + '' }}"
    )
    tokenizer = make_tokenizer(tmp_path, bos="", chat_template=alone)
    assert "First: a.\nSecond: b." in tokenizer.decode(
        encoded({"messages": both}, tokenizer, load_template(tokenizer)).ids
    )


def test_the_template_of_a_processor_is_found(tmp_path):
    tokenizer = make_tokenizer(tmp_path, bos="")
    assert load_template(tokenizer) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert load_template(tokenizer).text(TREE).startswith(ASKED)
    (tmp_path / "chat_template.json").write_text("[")
    with pytest.raises(ValueError, match="chat_template.json"):
        load_template(tokenizer)


def test_what_a_template_writes_and_is_not_there_is_named():
    source = "{% for m in messages %}{{ m.name | tojson }}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="it writes 'name', which is undefined"):
        ChatTemplate({"default": source}, {}).mark(TALK, None)


def test_an_end_token_among_the_words_is_noted(tmp_path):
    """Its tokens are those of transformers, and the model learns to stop there."""
    codec = load_codec(make_tokenizer(tmp_path, bos="", chat_template=CHATML.replace("<|im_end|>", "</s>")).folder)
    path = tmp_path / "a.jsonl"
    for said, notes in (("a </s> b", 1), ("a b", 0), ("a b</s>", 1)):
        row = {"messages": [{"role": "user", "content": "x </s> y"}, {"role": "assistant", "content": said}]}
        path.write_text(json.dumps(row))
        found = load_dataset([str(path)], codec, DataOptions(seq_len=64)).report.notes
        assert ["1 row with an end token inside the trained text" in note for note in found] == [True] * notes
    path.write_text(json.dumps({"prompt": "a </s>", "completion": "b </s> c"}))
    assert "1 row with an end token" in load_dataset([str(path)], codec, DataOptions(seq_len=64)).report.notes[0]
    path.write_text(json.dumps({"prompt": "a </s>", "completion": "b </s>"}))
    assert "end token" not in load_dataset([str(path)], codec, DataOptions(seq_len=64)).report.notes[0]


def test_built_in_templates_read_what_they_are_given(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    for source in BUILT_IN.values():
        template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
        assert not template.notes()
        (made,) = encode([Chat([{**TREE[0], "name": "Eve"}, TREE[1]])], tokenizer, template)
        assert made.unread == ("messages[].name",)


# ---------------------------------------------------------------- the example shows where tokens are


@pytest.mark.parametrize(
    ("pieces", "cuts"),
    [
        (["a", "<|im_end|>", "b"], []),
        (["a<|", "im", "_end|", ">b"], [("<|im_end|>", 0, 4)]),
        (["<", "s", ">", "<s>", "<p>"], [("<s>", 0, 3)]),
        (["<|x|", ">", "<|y|>"], [("<|x|>", 0, 2)]),
        ([], []),
    ],
)
def test_special_tokens_that_are_cut_up_are_found(pieces, cuts):
    assert cut_up(pieces, ["<s>", "</s>"]) == cuts


def test_the_example_marks_where_a_special_token_is_cut(tmp_path):
    """One that the tokenizer does not have: the text looks the same, and its end is never one token."""
    source = CHATML.replace("<|im_end|>", "<|eom|>")
    tokenizer = make_tokenizer(tmp_path, bos="", chat_template=source)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}))
    data = load_dataset([str(tmp_path / "a.jsonl")], load_codec(tokenizer.folder), DataOptions(seq_len=64))
    (batch,) = data.batches(1)
    assert "<|eom|>" in data.codec.decode(batch.ids)  # as in samples of a run
    cut = "<·|·e·o·m·|·>"
    assert data.example() == f"<|im_start|>user⏎a b{cut}⏎<|im_start|>assistant⏎[c d{cut}]⏎"
    note = data.report.notes[-1]
    assert "cuts <|eom|> into 7 (by · below)" in note
    tokenizer = make_tokenizer(tmp_path, bos="", eos="<|im_end|>", chat_template=CHATML)
    data = load_dataset([str(tmp_path / "a.jsonl")], load_codec(tokenizer.folder), DataOptions(seq_len=64))
    assert "·" not in data.example()
    assert not data.report.notes


def test_marks_that_a_text_has_already_are_not_doubled(tmp_path):
    """Rows that were rendered elsewhere, as text and as prompt and completion."""
    tokenizer = make_tokenizer(tmp_path)
    rows = ({"text": "<s>a b</s>"}, *({"prompt": "<s>a ", "completion": said} for said in ("b", "b</s>")))
    for row in rows:
        assert tokenizer.decode(encoded(row, tokenizer).ids) == "<s>a b</s>"
    rendered = "<|im_start|>assistant\nb<|im_end|>\n"
    assert tokenizer.decode(encoded({"text": rendered}, tokenizer).ids) == f"<s>{rendered}</s>"
