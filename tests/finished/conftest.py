"""Finished models: a chat model of bytes, and runs of a small checkpoint."""

from pathlib import Path

import pytest
from chats import CHATML, make_tokenizer
from runs import ALPACA, CLASSES, FINISHED, PAIRS, make_small, tuned, write_rows
from stories import make_text
from tiny import LLAMA, oracle

from trireme.engine.run import cli
from trireme.engine.run.loop import train
from trireme.engine.run.options import every


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory) -> Path:
    """A random model whose tokens are bytes, of a vocabulary padded by 10, with a chat template."""
    folder = tmp_path_factory.mktemp("bytes") / "model"
    reference, _ = oracle("llama", LLAMA | dict(vocab_size=270, max_position_embeddings=256, eos_token_id=1))
    reference.save_pretrained(folder)
    make_tokenizer(folder, chat_template=CHATML, tokenizer_class="PreTrainedTokenizerFast")
    (folder / "generation_config.json").unlink()
    return folder


@pytest.fixture
def here(byte_model, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(byte_model)
    return tmp_path


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Name of FINISHED -> (folder of the finished run, its data). They are trained when they are asked for."""
    folder, done = make_small(tmp_path_factory.mktemp("finished")), {}
    make_text(folder / "stories.txt", 12, seed=1)
    write_rows(folder / "pairs.jsonl", PAIRS)
    write_rows(folder / "classes.jsonl", CLASSES)
    write_rows(folder / "alpaca.jsonl", ALPACA)

    def run(name: str) -> tuple[Path, Path]:
        if name not in done:
            given = dict(FINISHED[name])
            rows = given.pop("rows")
            more = dict(val=str(folder / rows), eval_tokens=10**6, eval_every=every("3"), lr=2e-3)
            train(tuned(folder, name, rows, **given | more))
            done[name] = folder / name, folder / rows
        return done[name]

    return run


@pytest.fixture
def said(capsys):
    """Calls the command: (standard output, standard error)."""

    def call(*argv: str, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        assert cli.main([str(word) for word in argv]) == code
        return tuple(capsys.readouterr())

    return call
