"""Steps of preference tuning next to those of TRL's trainers, which `pip install trl` adds to the tests."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from runs import make_small, options
from transformers import AutoModelForCausalLM, AutoTokenizer

from trireme.engine.run.begin import reference
from trireme.engine.run.train import finetune

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
WORDS = ["the", "cat", "sat", "on", "mat", "and", "dog", "ran", "to", "old", "red", "house", "by", "sea"]
METHODS = {  # ours, TRL's
    "dpo": (dict(beta=0.5), dict(loss_type="sigmoid", beta=0.5)),
    "ipo": (dict(beta=0.4), dict(loss_type="ipo", beta=0.4)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where, random = make_small(tmp_path_factory.mktemp("trl")), np.random.default_rng(0)
    words = lambda few, many: " ".join(random.choice(WORDS, random.integers(few, many)))
    rows = [dict(prompt=words(2, 6), chosen=" " + words(2, 9), rejected=" " + words(1, 7)) for _ in range(12)]
    (where / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return where


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_steps_are_those_of_trl(folder, method, tmp_path, monkeypatch):
    """Each of all rows, so that their order is of no concern."""
    from datasets import load_dataset  # TRL needs it

    monkeypatch.setattr(reference, "cache_folder", lambda: tmp_path)
    ours, theirs = METHODS[method]
    given = dict(
        data=(str(folder / "pairs.jsonl"),),
        max_steps=3,
        warmup=0.0,
        schedule="constant",
        batch_size=12,
        lr=5e-4,
        no_pack=True,
    )
    finetune(replace(options(folder, tmp_path / "out", "gpu"), method=method, **given | ours))
    logged = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    logged = [record for record in logged if "grad_norm" in record]
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoint")
    tokenizer.pad_token = tokenizer.eos_token
    config = trl.DPOConfig(
        str(tmp_path / "trl"), per_device_train_batch_size=12, max_steps=3, learning_rate=5e-4, adam_beta2=0.95,
        weight_decay=0.01, lr_scheduler_type="constant", logging_steps=1, report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, max_length=None, optim="adamw_torch",
        save_strategy="no", **theirs,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32)
    rows = load_dataset("json", data_files=str(folder / "pairs.jsonl"), split="train", cache_dir=str(tmp_path))
    trainer = trl.DPOTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    seen = [record for record in trainer.state.log_history if "loss" in record]
    for name in ("loss", "grad_norm", "rewards/margins", "rewards/chosen", "rewards/accuracies"):
        assert [r[name] for r in logged] == pytest.approx([r[name] for r in seen], rel=1e-4, abs=1e-6), name
    ended = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    start = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32).state_dict()
    for name, weight in trainer.model.state_dict().items():
        assert (ended[name] - weight).norm() < 1e-3 * (weight - start[name]).norm() + 1e-7, name
