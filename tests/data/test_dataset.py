"""From files to micro-batches: labels, order, resuming, the cache, the report, and every way that data can be wrong."""

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import zlib
from functools import lru_cache

import numpy as np
import pytest
import tokenizers
from chats import CHATML, TALK, make_tokenizer
from engines import fork
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.engine.data import prepare
from trireme.engine.data.codec import load_codec
from trireme.engine.data.dataset import DataOptions, load_dataset
from trireme.engine.data.formats.examples import Chat, Completion, Text
from trireme.engine.data.prepare import Reading
from trireme.engine.data.tokens import load_tokenizer
from trireme.models.config import InputError
from trireme.storage.files import StoreError
from trireme.storage.untrusted import seal, unseal


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    return make_tokenizer(folder, chat_template=CHATML)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


codec_of = lru_cache(9)(load_codec)  # of a tokenizer's folder; its process is there for as long as it is remembered


def load(source, tokenizer, chat_template=None, **options):
    sources = [source] if isinstance(source, str) else source
    codec = tokenizer and codec_of(tokenizer.folder, chat_template)
    return load_dataset(sources, codec, DataOptions(**{"seq_len": 64} | options))


def documents(batches):
    """Every document of some micro-batches as (ids, labels)."""
    for batch in batches:
        assert batch.ids.dtype == batch.labels.dtype == np.int32
        assert len(batch.ids) == len(batch.labels) == sum(batch.lengths)
        at = 0
        for length in batch.lengths:
            yield batch.ids[at : at + length].tolist(), batch.labels[at : at + length].tolist()
            at += length


# ---------------------------------------------------------------- tokens and labels


def test_text_begins_with_bos_and_ends_with_eos(tokenizer, tmp_path):
    data = load(write(tmp_path / "a.jsonl", [{"text": "hi"}]), tokenizer)
    h, i = tokenizer.encode(["hi"])[0][0].tolist()
    assert list(documents(data.batches(1))) == [([0, h, i, 1], [h, i, 1, -100])]
    assert data.is_text
    assert data.example() == "<s>[hi</s>]"


def test_the_example_of_a_long_document_is_its_beginning(tmp_path):
    data = load(write(tmp_path / "a.jsonl", [{"input_ids": [7] * 5000}]), None, seq_len=5000)
    assert data.example() == ("7 [" + "7 " * 1999)[:2000] + " … of 5,000 tokens"


def test_bos_and_eos_are_never_doubled(tokenizer, tmp_path):
    data = load(
        write(tmp_path / "a.jsonl", [{"text": "<s>hi</s>"}, {"prompt": "<s>h", "completion": "i</s>"}][:1]), tokenizer
    )
    assert [ids for ids, _ in documents(data.batches(1))][0].count(1) == 1
    data = load(write(tmp_path / "b.jsonl", [{"prompt": "<s>h", "completion": "i</s>"}]), tokenizer)
    ((ids, labels),) = documents(data.batches(1))
    assert ids[0] == 0
    assert ids.count(0) == ids.count(1) == 1
    assert labels == [-100, ids[2], 1, -100]


@pytest.mark.parametrize(
    ("config", "bos"), [({"add_bos_token": False}, ()), ({"add_bos_token": True}, (0,)), ({}, (0,))]
)
def test_the_configuration_says_whether_bos_is_added(tmp_path, config, bos):
    made = make_tokenizer(tmp_path, **config)
    assert made.bos == bos
    assert [note.partition(",")[0] for note in made.notes] == ([] if bos else ["texts have no begin token"])
    if config.get("add_bos_token"):
        spec = json.loads((tmp_path / "tokenizer.json").read_text())
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {"post_processor": None}))
        made = load_tokenizer(tmp_path)
        assert made.bos == (0,)
        assert "begin with a begin token" in made.notes[0]


def test_eos_from_the_model_where_the_tokenizer_names_none(tmp_path):
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).eos is None
    (tmp_path / "config.json").write_text('{"eos_token_id": [3, 1]}')
    assert load_tokenizer(tmp_path).eos == 3
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert load_tokenizer(tmp_path).eos == 1


def test_completions_are_trained_and_prompts_are_not(tokenizer, tmp_path):
    row = {"question": "Q: é?", "answer": " 日本"}
    data = load(write(tmp_path / "a.jsonl", [row]), tokenizer, map="prompt=question,completion=answer")
    assert data.example() == "<s>Q: é?[ 日本</s>]"


def test_chats(tokenizer, tmp_path):
    data = load(write(tmp_path / "a.jsonl", [{"messages": TALK}]), tokenizer)
    assert data.example() == "<|im_start|>user⏎a b<|im_end|>⏎<|im_start|>assistant⏎[c d<|im_end|>]⏎"
    assert not data.is_text


