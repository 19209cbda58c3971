"""Options of the commands besides training. They are read before torch is imported, so --help and errors come at
once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from trireme.engine.amounts import number, whole
from trireme.engine.run.command import CommandParser, add_option, program, typed
from trireme.engine.run.options import Parser, one_of
from trireme.models.config import InputError
from trireme.storage.untrusted import quoted

FORMATS = {"bf16": "BF16", "fp32": "F32"}
MOST_TOP_K = 256  # of `score`
OF_METHODS = ("method", "beta", "label_smoothing", "simpo_gamma", "desirable_weight", "undesirable_weight")  # of `eval`


def _parser(name: str, usage: str, description: str) -> CommandParser:
    found = CommandParser(usage=f"{program()} {name} FOLDER {usage}", description=description)
    _named(found, "FOLDER", "a checkpoint, a run's output, its best or step-N, or an adapter")
    more = found.add_argument_group("model and machine")
    _add(more, "--model", "DIR", "an adapter's base [the one that it names]")
    _add(more, "--tokenizer", "DIR", "folder of another tokenizer [that of the run]")
    _add(more, "--chat-template", "FILE", "another chat template: a .jinja file, chatml or plain [that of the run]")
    add_option(more, "device")
    _add(more, "--dtype", "{bf16,fp32}", "number format [bf16 on a GPU, else fp32]", one_of(*FORMATS))
    for option in ("gpu_memory", "ram"):
        add_option(more, option)
    return found


def _add(
    group: argparse._ActionsContainer, flag: str, metavar: str, text: str, parse: Parser = str, default: Any = None
) -> None:
    group.add_argument(flag, metavar=metavar, help=text, type=typed(parse), default=default)


def _named(parser: CommandParser, metavar: str, text: str, name: str = "") -> None:
    """Adds a word without a flag, which is "" where it is not given."""
    parser.add_argument(name or metavar.lower(), metavar=metavar, nargs="?", default="", help=text)


def _parsed(found: CommandParser, name: str, argv: Sequence[str]) -> argparse.Namespace:
    """Raises InputError; --help exits."""
    split = [word.partition("=") if word.startswith("--") else ("", "", word) for word in argv]
    given = found.known([flag.replace("_", "-") + equals + value for flag, equals, value in split], name)
    if not given.folder:
        raise InputError(f"no model is named. Name its folder: {program()} {name} FOLDER.")
    return given


def sample_options(argv: Sequence[str]) -> argparse.Namespace:
    """Raises InputError; --help exits."""
    found = _parser(
        "sample",
        "--prompt TEXT | --chat | --prompts FILE [options]",
        "Generates text with a model. The text goes to standard output, all other lines to standard error.",
    )
    what = found.add_argument_group("prompts")
    _add(what, "--prompt", "TEXT", "a user's message, or a text to continue if the model has no chat template")
    what.add_argument("--chat", action="store_true", help="a conversation, line by line; /new begins another")
    text = ".jsonl with prompt or messages, else one prompt per line; answers are JSON lines"
    _add(what, "--prompts", "FILE", text)
    what.add_argument("--as-text", action="store_true", help="continue prompts as they are, without the chat template")
    _add(what, "--system", "TEXT", "a system message")
    add_option(what, "chat_template_kwargs")
    how = found.add_argument_group("sampling", "The default is generation_config.json, else greedy decoding.")
    _add(how, "--temperature", "X", "temperature of the softmax; 0: greedy decoding", number(0, 100))
    _add(how, "--top-p", "X", "sample from the fewest tokens whose probabilities add up to X", number(0, 1))
    _add(how, "--top-k", "N", "sample from the N most likely tokens; 0: from all", number(0, kind=int))
    _add(how, "--seed", "N", "the same seed gives the same text [42]", number(0, 2**32 - 1, kind=int), 42)
    _add(how, "--max-new-tokens", "N", "tokens of an answer, at most [512]", whole)
    given = _parsed(found, "sample", argv)
    ways = {"--prompt": given.prompt, "--chat": given.chat, "--prompts": given.prompts}
    asked = [flag for flag, value in ways.items() if value not in (None, False)]
    if len(asked) != 1:
        wrong = f"{' and '.join(asked)}: only one at a time" if asked else "no prompt given"
        raise InputError(f"{wrong}. Use --prompt TEXT, --chat or --prompts FILE.")
    return given


def eval_options(argv: Sequence[str]) -> argparse.Namespace:
    """Raises InputError; --help exits."""
    text = "Computes a model's loss and accuracy on data, as evaluations of a run do."
    found = _data_parser("eval", "--data FILE [options]", text)
    more = found.add_argument_group("preferences, read as for training")
    methods, text = ("dpo", "ipo", "orpo", "simpo", "kto"), "the loss; its parameters are those of training"
    _add(more, "--method", f"{{{','.join(methods)}}}", text, one_of("sft", *methods), "sft")
    for name in OF_METHODS[1:]:
        add_option(more, name)
    text = "dpo, ipo, kto: the model before training [the model with which the run began]"
    _add(more, "--reference", "DIR", text)
    return _with_data(found, "eval", argv)


def _data_parser(name: str, usage: str, text: str) -> CommandParser:
    """A parser with the options of data."""
    found = _parser(name, usage, text)
    data = found.add_argument_group("data, read as for training")
    text = "data to read; repeat the option for several, each gets a line"
    data.add_argument("--data", metavar="FILE", action="append", default=[], help=text)
    for option in ("map", "seq_len", "long", "skip_bad", "system", "chat_template_kwargs"):
        add_option(data, option)
    return found


def _with_data(found: CommandParser, name: str, argv: Sequence[str]) -> argparse.Namespace:
    """Raises InputError; --help exits."""
    given = _parsed(found, name, argv)
    if not given.data:
        raise InputError("no data given. Name it: --data FILE (.jsonl .json .csv .txt .parquet).")
    return given


def score_options(argv: Sequence[str]) -> argparse.Namespace:
    """Raises InputError; --help exits."""
    text = "Writes a model's log-probabilities of the documents of data, with --top-k also of the most likely tokens."
    found = _data_parser("score", "--data FILE --out DIR [options]", text)
    _add(found, "--out", "DIR", "output folder; one that is not complete is continued", default="")
    text = f"also write the K most likely tokens of each label; at most {MOST_TOP_K} [none]"
    _add(found, "--top-k", "K", text, number(1, MOST_TOP_K, kind=int))
    given = _with_data(found, "score", argv)
    if not given.out:
        raise InputError(
            f"--out is missing. Name the folder to write: {program()} score {quoted(given.folder)} --out DIR."
        )
    return given


def check_options(argv: Sequence[str]) -> argparse.Namespace:
    """store, report and tune of `check`. Raises InputError; --help exits."""
    parser = CommandParser(
        usage=f"{program()} check [--store DIR[,DIR]] [--report FILE] [--tune]",
        description="Reports what this machine has, how fast it is, and what to change, in two minutes.",
    )
    _add(parser, "--store", "DIR[,DIR]", "a folder on each drive to try [this one]", default=".")
    _add(parser, "--report", "FILE", "where the report is written", default="trireme-check.json")
    text = "instead, try launch settings of each kernel; runs use the faster ones"
    parser.add_argument("--tune", action="store_true", help=text)
    given = parser.known(argv, "check")
    given.store = [folder for folder in given.store.split(",") if folder]
    if not given.store:
        raise InputError("--store names no folder. Name one on each drive to try.")
    return given


def merge_options(argv: Sequence[str]) -> argparse.Namespace:
    """adapter, out and model of `merge`. Raises InputError; --help exits."""
    parser = CommandParser(
        usage=f"{program()} merge ADAPTER --out DIR [--model DIR]",
        description="Adds an adapter to its model, and writes an ordinary checkpoint.",
    )
    _named(parser, "ADAPTER", "a folder of peft's format")
    _add(parser, "--out", "DIR", "folder to write", default="")
    _add(parser, "--model", "DIR", "the checkpoint [the one that ADAPTER names]", default="")
    given = parser.known(argv, "merge")
    if not given.adapter:
        raise InputError(f"no adapter is named. Name its folder: {program()} merge ADAPTER --out DIR.")
    if not given.out:
        raise InputError(
            f"--out is missing. Name the folder to write: {program()} merge {quoted(given.adapter)} --out DIR."
        )
    return given


def push_options(argv: Sequence[str]) -> argparse.Namespace:
    """folder and name of `push`. Raises InputError; --help exits."""
    parser = CommandParser(
        usage=f"{program()} push FOLDER OWNER/NAME",
        description="Uploads a finished model or adapter to the Hugging Face hub, with a card of its run.",
    )
    _named(parser, "FOLDER", "a run's output, or any checkpoint")
    _named(parser, "OWNER/NAME", "its name on the hub", "name")
    given = parser.known(argv, "push")
    if not given.folder or not given.name:
        raise InputError(f"no folder or no name is given: {program()} push FOLDER OWNER/NAME.")
    return given
