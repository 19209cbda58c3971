"""Options on the command line, in YAML and from Python: one table, and back again from each."""

import json
import os
import string
from dataclasses import MISSING, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.engine.run import cli, config_file, folder, record
from trireme.engine.run.options import COMMANDS, Every, Options, every, flag, gib_size, natural, number, table, warmup
from trireme.models.config import InputError

OPTIONS = table(Options)
# Words that a YAML file, a shell or another trainer would take for something else.
STRANGE = ["lora", "qlora", "full", "no", "null", "~", "1e3", "0", "- x", "${name}", "{a}", "#b", "a: b", "*", "'"]
TEXT = st.one_of(st.sampled_from(STRANGE), st.text(string.printable, min_size=1).filter(lambda text: text.strip()))
PATH = st.one_of(st.sampled_from(["lora", "part-[12].txt:0.5", "a,b", "chatml", "../x", "/y", "ü"]), TEXT)
NUMBERS = (1, 2, 8, 200, 123456, 0.1, 1 / 3, 0.45, 1.5, 1e-5)


def values(f) -> st.SearchStrategy:
    """Values that an option may have: those that its parser takes."""
    parse, name = f.metadata["parse"], f.name
    if parse is bool:
        return st.booleans()
    if name in ("out", "resume", "config"):
        return st.just(f.default)
    if f.metadata["metavar"].startswith("{"):
        return st.sampled_from(f.metadata["metavar"].strip("{}").split(",")).map(parse)
    if parse is every:
        return st.sampled_from(["never", "7", "0.25", "90s", "0.001", "12h", "1e-05"]).map(every)
    if parse is gib_size:
        return st.integers(1 << 20, 1 << 50)
    if name == "chat_template_kwargs":
        return st.dictionaries(TEXT, st.booleans()).map(lambda value: json.dumps(value, sort_keys=True))
    if name == "betas":
        return st.just((0.8, 0.95))
    if name == "log":
        return st.lists(st.sampled_from(["tensorboard", "wandb"])).map(tuple)
    if name == "labels":
        return st.lists(TEXT, min_size=2, unique=True).map(tuple)
    if name in ("gpus", "micro_batch"):
        return st.one_of(st.integers(1, 99), st.just({"gpus": "all"}.get(name, "auto")))
    if isinstance(f.default, tuple):
        return st.lists(PATH if "path" in f.metadata["kind"] else TEXT, max_size=3).map(tuple)
    if f.metadata["metavar"] in ("N", "X"):
        return st.sampled_from([parse(str(x)) for x in NUMBERS if taken(parse, x)])
    return PATH if "path" in f.metadata["kind"] else TEXT


def taken(parse, value) -> bool:
    try:
        parse(str(value))
    except ValueError:
        return False
    return True


def options() -> st.SearchStrategy:
    some = st.sets(st.sampled_from(sorted(OPTIONS)), max_size=15)
    chosen = some.flatmap(lambda names: st.fixed_dictionaries({name: values(OPTIONS[name]) for name in names}))
    return chosen.map(lambda values: Options(**values))


# ---------------------------------------------------------------- there and back


@settings(max_examples=25, deadline=None)
@given(o=options(), names=st.sets(st.sampled_from(sorted(OPTIONS))))
def test_yaml_gives_back_the_options_from_any_folder(o, names, tmp_path_factory):
    path, here = tmp_path_factory.getbasetemp() / "config.yaml", Path.cwd()
    path.write_bytes(config_file.content(replace(o, chosen=frozenset(names))))
    assert config_file.is_own(path)
    before = config_file.saved(o)
    os.chdir("/")
    try:
        read, chosen = config_file.parse_options(path, config_file.text_in(path))
        again = Options.of(read)
        assert config_file.saved(again) == before
        assert config_file.changed(again, before) == []
    finally:
        os.chdir(here)
    assert chosen <= names


@settings(max_examples=20, deadline=None)
@given(o=options())
def test_python_gives_back_the_options(o):
    objects = {"chat_template_kwargs": json.loads(o.chat_template_kwargs or "null")}  # also as what they say
    given = {name: getattr(o, name) for name in OPTIONS} | objects
    assert Options.of({name: value for name, value in given.items() if value not in (None, "")}) == o


