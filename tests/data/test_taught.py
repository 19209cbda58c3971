"""A teacher's scores: matched by document and label, damaged or foreign ones refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from trireme.engine.data.dataset import DataOptions, load_dataset
from trireme.engine.data.taught import FORMAT, NAMES, part_sum, read_index, taught_by
from trireme.models.config import InputError

K = 2


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [*range(i, i + 5)]}) + "\n" for i in range(4)))
    return load_dataset([str(path)], None, DataOptions(seq_len=16))


def scored(folder, data, **change):
    """Scores of all documents in order; the likeliest token of each label is the label."""
    (file,) = data.files
    (folder / "000").mkdir(parents=True)
    labels = np.concatenate([np.arange(i + 1, i + 5) for i in range(4)]).astype(np.int32)
    shares = np.log(np.tile([[0.6, 0.3]], (len(labels), 1)))
    tables = {
        "document": np.arange(4), "start": np.zeros(4, np.int64), "length": np.full(4, 5), "trained": np.full(4, 4),
        "label": labels, "rest": np.full(len(labels), np.log(0.1), np.float32),
        "ids": np.stack([labels, labels + 1], 1).astype(np.int32), "logps": shares.astype(np.float16),
    } | change  # fmt: skip
    said = {"format": FORMAT, "key": "k", "first": "0", "batches": "1"}
    path = folder / "000" / "part-00000.safetensors"
    save_file(tables, path, said | {"sum": part_sum(said, tables)})
    source = {"data": "rows", "folder": "000", "files": {file.meta["key"]: file.n_documents}}
    names = {"format": FORMAT, "model": "m", "tokenizer": "t", "top_k": K, "sources": [source]}
    (folder / NAMES).write_text(json.dumps(names))
    return path


def test_rows_of_a_teacher(tmp_path, data):
    scored(tmp_path / "s", data)
    teacher = taught_by(read_index(tmp_path / "s"), data, 99)
    for i, batch in enumerate(data.batches(1)):
        at = np.arange(len(batch.lengths)) + sum(len(b.lengths) for b in [*data.batches(1)][:i])
        taught = teacher.of(at)
        assert taught.ids[:, 0].tolist() == batch.labels[batch.labels >= 0].tolist()
        assert np.allclose(np.exp(taught.logps.astype(float)).sum(1) + np.exp(taught.rest), 1, atol=0.01)
    with pytest.raises(InputError, match="vocabulary"):
        taught_by(read_index(tmp_path / "s"), data, 3)


@pytest.mark.parametrize("at", [-1, -9, -40, -100])
def test_one_bit_that_is_flipped(tmp_path, data, at):
    path = scored(tmp_path / "s", data)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        taught_by(read_index(tmp_path / "s"), data, 99)


def test_scores_of_something_else(tmp_path, data):
    others = dict(label=np.zeros(16, np.int32), document=np.arange(4) + 7, rest=np.zeros(16, np.float64))
    for name, culprit in (("label", "lacks 4"), ("document", "lacks 4"), ("rest", "not a file of scores")):
        scored(tmp_path / name, data, **{name: others[name]})
        with pytest.raises(InputError, match=culprit):
            taught_by(read_index(tmp_path / name), data, 99)
    for content in ("{", "{}", '{"format": "trireme scores 1"}'):
        (tmp_path / "rest" / NAMES).write_text(content)
        with pytest.raises(InputError, match=NAMES):
            read_index(tmp_path / "rest")
