"""Steps of preference tuning and of reward models next to those of TRL's trainers.

`pip install trl` adds them to the tests.
"""

import importlib
import json
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from runs import WORDS, make_small, options, records, text, write_rows
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trireme.engine.run.begin import reference
from trireme.engine.run.train import finetune
from trireme.models.lora import initial

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
ROWS, LR, SEQ_LEN = 12, 5e-4, 128
PREFERENCES = ("rewards/margins", "rewards/chosen", "rewards/accuracies")
SCORES = ("accuracy", "margin", "min_reward", "mean_reward", "max_reward")


class Compared(NamedTuple):
    ours: dict[str, Any]
    trainer: str  # TRL's
    theirs: dict[str, Any]
    data: str = "pairs"
    logged: tuple[str, ...] = PREFERENCES


METHODS = {
    "dpo": Compared(dict(beta=0.5), "DPO", dict(loss_type="sigmoid", beta=0.5)),
    "ipo": Compared(dict(beta=0.4), "DPO", dict(loss_type="ipo", beta=0.4)),
    "simpo": Compared(
        dict(beta=2.0, simpo_gamma=0.7, label_smoothing=0.1),
        "experimental.cpo.CPO",
        dict(loss_type="simpo", cpo_alpha=0.0, beta=2.0, simpo_gamma=0.7, label_smoothing=0.1),
        logged=(*PREFERENCES, "logps/chosen", "logps/rejected"),
    ),
    # TRL's first term is the mean over all tokens, prompts too: ours where there are none and lengths are equal
    "orpo": Compared(
        dict(beta=0.3),
        "experimental.orpo.ORPO",
        dict(beta=0.3),
        data="answers",
        logged=(*PREFERENCES, "logps/chosen", "logps/rejected"),
    ),
    "kto": Compared(
        dict(beta=0.5, desirable_weight=1.5, undesirable_weight=0.8),
        "KTO",
        dict(beta=0.5, desirable_weight=1.5, undesirable_weight=0.8),
        data="labels",
        logged=("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl"),
    ),
    "reward": Compared(
        dict(center_rewards_coefficient=0.05),
        "Reward",
        dict(center_rewards_coefficient=0.05),
        data="margins",
        logged=SCORES,
    ),
}
METHODS["dpo of turns"] = METHODS["dpo"]._replace(data="turns")
METHODS["reward of turns"] = METHODS["reward"]._replace(data="turns")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where, random = make_small(tmp_path_factory.mktemp("trl")), np.random.default_rng(0)
    words = partial(text, random)
    pairs = [dict(prompt=words(2, 6), chosen=" " + words(2, 9), rejected=" " + words(1, 7)) for _ in range(ROWS)]
    labels = [dict(prompt=row["prompt"], completion=row["chosen"], label=i % 3 > 0) for i, row in enumerate(pairs)]
    labels[-1]["completion"] = labels[1]["completion"]  # TRL compares the first answer with the last, we with the next
    margins = [row | dict(margin=i % 2 / 2) for i, row in enumerate(pairs)]
    answers = [row | dict(prompt="", chosen=" " + " ".join(random.permutation(WORDS[:6]))) for row in pairs]
    turn = lambda role, text: [dict(role=role, content=text.strip())]
    roles = dict(prompt="user", chosen="assistant", rejected="assistant")
    turns = [{key: turn(roles[key], text) for key, text in row.items()} for row in pairs]
    for name, rows in dict(pairs=pairs, labels=labels, margins=margins, answers=answers, turns=turns).items():
        write_rows(where / f"{name}.jsonl", rows)
    config = where / "checkpoint" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict(chat_template=TEMPLATE)))
    write_begins(where / "checkpoint" / "tokenizer.json")
    return where


def write_begins(path):
    """The tokenizer writes its begin token, as TRL's trainers of orpo and simpo do in any case."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    tokenizer.save(str(path))


def model_of(folder, method):
    """transformers' model as a run begins."""
    if method != "reward":
        return AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32)
    kind = AutoModelForSequenceClassification
    model = kind.from_pretrained(folder / "checkpoint", num_labels=1, dtype=torch.float32)
    model.score.weight.data = initial("score.weight", tuple(model.score.weight.shape), model.config.initializer_range)
    return model


def trained_by_trl(folder, of, model, data, work):
    """Trains `model` for three steps; TRL's records of them."""
    from datasets import load_dataset  # TRL needs it

    module, _, name = of.trainer.rpartition(".")
    place = importlib.import_module(f"trl.{module}" if module else "trl")
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoint")
    tokenizer.pad_token = tokenizer.eos_token
    config = getattr(place, f"{name}Config")(
        str(work / "trl"), per_device_train_batch_size=ROWS, max_steps=3, learning_rate=LR, adam_beta2=0.95,
        weight_decay=0.01, lr_scheduler_type="constant", logging_steps=1, report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, max_length=SEQ_LEN, optim="adamw_torch", save_strategy="no", **of.theirs,
    )  # fmt: skip
    rows = load_dataset("json", data_files=data, split="train", cache_dir=str(work))
    trainer = getattr(place, f"{name}Trainer")(model, args=config, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


@pytest.mark.full
@pytest.mark.parametrize("name", METHODS)
def test_steps_are_those_of_trl(folder, name, tmp_path, monkeypatch):
    """Each of all rows, so that their order is of no concern."""
    monkeypatch.setattr(reference, "cache_folder", lambda: tmp_path)
    of, method, out = METHODS[name], name.split()[0], tmp_path / "out"
    data = str(folder / f"{of.data}.jsonl")
    given = dict(data=(data,), max_steps=3, warmup=0.0, schedule="constant", batch_size=ROWS, lr=LR, no_pack=True)
    finetune(replace(options(folder, out, "gpu"), method=method, seq_len=SEQ_LEN, **given | of.ours))
    logged = records(out, "grad_norm")
    model = model_of(folder, method)
    start = {key: weight.clone() for key, weight in model.state_dict().items()}
    seen = trained_by_trl(folder, of, model, data, tmp_path)
    assert len(seen) == 3
    for key in ("loss", "grad_norm", *of.logged):
        assert [r[key] for r in logged] == pytest.approx([r[key] for r in seen], rel=1e-4, abs=1e-6), key
    ended = type(model).from_pretrained(out, dtype=torch.float32).state_dict()
    for key, weight in model.state_dict().items():
        assert (ended[key] - weight).norm() < 1e-3 * (weight - start[key]).norm() + 1e-7, key
