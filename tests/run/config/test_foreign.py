"""Configuration files of other trainers: what of them is read, ignored, or refused, key by key."""

import itertools
import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from trireme.engine.run.command import parse
from trireme.engine.run.config.config_file import Refused, read_options
from trireme.engine.run.config.foreign_config import RENAMED
from trireme.engine.run.config.option_names import ELSEWHERE, FIELDS
from trireme.engine.run.main import main
from trireme.models.config import InputError

RECIPES = yaml.safe_load((Path(__file__).parent / "recipes.yaml").read_text())
TABLE = (Path(__file__).parents[3] / "docs/coming-from.md").read_text()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    sets = {name: {"file_name": f"{name}.json"} for name in ("identity", "alpaca_en_demo")}
    sets["renamed"] = {"file_name": "renamed.json", "columns": {"prompt": "question"}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(sets))


def read(text, *flags, said=None):
    Path("c.yaml").write_text(text)
    return parse(["--config", "c.yaml", *flags], say=None if said is None else said.append)


def refused(text, *flags):
    """A line for each key."""
    with pytest.raises(InputError) as error:
        read(text, *flags)
    one = str(error.value).removeprefix("c.yaml: ")
    return list(error.value.lines) if isinstance(error.value, Refused) else [one]


def without(recipe, keys):
    for key in keys:
        *within, last = key.split(".")
        place = recipe
        for part in within:
            place = place[part]
        del place[last]
    return recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_stock_recipe_starts_or_lists_each_key_that_remains(name):
    recipe = RECIPES[name]
    remains, text = recipe["remains"], recipe["text"]
    if remains:
        assert sorted(line.split(" ")[0] for line in refused(text)) == sorted(remains)
        text = yaml.safe_dump(without(yaml.safe_load(text), remains))
    loader = {"dataset._component_", "hf_dataset"} & set(remains)
    options = read(text, *(["--data", "a.jsonl"] if loader else []))
    for field, value in recipe["options"].items():
        found = getattr(options, field)
        found = list(found) if isinstance(found, tuple) else found
        assert (str(found) if field.endswith("_every") else found) == value, field