def test_alpaca_without_a_chat_template_uses_the_plain_prompt(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    path = write(tmp_path / "a.jsonl", [{"instruction": "Add.", "input": "", "output": "3"}])
    assert load(path, tokenizer, seq_len=400).example().endswith("### Response:⏎[3</s>]")
    path = write(tmp_path / "b.jsonl", [{"messages": TALK}])
    with pytest.raises(InputError, match="no chat template, which this data needs. Give --chat-template FILE"):
        load(path, tokenizer)
    assert load(path, tokenizer, chat_template="plain").example().endswith("<|assistant|>⏎[c d</s>]⏎")


def test_tokens_need_no_tokenizer(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}, {"input_ids": [8, 9]}])
    data = load(path, None)
    assert sorted(documents(data.batches(2))) == [([5, 6, 7], [6, -100, -100]), ([8, 9], [9, -100])]
    assert data.example(0) == "5 [6 ]7 "
    load(path, None, vocab_size=10)
    with pytest.raises(InputError, match="has token id 9, the model's vocabulary is 9"):
        load(path, None, vocab_size=9)
    with pytest.raises(InputError, match="no tokenizer.json, which this data needs. Give --tokenizer FOLDER"):
        load(write(tmp_path / "b.jsonl", [{"text": "x"}]), None)


def test_a_split_text_is_learned_to_the_last_token(tokenizer, tmp_path):
    """Windows part the attention, but the first token of a window is still the label of the token before it."""
    path = tmp_path / "a.txt"
    path.write_text("abcdefghijkl" * 20)
    data = load(str(path), tokenizer, seq_len=16)
    assert sum(batch.trained for batch in data.batches(4)) == len("abcdefghijkl" * 20) + 1  # and the end token


def test_pieces_of_a_long_text_are_one_document(tokenizer, tmp_path, monkeypatch):
    text = "".join(f"line {i}\n" for i in range(300)).strip()
    (tmp_path / "a.txt").write_text(text)
    whole = load(str(tmp_path / "a.txt"), tokenizer, seq_len=4096, pack=False)
    monkeypatch.setattr("trireme.engine.data.files.text._PIECE", 100)
    pieces = load(str(tmp_path / "a.txt"), tokenizer, seq_len=4096, pack=False)
    assert whole.files[0].n_documents == pieces.files[0].n_documents == 1
    assert list(documents(whole.batches(1))) == list(documents(pieces.batches(1)))


def test_a_long_row_is_tokenized_in_pieces(tokenizer, tmp_path, monkeypatch):
    """With the same tokens, and with progress: a row may be the whole file."""
    rows = [{"text": "first"}, {"text": "".join(f"line {i}\n" for i in range(2000)) + "<|im_end|>"}, {"text": "last"}]
    path, seen = write(tmp_path / "a.jsonl", rows), []
    whole = load(path, tokenizer, seq_len=1 << 16)
    monkeypatch.setattr("trireme.engine.data.encode.WINDOW", 1000)
    monkeypatch.setattr(prepare, "_BATCH_CHARACTERS", 2000)
    options = DataOptions(seq_len=1 << 16)
    pieces = load_dataset([path], codec_of(tokenizer.folder), options, lambda *args: seen.append(args))
    assert whole.files[0].lengths.tolist() == pieces.files[0].lengths.tolist()
    assert list(documents(whole.batches(1))) == list(documents(pieces.batches(1)))
    done = [at for name, at, _ in seen if name == "a.jsonl"]
    assert done == sorted(set(done))
    assert len(done) > 10


@pytest.mark.parametrize("at", [0, 40, 79])
def test_a_bad_piece_takes_its_document_with_it(tokenizer, tmp_path, monkeypatch, at):
    """And not the one before, to which the pieces after it do not belong."""
    monkeypatch.setattr("trireme.engine.data.files.text._PIECE", 100)
    lines = [f"line {i}\n" for i in range(80)]
    lines[at] = "<|im_start|>\n"
    (tmp_path / "a.txt").write_text("".join(["one\n<|endoftext|>\n", *lines, "<|endoftext|>\n", *lines, lines[at]]))
    media = ((tokenizer.core.token_to_id("<|im_start|>"), "image_token_id"),)
    data = load(str(tmp_path / "a.txt"), tokenizer, skip_bad=True, media=media)
    assert data.files[0].lengths.tolist() == [len(tokenizer.wrap(tokenizer.encode(["one"])[0][0])[0])]
    assert (data.files[0].meta["rows"], data.files[0].meta["bad"]) == (3, 2)
    (tmp_path / "b.txt").write_text("".join([*lines, "<|endoftext|>\none\n"]))
    assert load(str(tmp_path / "b.txt"), tokenizer, skip_bad=True, media=media).files[0].n_documents == 1


@pytest.mark.parametrize(
    ("long", "longer"),
    [("cut", [([9] * 8, [9] * 7 + [-100])]), ("drop", []), ("split", [([9] * 8, [9] * 8)])],
)
def test_rows_that_are_longer_than_a_sequence(tmp_path, long, longer):
    """One is, one fills a sequence; of a third nothing is learned, as of what is left of the first when it is split."""
    rows = [{"input_ids": [7] * 8}, {"input_ids": [9] * 9}, {"input_ids": [5, 6], "labels": [-100, -100]}]
    data = load(write(tmp_path / "a.jsonl", rows), None, seq_len=8, long=long)
    assert sorted(documents(data.batches(2))) == [([7] * 8, [7] * 7 + [-100]), *longer]
    assert any("1 row is longer (33 %)" in line for line in data.report.lines())
    with pytest.raises(InputError, match="1 rows have more than --seq-len 8 tokens, the longest 9"):
        load(str(tmp_path / "a.jsonl"), None, seq_len=8, long="error")