@settings(max_examples=20, deadline=None)
@given(o=options())
def test_the_command_line_gives_back_the_options(o):
    """All but values that begin with a dash, or of lists with commas in them."""
    words = []
    for name, f in OPTIONS.items():
        value = getattr(o, name)
        if value == f.default or name in ("model", "resume", "config", "out"):
            o = replace(o, **{name: f.default})
            continue
        several = value if isinstance(value, tuple) else (value,)
        if f.metadata["parse"] is bool:
            words.append(flag(name))
        elif f.metadata["repeat"]:
            words += [f"{flag(name)}={each}" for each in several]
        elif any("," in str(each) or str(each) != str(each).strip() for each in several) or not several:
            o = replace(o, **{name: f.default})
        else:
            text = ",".join(map(str, several))
            words.append(f"{flag(name)}={f'{text}B' if f.metadata['parse'] is gib_size else text}")
    assert cli.parse(words) == ("", o)


@settings(max_examples=20, deadline=None)
@given(step=st.integers(0, 10**9), loss=st.none() | st.floats(allow_nan=False), files=st.dictionaries(TEXT, TEXT))
def test_records_come_back_and_damage_is_seen(step, loss, files, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "best.json"
    for made in (
        record.Best(files),
        record.State("a", True, False),
        record.RunProgress(step, best=loss),
    ):
        folder.write_record(path, made)
        assert folder.read_record(path, type(made)) == made
        content = path.read_bytes()
        for at in range(content.index(b'", ') + 3, len(content), 3):  # behind format and checksum
            path.unlink()  # a file that is cut and written again waits for the disk
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            assert folder.read_record(path, type(made)) is None
    assert folder.read_record(path.with_name("no.json"), record.Best) is None


def test_config_lists_first_what_was_chosen(tmp_path):
    o = Options.of({"model": "m", "data": ["x"], "lr": "1e-3"})
    chosen, _, rest = config_file.content(o).decode().partition(config_file.REST)
    assert yaml.safe_load(chosen).keys() == {"model", "data", "lr"}
    assert "seed" in yaml.safe_load(rest)
    assert config_file.saved(Options(val="2.5e-2"))["val"] == "2.5e-2"  # which is no path


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("cls", [Options, *COMMANDS.values()])
def test_each_option_has_help_and_a_default_that_its_parser_takes(cls):
    for name, f in table(cls).items():
        assert f.metadata["help"], name
        assert f.default is not MISSING
        if f.default not in (None, "", (), False):
            assert cls.of({name: f.default}) == cls(), name


def test_every_alias_is_of_an_option_and_none_is_of_two():
    names = [alias for names in config_file.NAMES.values() for alias in names.split()]
    assert len(names) == len(set(names))
    assert config_file.NAMES.keys() <= OPTIONS.keys()
    assert not set(names) & OPTIONS.keys()


@pytest.mark.parametrize(("text", "due"), [
    ("3", [3, 6, 9]), ("0.25", [3, 6, 9]), ("never", []), ("0", []), ("0.1", list(range(1, 11))), ("1h", []),
])  # fmt: skip
def test_when_something_is_due(text, due):
    interval = every(text)
    assert [step for step in range(1, 11) if interval.due(step, 10, 0.0)] == due
    assert interval.times(0, 10, 0.0) == len(due)
    assert every(str(interval)) == interval
    assert Every(seconds=60).times(0, 100, 200.0) == 3


@pytest.mark.parametrize("parse", [every, warmup, gib_size, natural, number(0)])
@pytest.mark.parametrize("text", ["", "x", "nan", "-1", "1.5.2", "1e400", "٣x", "inf"])
def test_parsers_refuse_other_texts(parse, text):
    with pytest.raises(ValueError, match="."):
        parse(text)


# ---------------------------------------------------------------- names of other trainers

FILES = {  # a file of another trainer -> our options
    "llamafactory": (
        "model_name_or_path: m\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 8\nlora_target: all\n"
        "dataset: a.jsonl\ntemplate: llama3\ncutoff_len: 512\noutput_dir: o\nsave_steps: 500\nplot_loss: false\n"
        "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-4\nbf16: true\n"
        "num_train_epochs: 3.0\nlr_scheduler_type: cosine\nwarmup_ratio: 0.1\nval_size: 0.1\neval_steps: 500\n",
        dict(model="m", lora=8, lora_targets=("all",), data=("a.jsonl",), chat_template="llama3", seq_len=512, out="o",
             save_every=Every(500), batch_size=8, lr=1e-4, epochs=3.0, warmup=0.1, val="0.1", eval_every=Every(500)),
    ),
    "axolotl": (
        "base_model: m\nload_in_8bit: false\nload_in_4bit: true\nadapter: qlora\ndata: a.jsonl\nval_set_size: 0.0\n"
        "output_dir: o\nsequence_len: 512\nsample_packing: false\nlora_r: 32\nlora_alpha: 16\nlora_dropout: 0.05\n"
        "lora_target_linear: true\nwandb_project:\ngradient_accumulation_steps: 4\nmicro_batch_size: 2\n"
        "num_epochs: 4\noptimizer: adamw_bnb_8bit\nlr_scheduler: cosine\nlearning_rate: 0.0002\nbf16: auto\n"
        "tf32: false\ngradient_checkpointing: true\nwarmup_steps: 10\nweight_decay: 0.0\nspecial_tokens:\n",
        dict(model="m", base="nf4", lora=32, lora_alpha=16.0, lora_dropout=0.05, lora_targets=("all-linear",),
             data=("a.jsonl",), seq_len=512, out="o", no_pack=True, batch_size=8, epochs=4.0, adam_bits=8, lr=2e-4,
             warmup=10, weight_decay=0.0),
    ),
    "trl": (
        "model_name_or_path: m\nmax_length: 256\nreport_to: none\nseed: null\npacking: true\nmax_grad_norm: 0.0\n"
        "use_peft: true\n",
        dict(model="m", seq_len=256, max_grad_norm=0.0, lora=16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_flat_files_of_others_are_read(name, tmp_path):
    text, expected = FILES[name]
    path = tmp_path / f"{name}.yaml"
    path.write_text(text)
    _, o = cli.parse(["--config", str(path)])
    assert {key: getattr(o, key) for key in expected} == expected
    changed = {key for key in OPTIONS if getattr(o, key) != OPTIONS[key].default} - {"config"}
    assert changed == {key for key in expected if expected[key] != OPTIONS[key].default}


@pytest.mark.parametrize(("words", "expected"), [
    ("--per_device_train_batch_size 2 --gradient_accumulation_steps 4", dict(batch_size=8)),
    ("--load_in_4bit --gradient_checkpointing --lora_r 8", dict(base="nf4", lora=8)),
    ("--optim adamw_8bit --bf16 True", dict(adam_bits=8)),
    ("--learning_rate=3e-4 --num_train_epochs 2", dict(lr=3e-4, epochs=2.0)),
    ("--cutoff-len 128 --output_dir o", dict(seq_len=128, out="o")), ("--micro_batch_size 2", dict(batch_size=2)),
    ("--fp16 false --torch_dtype bfloat16", dict(dtype="bf16")),
])  # fmt: skip
def test_the_command_line_takes_the_same_names(words, expected):
    _, o = cli.parse(["m", "--data", "x", *words.split()])
    assert {key: getattr(o, key) for key in expected} == expected
    assert (o.model, o.data) == ("m", ("x",))


@pytest.mark.parametrize(("key", "value"), [
    ("optimizer", "lion"), ("cosine_min_lr_ratio", 0.0), ("fp16", True), ("dora", True), ("unheard_of", 3),
    ("train_on_inputs", True), ("loss_type", "focal"), ("quantization_bit", 3), ("lr_scheduler_type", "step"),
    ("datasets", [dict(path="a.jsonl")]), ("mixed_precision", "no"), ("warmup_ratio", 2.0),
])  # fmt: skip
def test_what_is_not_known_is_refused_by_its_name(key, value, tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": "m", key: value}))
    with pytest.raises(InputError, match=key.replace("_", "[-_]") if key != "lr_scheduler_type" else "schedule"):
        cli.parse(["--config", str(path)])
    path.write_text("batch-size: 1\nbatch_size: 2\n")
    with pytest.raises(InputError, match="batch_size is given twice"):
        cli.parse(["--config", str(path)])