@pytest.mark.parametrize("name", RECIPES)
def test_the_table_of_the_docs_has_the_same(name):
    (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", TABLE, re.MULTILINE)
    assert re.findall(r"`([^`]+)`", row) == RECIPES[name]["remains"]


def test_a_line_for_each_key_and_one_for_all_that_are_ignored(capsys):
    text = RECIPES["axolotl, QLoRA"]["text"]
    Path("c.yaml").write_text(text)
    assert main(["--config", "c.yaml"]) == 2
    said = capsys.readouterr()
    first, *lines = said.err.splitlines()
    assert first == "error: c.yaml: 2 keys cannot be taken. Change them, or leave them out:"
    assert [line.split()[0] for line in lines] == ["special_tokens.bos_token", "special_tokens.eos_token"]
    lines = list[str]()
    read("model: m\ndata: a.jsonl\nbf16: true\ntemplate: llama3\nwarmup_steps:\nfsdp: full_shard\n", said=lines)
    assert lines == [
        "ignored  template llama3: the checkpoint's own chat template is used, or a .jinja file of --chat-template",
        "ignored  c.yaml: bf16, fsdp",
    ]


BASE = "model: m\ndata: a.jsonl\n"
READ = [
    ("load_in_4bit: false\nreport_to: none\nwandb_mode: disabled\nfp16:\nfsdp: []\n", {}),
    ("neftune_noise_alpha: 0\n", dict(neftune=0.0)),
    ("a_key_of_a_later_version: false\nanother:\n", {}),
    ("per_device_train_batch_size: 4\n", dict(batch_size=4)),
    ("batch_size: '2'\ngradient_accumulation_steps: 8.0\n", dict(batch_size=16)),
    ("micro_batch_size: 2\nbatch_size: 32\n", dict(batch_size=32, micro_batch=2)),
    ("adam_beta2: 0.999\n", dict(betas=(0.9, 0.999))),
    ("adam_beta1: 0.8\nadam_beta2: 0.95\nadam_epsilon: 1.0e-8\n", dict(betas=(0.8, 0.95))),
    ("optim: adamw_torch_fused\n", dict(adam_bits=None)),
    ("optim: paged_adamw_8bit\n", dict(adam_bits=8)),
    ("warmup_steps: 20\nwarmup_ratio: 0.1\n", dict(warmup=20)),
    ("packing: false\n", dict(no_pack=True)),
    ("chat_template_kwargs: {b: [1], a: false}\n", dict(chat_template_kwargs='{"a": false, "b": [1]}')),
    ("chat_template_kwargs: '{\"a\": 1}'\n", dict(chat_template_kwargs='{"a": 1}')),
    ("enable_thinking: false\n", dict(chat_template_kwargs='{"enable_thinking": false}')),
    ("sample_packing: true\n", dict(no_pack=False)),
    ("train: true\ntorch_dtype: bfloat16\nmax_steps: -1\nval_set_size: 0.0\nresume_from_checkpoint: false\n",
     dict(train=(), dtype="bf16", max_steps=None, val=None, resume=None)),
    ("chat_template: tokenizer_default\n", dict(chat_template=None)),
    ("chat_template: qwen3\n", dict(chat_template=None)),
    ("chat_template: chatml\n", dict(chat_template="chatml")),
    ("excess_length_strategy: drop\nreport_to: [wandb, trace]\n", dict(long="drop", log=("wandb", "trace"))),
    ("finetuning_type: lora\n", dict(lora=8, lora_alpha=None)),
    ("finetuning_type: full\nlora_rank: 8\nlora_alpha: 16\n", dict(lora=None, lora_alpha=None)),
    ("adapter:\nlora_r: 32\n", dict(lora=None)),
    ("use_peft: true\n", dict(lora=16)),
    ("use_peft: false\nlora_r: 16\n", dict(lora=None)),
    ("adapter: qlora\nlora_r: 8\n", dict(lora=8, base="nf4")),
    ("adapter: qlora\nlora_r: 8\nload_in_4bit: true\nbnb_4bit_quant_type: nf4\n", dict(lora=8, base="nf4")),
    ("use_peft: true\nload_in_4bit: true\n", dict(lora=16, base="nf4")),
    ("quantization_bit: 4\nfinetuning_type: lora\n", dict(lora=8, base="nf4")),
    ("adapter: runs/a\n", dict(adapter="runs/a", lora=None)),
    ("adapter: lora\nlora_model_dir: runs/a\nlora_r: 16\nlora_alpha: 8\n", dict(adapter="runs/a", lora=None)),
    ("fine_tune_type: lora\n", dict(lora=8, lora_alpha=160.0)),
    ("lora_r: 16\nlora_alpha: 32\nuse_rslora: true\n", dict(lora_alpha=32.0, rslora=True)),
    ("lora_r: 16\nlora_target_linear: true\n", dict(lora_targets=("all-linear",))),
    ("load_best_model_at_end: true\nval_size: 0.1\n", dict(export="best")),
    ("epochs: 2\nmax_steps_per_epoch: 50\n", dict(max_steps=100, epochs=None)),
    ("dataset_text_field: body\n", dict(map="text=body")),
    ("special_tokens: {pad_token: x}\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n", {}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), READ)
def test_keys_of_others_become_options(text, expected):
    options = read(BASE + text)
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(("text", "files"), [
    ("datasets: [{path: a.jsonl, type: alpaca}, {path: b.jsonl}]", ("a.jsonl", "b.jsonl")),
    ("datasets: [{path: json, data_files: [a.jsonl, b.jsonl], split: train, ds_type: json}]", ("a.jsonl", "b.jsonl")),
    ("dataset: identity", ("data/identity.json",)),
    ("dataset: [identity, b.jsonl]", ("data/identity.json", "b.jsonl")),
    ("dataset: someone/rows", ("someone/rows",)),
    ("dataset: {source: json, data_files: a.jsonl}", ("a.jsonl",)),
])  # fmt: skip
def test_data_of_others(text, files):
    assert read(f"model: m\n{text}\n").data == files


@pytest.mark.parametrize(("text", "method", "beta"), [
    ("stage: dpo\npref_beta: 0.2\npref_ftx: 0.0", "dpo", 0.2),
    ("stage: dpo\npref_loss: sigmoid", "dpo", None),
    ("stage: dpo\npref_loss: simpo", "simpo", None),
    ("stage: kto\npref_beta: 0.1", "kto", 0.1),
    ("stage: sft", "sft", None),
    ("stage: rm", "reward", None),
    ("reward_model: true", "reward", None),
    ("task_type: seq_cls\nnum_labels: 3", "classify", None),
    ("task_type: causal_lm", "sft", None),
    ("rl: orpo\nrl_beta: 0.3", "orpo", 0.3),
])  # fmt: skip
def test_preferences_of_others(text, method, beta):
    found = read(f"{BASE}{text}\n")
    assert (found.method, found.beta) == (method, beta)


REFUSED = [
    ("optim: adafactor", "optim adafactor: the optimizer is AdamW, and --adam-bits 8 keeps its moments in 8 bits"),
    ("adam_epsilon: 1.0e-6", "adam_epsilon 1e-06: it is 1e-8; leave it out."),
    ("stage: ppo", "stage ppo: --method is sft, dpo, ipo, orpo, simpo, kto, reward or classify."),
    ("stage: dpo\npref_loss: hinge", "pref_loss hinge: --method dpo, ipo, orpo or simpo."),
    ("assistant_only_loss: false", "assistant_only_loss false: of conversations, and of prompts with completions"),
    ("train_on_inputs: true", "train_on_inputs true: prompts are not trained on; leave it out."),
    ("shuffle: false", "shuffle false: rows are shuffled by --seed; leave it out."),
    ("val_set_size: 200", "val_set_size 200: --val takes a file, or a share of --data such as 0.02."),
    ("per_device_train_batch_size: auto", "per_device_train_batch_size auto: expected a whole number of at least 1."),
    ("per_device_train_batch_size: true", "per_device_train_batch_size true: expected a whole number of at least 1."),
    ("gradient_accumulation_steps: 4", "gradient_accumulation_steps 4: --batch-size is the sequences of a whole step"),
    ("plugins: [axolotl.integrations.liger.LigerPlugin, my.Plugin]", "plugins axolotl.integrations.liger.LigerPlugin,"),
    ("finetuning_type: freeze", "finetuning_type freeze: --lora 16 trains adapters, and without it everything is"),
    ("load_in_8bit: true", "load_in_8bit true: --base fp8 stores the frozen base in 8 bits, of --lora 16."),
    ("quantization_bit: 8", "quantization_bit 8: --base nf4 stores the frozen base in 4 bits, of --lora 16."),
    ("load_in_4bit: true\nbnb_4bit_quant_type: fp4", "bnb_4bit_quant_type fp4: --base nf4 is the 4 bits"),
    ("adapter: dora\nlora_r: 8", "adapter dora: DoRA is not supported; write lora."),
    ("report_to: trackio", "report_to trackio: --log takes tensorboard, wandb, mlflow, comet and trace; leave it out."),
    ("lora_r: 8\nlora_target_modules: '.*[qv]_proj'", "lora_target_modules .*[qv]_proj: it is a regular expression"),
    ("output_dir: ${here}/out", "output_dir ${here}/out: write what it stands for."),
    ("max_steps_per_epoch: -.inf", "max_steps_per_epoch: '-inf' is not a whole number of at least 1."),
    ("chat_template_kwargs: {2026-03-31: x}", "chat_template_kwargs: one of its keys is not text. Write it in quotes."),
    ("schedule: square", "schedule: 'square' is not one of cosine, linear, constant, constant_with_warmup, poly"),
    ("optimizer: {lr: 1e-5, dampening: 1}", "unknown option --optimizer.dampening. See --help."),
    ("lr: 1e-5\nlearning_rate: 1e-5", "learning_rate is --lr, which is given already. Leave one out."),
    ("sample_packing: true\npacking: true", "packing and sample_packing say the same. Leave one out."),
    ("resume_from_checkpoint: runs/a", "resume_from_checkpoint belongs on the command line. Leave it out here."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), REFUSED)
def test_what_is_not_done_here_is_refused_with_what_to_do(text, says):
    (line,) = refused(f"{BASE}{text}\n")
    assert line.startswith(says)


@pytest.mark.parametrize(("text", "says"), [
    ("dataset: renamed", "dataset renamed: not in data/dataset_info.json. Name the files: --data FILE."),
    ("dataset: alpaca_zh\ndataset_dir: other", "dataset alpaca_zh: not in other/dataset_info.json. Name the files"),
    ("datasets: [{path: a.jsonl, type: {field_instruction: q}}]", "datasets.0.type.field_instruction q: --data takes"),
    ("datasets: [{path: a.jsonl, type: input_output}]", "datasets.0.type input_output: the format is found from the"),
])  # fmt: skip
def test_data_that_is_not_found_is_refused_unless_it_is_typed(text, says):
    (line,) = refused(f"model: m\n{text}\n")
    assert line.startswith(says)
    assert read(f"model: m\n{text}\n", "--data", "b.jsonl").data == ("b.jsonl",)


def test_a_base_in_another_form_of_4_bits_is_refused():
    lines = refused(f"{BASE}quantization_bit: 4\nquantization_method: hqq\n")
    assert [line.split(" --base")[0] for line in lines] == ["quantization_bit 4:", "quantization_method hqq:"]


ODD = (None, True, False, 0, -1, 2.5, 10**30, "x", "", "${a}", "0", [], ["a", 1], [[1], {"b": 2}], {}, {"path": "x"},
       {"a": {"b": [1]}}, [{"path": "json", "data_files": {"a": 1}}, {"path": 7}], float("nan"))  # fmt: skip


@pytest.mark.full
def test_no_value_of_any_key_is_more_than_refused():
    theirs = itertools.chain.from_iterable(theirs.names.split() for theirs in ELSEWHERE)
    keys = {re.sub(r"\W*\*\W*", "a", key).split(".")[0] for key in [*theirs, *FIELDS, *RENAMED]}
    messages = []
    for key, value in itertools.product(sorted(keys), ODD):
        beside = {"gradient-accumulation-steps": value, "lora-r": 8, "lora-alpha": value, "epochs": value}
        for pairs in ([(key, value)], [(key, value), *beside.items()]):
            with suppress(InputError):
                read_options(Path("x"), pairs, ())
                continue
            messages.append(key)
    assert len(messages) > 1000