def test_the_trained_share_is_of_what_cuts_leave(tmp_path):
    """Answers come last: cut, of the long rows an eighth is learned, and before it was half."""
    long = {"input_ids": [7] * 16, "labels": [-100] * 7 + [7] * 9}
    short = {"input_ids": [5] * 4, "labels": [-100, -100, 5, 5]}
    cut = load(write(tmp_path / "a.jsonl", [long] * 3 + [short] * 2), None, seq_len=8, long="cut")
    learned = [label >= 0 for _, labels in documents(cut.batches(2)) for label in labels]
    assert cut.trained == sum(learned) / len(learned) < 0.25
    whole = load(write(tmp_path / "b.jsonl", [short] * 2), None, seq_len=8)
    assert whole.trained == 0.5


# ---------------------------------------------------------------- order and resuming


@pytest.mark.parametrize("pack", [True, False])
def test_an_epoch_sees_every_document_once_whatever_the_batch(tokenizer, tmp_path, pack):
    texts = [f"{i} " + "x" * random.Random(i).randrange(1, 50) for i in range(97)]
    data = load(write(tmp_path / "a.jsonl", [{"text": t} for t in texts]), tokenizer, pack=pack)
    for batch_size, micro in ((8, 3), (1, 1), (200, 7)):
        seen = []
        for i in range(data.steps_per_epoch(batch_size)):
            batches = data.step(i, batch_size, micro)
            seen += [tokenizer.decode(ids[1:-1]) for ids, _ in documents(batches)]
        assert sorted(seen) == sorted(texts)
    assert (data.n_sequences == 97) is (not pack)


