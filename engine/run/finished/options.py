"""Options of the commands besides training. They are read before torch is imported, so --help and errors come at
once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from trireme.engine.amounts import number, whole
from trireme.engine.run.command import CommandParser, add_option, program, typed
from trireme.engine.run.options import one_of
from trireme.models.config import InputError
from trireme.storage.untrusted import quoted

FORMATS = {"bf16": "BF16", "fp32": "F32"}
MOST_TOP_K = 256  # of `score`
OF_METHODS = ("method", "beta", "label_smoothing", "simpo_gamma", "desirable_weight", "undesirable_weight")  # of `eval`


def _parser(name: str, usage: str, description: str) -> CommandParser:
    found = CommandParser(usage=f"{program()} {name} FOLDER {usage}", description=description)
    found.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        default="",
        help="a checkpoint, a run's output, its best or step-N, or an adapter",
    )
    more = found.add_argument_group("model and machine")
    add = lambda flag, metavar, text, parse=str: more.add_argument(flag, metavar=metavar, help=text, type=typed(parse))
    add("--model", "DIR", "an adapter's base [the one that it names]")
    add("--tokenizer", "DIR", "folder of another tokenizer [that of the run]")
    add("--chat-template", "FILE", "another chat template: a .jinja file, chatml or plain [that of the run]")
    add_option(more, "device")
    add("--dtype", "{bf16,fp32}", "number format [bf16 on a GPU, else fp32]", one_of(*FORMATS))
    for name in ("gpu_memory", "ram"):
        add_option(more, name)
    return found


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
    what.add_argument(
        "--prompt", metavar="TEXT", help="a user's message, or a text to continue if the model has no chat template"
    )
    what.add_argument("--chat", action="store_true", help="a conversation, line by line; /new begins another")
    what.add_argument(
        "--prompts",
        metavar="FILE",
        help=".jsonl with prompt or messages, else one prompt per line; answers are JSON lines",
    )
    what.add_argument("--as-text", action="store_true", help="continue prompts as they are, without the chat template")
    what.add_argument("--system", metavar="TEXT", help="a system message")
    add_option(what, "chat_template_kwargs")
    how = found.add_argument_group("sampling", "The default is generation_config.json, else greedy decoding.")
    how.add_argument(
        "--temperature", metavar="X", type=typed(number(0, 100)), help="temperature of the softmax; 0: greedy decoding"
    )
    how.add_argument(
        "--top-p",
        metavar="X",
        type=typed(number(0, 1)),
        help="sample from the fewest tokens whose probabilities add up to X",
    )
    how.add_argument(
        "--top-k",
        metavar="N",
        type=typed(number(0, kind=int)),
        help="sample from the N most likely tokens; 0: from all",
    )
    how.add_argument(
        "--seed",
        metavar="N",
        type=typed(number(0, 2**32 - 1, kind=int)),
        default=42,
        help="the same seed gives the same text [42]",
    )
    how.add_argument("--max-new-tokens", metavar="N", type=typed(whole), help="tokens of an answer, at most [512]")
    given = _parsed(found, "sample", argv)
    asked = [
        flag
        for flag, value in (("--prompt", given.prompt), ("--chat", given.chat), ("--prompts", given.prompts))
        if value not in (None, False)
    ]
    if len(asked) != 1:
        wrong = f"{' and '.join(asked)}: only one at a time" if asked else "no prompt given"
        raise InputError(f"{wrong}. Use --prompt TEXT, --chat or --prompts FILE.")
    return given


def eval_options(argv: Sequence[str]) -> argparse.Namespace:
    """Raises InputError; --help exits."""
    text = "Computes a model's loss and accuracy on data, as evaluations of a run do."
    found = _data_parser("eval", "--data FILE [options]", text)
    more = found.add_argument_group("preferences, read as for training")
    more.add_argument(
        "--method", metavar="{dpo,ipo,orpo,simpo,kto}", type=typed(one_of("sft", "dpo", "ipo", "orpo", "simpo", "kto")),
        default="sft", help="the loss; its parameters are those of training",
    )  # fmt: skip
    for name in OF_METHODS[1:]:
        add_option(more, name)
    more.add_argument(
        "--reference",
        metavar="DIR",
        help="dpo, ipo, kto: the model before training [the model with which the run began]",
    )
    return _with_data(found, "eval", argv)


def _data_parser(name: str, usage: str, text: str) -> CommandParser:
    """A parser with the options of data."""
    found = _parser(name, usage, text)
    data = found.add_argument_group("data, read as for training")
    data.add_argument(
        "--data",
        metavar="FILE",
        action="append",
        default=[],
        help="data to read; repeat the option for several, each gets a line",
    )
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
    found.add_argument("--out", metavar="DIR", default="", help="output folder; one that is not complete is continued")
    found.add_argument(
        "--top-k",
        metavar="K",
        type=typed(number(1, MOST_TOP_K, kind=int)),
        help=f"also write the K most likely tokens of each label; at most {MOST_TOP_K} [none]",
    )
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
    parser.add_argument("--store", metavar="DIR[,DIR]", default=".", help="a folder on each drive to try [this one]")
    parser.add_argument("--report", metavar="FILE", default="trireme-check.json", help="where the report is written")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="instead, try launch settings of each kernel; runs use the faster ones",
    )
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
    parser.add_argument("adapter", metavar="ADAPTER", nargs="?", default="", help="a folder of peft's format")
    parser.add_argument("--out", metavar="DIR", default="", help="folder to write")
    parser.add_argument("--model", metavar="DIR", default="", help="the checkpoint [the one that ADAPTER names]")
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
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default="", help="a run's output, or any checkpoint")
    parser.add_argument("name", metavar="OWNER/NAME", nargs="?", default="", help="its name on the hub")
    given = parser.known(argv, "push")
    if not given.folder or not given.name:
        raise InputError(f"no folder or no name is given: {program()} push FOLDER OWNER/NAME.")
    return given