def test_a_step_depends_on_nothing_but_its_number(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": f"{i}" * 9} for i in range(50)])
    first, second = load(path, tokenizer), load(path, tokenizer)
    in_order = [list(documents(first.step(i, 4, 2))) for i in range(12)]
    for i in (11, 3, 7, 0):  # another object, another order, over the end of the epoch
        assert list(documents(second.step(i, 4, 2))) == in_order[i]
    per_epoch = first.steps_per_epoch(4)
    assert in_order[0] != in_order[per_epoch]  # epochs differ
    # How a step is cut into micro-batches does not change what it holds.
    assert list(in_order[1]) == list(documents(first.step(1, 4, 1)))
    assert first.fingerprint == second.fingerprint != load(path, tokenizer, seed=1).fingerprint


def test_weights_and_several_files(tokenizer, tmp_path):
    a = write(tmp_path / "a.jsonl", [{"text": f"a{i}"} for i in range(10)])
    b = write(tmp_path / "b.jsonl", [{"messages": TALK}] * 10)
    data = load([f"{a}:2", f"{b}:0.5"], tokenizer)
    shown = [tokenizer.decode(ids) for ids, _ in documents(data.batches(100))]
    assert (len(shown), sum("<s>a" in s for s in shown)) == (25, 20)
    assert 'a.jsonl: 10 rows, format "text", weight 2' in data.report.lines()[0]
    assert 'b.jsonl: 10 rows, format "messages", weight 0.5' in data.report.lines()[1]
    with pytest.raises(InputError, match="b.jsonl:0.04: the weight leaves none of its rows"):
        load([a, f"{b}:0.04"], tokenizer)
    parted = load(f"{a}:3", tokenizer, val="0.4")  # held out, a row counts once
    trained, held = (sorted(map(str, documents(d.batches(100)))) for d in (parted, parted.held_out))
    assert (len(trained), len(held)) == (18, 4)
    assert len({*trained, *held}) == 10


# ---------------------------------------------------------------- held out


def test_a_share_is_held_out_and_never_trained(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": f"{i:04}"} for i in range(200)])
    data = load(path, tokenizer, val="0.1")
    train, held = ([tokenizer.decode(ids) for ids, _ in documents(d.batches(8))] for d in (data, data.held_out))
    assert (len(train), len(held)) == (180, 20)
    assert len({*train, *held}) == 200
    assert "20 rows held out" in data.report.lines()[1]
    assert data.nbytes() == load(path, tokenizer).nbytes()  # on disk they are one


def test_of_a_single_text_the_end_is_held_out_and_never_trained(tokenizer, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{i:04}" for i in range(200)))
    (whole,) = documents(load(str(path), tokenizer, seq_len=1024).batches(1))
    data = load(str(path), tokenizer, val="0.1")
    seen = {id(d): [ids for ids, _ in documents(d.batches(1))] for d in (data, data.held_out)}
    train, held = (sum(parts, []) for parts in seen.values())
    assert train + held == whole[0]
    assert len(held) == int(0.1 * len(whole[0]))
    for d in (data, data.held_out):  # what counts is what is reported, and no label is of the other part
        assert sum(batch.trained for batch in d.batches(1)) == d.report.counts.trained
    path.write_text("short")
    with pytest.raises(InputError, match="the text is too short to hold out a part of it"):
        load(str(path), tokenizer, val="0.1")


def test_what_is_held_out_is_reported_as_what_is_trained_on_is(tokenizer, tmp_path):
    a = write(tmp_path / "a.jsonl", [{"prompt": "why", "completion": "because " * 40}] * 20)
    b = write(tmp_path / "b.jsonl", [{"prompt": "so " * 90, "completion": "yes"}, {"prompt": "a", "completion": "b"}])
    said = load(a, tokenizer, val=b).describe_held_out()
    assert said[0].endswith('b.jsonl: 2 rows, format "prompt,completion"')
    assert "2 sequences" not in said[-1]
    assert said[2].startswith("at --seq-len 64: 1 row is longer (50 %): ")
    assert said[3] == "1 row dropped: nothing to learn in what is kept"
    shared = load(a, tokenizer, val="0.1")
    assert shared.describe_held_out() == []
    assert shared.report.lines()[-2].startswith(
        "note: of the rows held out: at --seq-len 64: 2 rows are longer (100 %)"
    )


def test_a_file_is_held_out(tokenizer, tmp_path):
    a, b = (write(tmp_path / f"{n}.jsonl", [{"text": n * 5}] * 4) for n in "ab")
    data = load(a, tokenizer, val=b)
    assert "bbbbb" in data.held_out.example()
    assert data.held_out.n_sequences == 1
    assert load(a, tokenizer).held_out is None
    for val in ("1", "-0.5", "nan"):
        with pytest.raises(InputError, match="expected a share"):
            load(a, tokenizer, val=val)


# ---------------------------------------------------------------- the cache


def count_builds(monkeypatch):
    builds = []
    build = prepare._build
    monkeypatch.setattr(prepare, "_build", lambda *args: builds.append(args[0]) or build(*args))
    return builds


def test_the_cache_is_used_when_nothing_changed_and_not_otherwise(tokenizer, tmp_path, monkeypatch):
    builds = count_builds(monkeypatch)
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    write(path, [{"prompt": "one", "completion": "two"}])
    expected = list(documents(load(str(path), tokenizer, cache=cache).batches(1)))
    for change, n in (({}, 1), ({"seq_len": 32}, 1), ({"seed": 1, "pack": False}, 1), ({"map": "text=prompt"}, 2)):
        load(str(path), tokenizer, cache=cache, **change)
        assert len(builds) == n, change
    shutil.copy(path, tmp_path / "b.jsonl")  # the same bytes under another name
    assert list(documents(load(str(tmp_path / "b.jsonl"), tokenizer, cache=cache).batches(1))) == expected
    assert len(builds) == 2
    write(path, [{"prompt": "one", "completion": "six"}])
    load(str(path), tokenizer, cache=cache)
    assert len(builds) == 3
    other = tmp_path / "other"
    other.mkdir()
    load(str(path), make_tokenizer(other, eos="<|im_end|>"), cache=cache)
    assert len(builds) == 4


def forge(change):
    """Changes a cache's meta.json, and its checksum with it."""

    def damage(folder):
        fields = unseal((folder / "meta.json").read_bytes(), 1, "meta.json")
        change(fields)
        (folder / "meta.json").write_bytes(seal(1, fields))

    return damage


def spoil(name, change):
    """Changes a file's bytes."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]


def add_one(word):
    """What meta.json says of the rows is wrong, and only its own checksum knows."""

    def change(content):
        fields = json.loads(content)
        return json.dumps(fields | {word: fields[word] + type(fields[word])(1)}).encode()

    return spoil("meta.json", change)


def as_table(table):
    return lambda file: np.save(file, np.array(table))


def as_archive(file):
    np.savez(file.with_suffix(".npz"), np.zeros(3))
    file.with_suffix(".npz").rename(file)


TABLES = {
    "rows of rows": as_table([[0, 1]]),
    "fractions": as_table([0.0, 1.0]),
    "backwards": as_table([0, 50, 3]),
    "far away": as_table([0, 1 << 62]),
    "empty": as_table(np.zeros(0, np.int64)),
    "an archive": as_archive,
    "a header that is no Python": lambda file: file.write_bytes(file.read_bytes().replace(b", }", b", {", 1)),
    "longer than memory": lambda file: file.write_bytes(file.read_bytes().replace(b"), }     ", b"00000000000,),}", 1)),
}


def with_its_checksum(name, table):
    """Another table, of which the checksum is right."""

    def damage(folder):
        TABLES[table](folder / f"{name}.npy")
        sum = zlib.crc32((folder / f"{name}.npy").read_bytes()[128:])
        forge(lambda fields: fields["crc32"].__setitem__(1 + (name == "trained"), sum))(folder)

    return damage


FILES = ("tokens", "offsets.npy", "trained.npy", "meta.json")
CHANGES = {"flip": flip, "cut": lambda content: content[:-3], "empty": lambda _: b""}
DAMAGES = {
    **{f"{file}, {how}": spoil(file, change) for file in FILES for how, change in CHANGES.items()},
    **{f"{file}, remove": lambda folder, file=file: (folder / file).unlink() for file in FILES},
    **{f"{word} and one": add_one(word) for word in ("rows", "bad", "format", "name", "first_bad")},
    "no rows": forge(lambda meta: meta.pop("rows")),
    "rows of text": forge(lambda meta: meta.update(rows="5")),
    "another key": forge(lambda meta: meta.update(key="x")),
    "ids beyond what it says": forge(lambda meta: meta.update(max_id=2)),
    "objects": forge(lambda meta: meta.update(dtype="O")),
    "no number": forge(lambda meta: meta.update(bytes=None)),
    "an endless number": forge(lambda meta: meta.update(bytes=10**400)),
    **{f"{name}, {table}": with_its_checksum(name, table) for name in ("offsets", "trained") for table in TABLES},
}


@pytest.mark.grid
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_again(tokenizer, tmp_path, monkeypatch, damage):
    path, cache = write(tmp_path / "a.jsonl", [{"text": "some text"}] * 5), tmp_path / "cache"
    seen = lambda data: (list(documents(data.batches(1))), data.report.lines())
    expected = seen(load(path, tokenizer, cache=cache))
    (folder,) = cache.iterdir()
    DAMAGES[damage](folder)
    builds = count_builds(monkeypatch)
    assert seen(load(path, tokenizer, cache=cache)) == expected
    assert len(builds) == 1
    assert len(list(cache.iterdir())) == 1


def test_a_build_that_stops_leaves_nothing(tokenizer, tmp_path, monkeypatch):
    path, cache = write(tmp_path / "a.jsonl", [{"text": "x"}] * 3), tmp_path / "cache"
    with monkeypatch.context() as patch:

        def full(*args):
            raise OSError(28, "No space left on device")

        patch.setattr("trireme.engine.data.cache.TokenWriter.add", full)
        with pytest.raises(OSError, match="No space left"):
            load(path, tokenizer, cache=cache)
    assert list(cache.iterdir()) == []
    (cache / "tokens-left.partial").mkdir()  # of a run that was killed
    assert load(path, tokenizer, cache=cache).n_sequences == 1


def test_a_disk_that_is_full_leaves_nothing(tmp_path):
    """A limit on the size of files stands in for the disk; the last write fails again when the file is closed."""
    path, cache = write(tmp_path / "a.jsonl", [{"input_ids": list(range(1000)) * 3}] * 100), tmp_path / "cache"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            load(path, None, cache=cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(cache.iterdir()) == []


def test_tokens_that_are_cut_while_they_are_read_are_an_error(tokenizer, tmp_path):
    """In a process of its own: where they are mapped, it is killed without a word."""
    path, cache = write(tmp_path / "a.jsonl", [{"text": "some text"}] * 5000), tmp_path / "cache"
    pid = fork()
    if not pid:
        try:
            data = load(path, tokenizer, cache=cache)
            before = list(documents(data.batches(1)))
            (file,) = cache.glob("*/tokens")
            os.truncate(file, 4096)
            assert list(documents(data.batches(1)))[:10] == before[:10]
        except StoreError as error:
            os._exit(
                0 if (error.filename, "was cut while the run was reading it" in str(error)) == (str(file), True) else 1
            )
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    load(path, tokenizer, cache=cache)  # made again


@pytest.mark.parametrize("cache", [True, False])
def test_no_file_stays_open_or_behind(tokenizer, tmp_path, monkeypatch, cache):
    """Also without a cache: then tokens lie in a temporary folder as long as the data live."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    path = write(tmp_path / "a.jsonl", [{"text": "some text"}] * 5)
    load(path, tokenizer)  # the tokenizer's process stays
    opened = len(os.listdir("/proc/self/fd"))
    data = load(path, tokenizer, cache=tmp_path / "cache" if cache else None)
    expected = [data.step(i, 2, 2)[0].ids.tolist() for i in range(3)]
    assert len(os.listdir("/proc/self/fd")) > opened
    assert len(os.listdir(tmp_path / "temporary")) == (not cache)
    assert [data.step(i, 2, 2)[0].ids.tolist() for i in range(3)] == expected
    del data
    assert len(os.listdir("/proc/self/fd")) == opened
    assert os.listdir(tmp_path / "temporary") == []


def test_several_processes_give_the_same(tokenizer, tmp_path, monkeypatch):
    rows = [{"messages": [TALK[0], {**TALK[1], "content": f"{i} é"}]} for i in range(40)]
    rows[17] = {"messages": [{"role": "user", "content": "\ufdd0"}, TALK[1]]}  # found bad in a worker only
    path = write(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr(prepare, "_BATCH_ROWS", 8)
    seen = []
    alone = load_dataset(
        [path], codec_of(tokenizer.folder), DataOptions(skip_bad=True), lambda *args: seen.append(args)
    )
    assert seen[-1] == ("a.jsonl", seen[-1][2], seen[-1][2])
    assert len(seen) > 5
    monkeypatch.setattr(prepare, "_SHARE", 1)
    monkeypatch.setattr(prepare.os, "sched_getaffinity", lambda _: {0, 1})
    together = load(path, tokenizer, skip_bad=True, seq_len=2048)
    assert list(documents(alone.batches(9))) == list(documents(together.batches(9)))
    assert "1 bad dropped (first: line 18" in together.report.lines()[0]


GROWTH = """
import resource, sys
from trireme.engine.data.dataset import DataOptions, load_dataset
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
small, big = sys.argv[1:]
load_dataset([small], None, DataOptions())
before = peak()
data = load_dataset([big], None, DataOptions(seq_len=4096))
print(data.tokens, peak() - before)
"""


@pytest.mark.full
def test_memory_does_not_grow_with_the_file(tmp_path):
    """28 MB of JSON in one array; as rows in memory they would take 200 MB."""
    row = json.dumps({"input_ids": list(range(200)) * 20})
    (tmp_path / "big.json").write_text("[" + ",\n".join([row] * 1500) + "]")
    small = write(tmp_path / "small.jsonl", [{"input_ids": [1, 2]}])
    run = [sys.executable, "-c", GROWTH, small, str(tmp_path / "big.json")]
    tokens, growth = subprocess.run(run, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    assert int(tokens) == 6_000_000
    assert int(growth) < 100e6


# ---------------------------------------------------------------- the report


def test_report(tokenizer, tmp_path):
    rows = [{"messages": [TALK[0], {**TALK[1], "content": "c" * n}]} for n in (3, 5, 9, 100)]
    rows.append({"messages": [{**TALK[0], "content": "q" * 90}, TALK[1]]})  # cut before the answer
    lines = load(write(tmp_path / "a.jsonl", rows), tokenizer, seq_len=64).report.lines()
    assert lines[0].endswith('a.jsonl: 5 rows, format "messages"')
    assert lines[1] == "327 tokens, 125 trained (38 %); length p50 33, p99 124, max 124"
    assert lines[2] == "at --seq-len 64: 2 rows are longer (40 %): 1 cut   (--long cut|drop|split|error)"
    assert lines[3] == "1 row dropped: nothing to learn in what is kept"
    assert lines[4].startswith("packed into 3 sequences of up to 64 tokens; ")
    assert len(lines) == 5


def test_what_a_template_does_silently_is_noted(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}")
    lines = load(
        write(tmp_path / "a.jsonl", [{"messages": TALK}]), tokenizer, chat_template=str(tmp_path / "t.jinja")
    ).report.lines()
    assert [line[:40] for line in lines if line.startswith("note")] == [
        "note: the chat template ends the assista",
        "note: the chat template leaves system me",
    ]


def notes(data):
    return [line.removeprefix("note: ") for line in data.report.lines() if line.startswith("note: ")]


def test_columns_that_are_not_read_are_named(tokenizer, tmp_path):
    rows = [{"messages": TALK, "id": 7}, {"messages": TALK, "id": None, "sour\x1bce": "x"}, {"messages": TALK}]
    path = write(tmp_path / "a.jsonl", rows)
    for _ in range(2):  # made, then from the cache
        line = load(path, tokenizer, cache=tmp_path / "cache").report.lines()[0]
        assert line.endswith('a.jsonl: 3 rows, format "messages"; not used: id, sour\\x1bce')


def test_what_a_template_leaves_out_of_the_answers_is_noted(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text(CHATML.replace("m.content", "m.content.split('</think>')[-1].strip()"))
    rows = [{"messages": [TALK[0], {**TALK[1], "content": "<think>\nHm!\n</think>\n\nanswer"}]}] * 2
    path = write(tmp_path / "a.jsonl", rows)
    said = notes(load(path, tokenizer, chat_template=str(tmp_path / "t.jinja")))
    assert said == [
        "the chat template leaves out 33 % of what the assistant says, which is not trained: to train it too, "
        "--chat-template FILE that writes it (as message.reasoning_content)"
    ]
    assert not notes(load(write(tmp_path / "b.jsonl", [{"messages": TALK}]), tokenizer))


def test_a_question_and_its_answer_without_the_models_template_are_a_warning(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text(CHATML)
    path = write(tmp_path / "a.jsonl", [{"prompt": "What?", "completion": "That."}] * 2)
    lines = load(path, tokenizer, chat_template=str(tmp_path / "t.jinja")).report.lines()
    (line,) = [line for line in lines if line.startswith("warning: ")]
    assert line == (
        "warning: prompt and completion are joined as they are, without the chat template; as question and answer, "
        "with it: --map instruction=prompt,output=completion"
    )


def test_unknown_tokens_and_a_missing_end_are_noted(tmp_path):
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path / "a.jsonl", [{"text": "a b a c"}, {"text": "b a b a"}])
    said = notes(load_dataset([path], load_codec(tmp_path), DataOptions()))
    assert said == [
        "12 % of the tokens are [UNK]: the tokenizer has none for this text",
        "the tokenizer has no end token, so where a text ends is not learned",
    ]


def test_text_that_a_tokenizer_drops_is_noted(tmp_path):
    """One without a token for what it does not know leaves it out without a word."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "</s>": 2}, []))
    core.add_special_tokens(["</s>"])
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    lost, kept = (write(tmp_path / f"{k}.jsonl", [{"text": k * 1000 + "a" * 10}]) for k in "xb")
    said = "1.01k characters become 11 tokens: the tokenizer drops what it does not know. Is it the one for this text?"
    for _ in range(2):  # made, then from the cache
        options = DataOptions(cache=tmp_path / "cache")
        assert notes(load_dataset([lost], load_codec(tmp_path), options)) == [said]
        assert notes(load_dataset([kept], load_codec(tmp_path), options)) == []


# ---------------------------------------------------------------- what can be wrong


def error_of(*args, **more):
    with pytest.raises(InputError) as error:
        load(*args, **more)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_bad_rows_are_counted_and_the_first_is_named(tokenizer, tmp_path):
    rows = [{"messages": TALK}] * 10
    rows[6] = {"messages": "hello"}
    path = write(tmp_path / "chats.jsonl", rows)
    assert error_of(path, tokenizer).endswith(
        "chats.jsonl line 7: 'messages' is a string, expected a list of {role, content}. "
        "1 of 10 rows is bad; --skip-bad drops and counts them."
    )
    data = load(path, tokenizer, skip_bad=True)
    assert (
        "10 rows, format \"messages\", 1 bad dropped (first: line 7: 'messages' is a string" in data.report.lines()[0]
    )
    assert sum(len(b.lengths) for b in data.batches(1)) == 9
    with open(path, "a") as file:
        file.write("{broken\n")
    assert "2 of 11 rows are bad" in error_of(path, tokenizer)


def test_errors_of_whole_files(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, [{"messages": TALK}, {"mixed": "x"}])
    assert "line 2: no known format has its keys ('mixed'); expected messages;" in error_of(str(path), tokenizer)
    write(path, [{"question": "q", "answer": "a"}])
    assert error_of(str(path), tokenizer).endswith("--map prompt=question,completion=answer. It is the only row.")
    wrong = error_of(str(path), tokenizer, map="prompt=questn,completion=answer")
    assert "--map names 'questn': there is no such column. Perhaps --map prompt=question,completion=answer." in wrong
    path.write_text("\n\n")
    assert error_of(str(path), tokenizer).endswith("holds no rows. Name another file with --data.")
    write(path, [{"input_ids": [0, 1], "labels": [-100, -100]}] * 3)
    message = error_of(str(path), tokenizer)
    assert message.startswith("no row of 3 has a trained token after masking: no text is marked")
    assert message.endswith("The first row begins: <s></s>")
    write(path, [{"prompt": "p" * 99, "completion": "c"}])
    assert error_of(str(path), tokenizer).startswith("no row is left: all are longer than --seq-len 64")
    assert "1 rows have more than --seq-len 64 tokens" in error_of(str(path), tokenizer, long="error")


def test_roles_out_of_order_are_what_the_template_says(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    path = write(tmp_path / "a.jsonl", [{"messages": TALK}])
    message = error_of(path, tokenizer, chat_template=str(tmp_path / "t.jinja"))
    assert "line 1: the chat template refuses it: roles must alternate" in message


def test_ids_beyond_the_vocabulary(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "é"}])
    assert load(path, tokenizer, vocab_size=260).n_sequences == 1
    assert "the model's vocabulary is 100: the tokenizer does not belong" in error_of(path, tokenizer, vocab_size=100)
    for bad in (-1, 1 << 40):
        path = write(tmp_path / "b.jsonl", [{"input_ids": [1, bad]}])
        assert "holds a number that is not a token id" in error_of(path, tokenizer)
    path = write(tmp_path / "c.jsonl", [{"input_ids": [1, 70_000]}, {"input_ids": [1, 2]}])
    assert "line 1: token id 70000 is in no vocabulary of 261. 1 of 2 rows" in error_of(path, tokenizer)
    assert "token id 70000, the model's vocabulary is 260" in error_of(path, None, vocab_size=260)


def test_tokens_of_images_are_refused(tokenizer, tmp_path):
    """By name, in a row of ids or of text; and dropped on demand."""
    path = write(tmp_path / "a.jsonl", [{"input_ids": [1, 7, 2]}, {"input_ids": [1, 2]}])
    media = ((9, "image_token_id"), (7, "video_token_id"))
    message = error_of(path, tokenizer, media=media)
    assert 'line 1: holds the token of "video_token_id" in config.json, but only text is trained. 1 of 2' in message
    assert load(path, tokenizer, media=media, skip_bad=True).tokens == 2
    cache = tmp_path / "cache"  # what another model may train on is not taken from there
    assert load(path, tokenizer, cache=cache).tokens == 5
    assert "video_token_id" in error_of(path, tokenizer, media=media, cache=cache)


def test_a_huge_line(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"input_ids": [7] * 2_000_000}, {"text": "x"}][:1])
    data = load(path, tokenizer, seq_len=2048)
    assert data.n_sequences == 1
    assert "1 row is longer (100 %): 1 cut" in data.report.lines()[2]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("tokenizer.json", "{", "is not JSON"),
        ("tokenizer.json", "[]", "holds a list, expected an object"),
        ("tokenizer.json", "{}", "is not a tokenizer that can be read"),
        ("tokenizer_config.json", "nope", "is not JSON"),
        ("tokenizer_config.json", '{"fast_tokenizer_files": ["tokenizer.4.0.json"]}', "names others than tokenizer.j"),
        ("tokenizer_config.json", '{"chat_template": 5}', "'chat_template' is neither a string nor a list"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "the chat template does not compile, line 1"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "rag", "template": "x"}]}',
            "chat templates rag, but no default",
        ),
    ],
)
def test_tokenizer_folders_that_cannot_be_used(tmp_path, name, content, what):
    make_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    path = write(tmp_path / "a.jsonl", [{"messages": TALK}])
    with pytest.raises(InputError) as error:
        load_dataset([path], load_codec(tmp_path), DataOptions())
    assert what in str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from([Text, Completion, Chat]), min_size=1, max_size=1),
    st.lists(st.text(st.sampled_from("ab é日\n"), min_size=1, max_size=30), min_size=1, max_size=12),
    st.integers(8, 80),
    st.booleans(),
)
def test_labels_are_the_next_token_and_trained_text_comes_back(tmp_path_factory, kind, texts, seq_len, pack):
    """Whatever the rows and the length: a label is its document's next token, and what is learned is the answer."""
    folder = tmp_path_factory.mktemp("any")
    tokenizer = make_tokenizer(folder, chat_template=CHATML)
    rows = {
        Text: [{"text": t} for t in texts],
        Completion: [{"prompt": "Q" + t, "completion": t + "!"} for t in texts],
        Chat: [{"messages": [TALK[0], {"role": "assistant", "content": t + "!"}]} for t in texts],
    }[kind[0]]
    data = load(write(folder / "a.jsonl", rows), tokenizer, seq_len=seq_len, pack=pack, long="split")
    learned = []
    for ids, labels in documents(data.batches(3)):
        assert len(ids) <= seq_len
        for t, label in enumerate(labels[:-1]):
            assert label in (ids[t + 1], -100)
        learned += [label for label in labels if label >= 0]
    end = {Text: 1, Completion: 1, Chat: 3}[kind[0]]
    expected = [i for t in texts for i in [*tokenizer.encode([t + "!" * (kind[0] is not Text)])[0][0].tolist(), end]]
    assert sorted(learned) == sorted(expected)


# ---------------------------------------------------------------- real data


def test_real_files(real):
    tokenizer = load_tokenizer(real / "stories260k")
    options = {"seq_len": 512, "vocab_size": 512}
    stories = load(str(real / "data" / "tinystories_sample_cs336.txt"), tokenizer, **options)
    assert stories.report.lines()[0].endswith('tinystories_sample_cs336.txt: 5 rows, format "text"')
    assert all(ids[0] == 1 and ids[-1] == 2 for ids, _ in documents(stories.batches(2)))
    alpaca = load(str(real / "data" / "rasbt_instruction_data.json"), tokenizer, val="0.05", **options)
    assert alpaca.held_out.n_sequences > 10
    assert alpaca.report.used > 0.85
    calls = load(
        str(real / "data" / "glaive_toolcall_en_demo.json"),
        load_tokenizer(real / "tokenizers" / "minimind"),
        seq_len=2048,
    )
    assert "300 rows" in calls.report.lines()[0]
    assert "bad" not in calls.report.lines()[0]


def test_a_checkpoint_without_tokenizer_trains_on_tokens(real, tmp_path):
    shutil.copytree(real / "capp-gpt2", tmp_path / "capp", ignore=shutil.ignore_patterns("tokenizer.json"))
    assert load_tokenizer(tmp_path / "capp") is None
    path = write(tmp_path / "a.jsonl", [{"input_ids": [49, 3, 8, 51], "labels": [-100, -100, 8, 51]}] * 4)
    data = load(path, None, vocab_size=53)
    assert sum(batch.trained for batch in data.batches(1)) == 8


def test_reading_is_keyed_by_content(tmp_path):
    """The key must not change from one process to the next: sets and hashes of objects have no place in it."""
    from trireme.engine.data.files.folders import find_data

    (file,) = find_data(write(tmp_path / "a.jsonl", [{"text": "x"}])).files
    assert Reading(DataOptions(), None, {}, tmp_path).key(file) == KEY


KEY = "5a0189ea0fac1dbe02372319"


def test_the_first_rows_of_each_file(tmp_path):
    """Of the training files alone; what is held out of them is a share of these rows."""
    names = []
    for k, rows in enumerate((5, 2, 9)):
        path = tmp_path / f"{k}.jsonl"
        path.write_text("".join(json.dumps({"input_ids": [k, row, 7, 8]}) + "\n" for row in range(rows)))
        names.append(str(path))
    ids = lambda data: sorted(tuple(mb.ids[:2].tolist()) for mb in data.batches(1))
    few = load_dataset(names, None, DataOptions(seq_len=8, max_samples=3, pack=False))
    assert "note: --max-samples 3: 8 of 16 rows" in few.report.lines()
    assert ids(few) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    parted = load_dataset(names, None, DataOptions(seq_len=8, max_samples=3, pack=False, val="0.25"))
    assert (parted.n_sequences, parted.held_out.n_sequences) == (6, 2)
    assert sorted(ids(parted) + ids(parted.held_out)) == ids(few)
    apart = load_dataset(names[:1], None, DataOptions(seq_len=8, max_samples=3, pack=False, val=names[2]))
    assert (apart.n_sequences, apart.held_out.n_sequences) == (3, 9)
