"""Options in YAML: --config, and the config.yaml of a run; written, read and compared.

Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import yaml

from trireme.engine.amounts import size
from trireme.engine.run.config.foreign_config import read_keys
from trireme.engine.run.config.foreign_keys import Read
from trireme.engine.run.config.option_names import FIELDS, flag_of
from trireme.engine.run.hub.names import written
from trireme.engine.run.options import Every, Options, store_folders
from trireme.models.config import InputError
from trireme.storage.files import Say
from trireme.storage.untrusted import read_text, shown

HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # of JSON's pairs; others are bytes of a name that is not UTF-8

# Raised by PyYAML's constructors where a value belies its tag or is too deep.
_TRUSTING = (ValueError, AttributeError, TypeError, LookupError, ArithmeticError, RecursionError)
SIGNED = "# run "  # beginning of a run's config.yaml; those of others have no such line
_NOT_SAVED = ("resume", "config", "dry_run", "assume", "shape", "demo", "out")  # not of the run
CHOSEN = (  # if not given
    *("seq_len", "epochs", "lr", "weight_decay", "adam_bits", "lora_alpha", "lora_targets", "labels"),
    *("beta", "label_smoothing", "simpo_gamma", "desirable_weight", "undesirable_weight"),  # of a method
    *("distill_weight", "temperature", "top_k"),  # of a teacher
)
OWN = (  # of a host
    "model",
    "tokenizer",
    "chat_template",
    "data",
    "val",
    "adapter",
    "teacher",
    "store",
    "plan",
    "gpu_memory",
    "ram",
    "log",
)


class Refused(InputError):
    """A file with several keys that cannot be used, with a line for each."""

    def __init__(self, message: str, lines: Sequence[str]):
        super().__init__(message)
        self.lines = lines


def from_yaml(
    path: Path, text: str | None = None, typed: Container[str] = (), say: Say | None = None
) -> dict[str, Any]:
    """The options in a YAML file. `text`: its content, if it has been read. `typed`: options that replace them.

    `say` is called with how keys of others were read. Raises InputError.
    """
    given, keys = read_options(path, _read_yaml(path, text_of(path) if text is None else text), typed)
    ignored = [f"ignored  {path}: {', '.join(shown(key) for key in keys.ignored)}"] if keys.ignored else []
    if say:
        for line in (*keys.said, *ignored):
            say(line)
    return given


def read_options(path: Path, pairs: Iterable[tuple[str, Any]], typed: Container[str]) -> tuple[dict[str, Any], Read]:
    """The options of a file's keys and values, and how they were read. Raises InputError."""
    given, keys = dict[str, Any](), read_keys(pairs, typed)
    wrong = keys.wrong
    for key, name, value in keys.given:
        if name in ("resume", "config"):
            wrong.append(f"{key} belongs on the command line. Leave it out here")
            continue
        for part in value if isinstance(value, list) else [value]:
            text = _written(part, f"{path}: {key}")
            if "\0" in text:
                raise InputError(f"{path}: {key} holds a NUL character.")
            if half := HALF.search(text):
                raise InputError(f"{path}: {key} holds {half[0]!a}, half a character. Write the character itself.")
        if name in given:
            wrong.append(f"{key} is {flag_of(name)}, which is given already. Leave one out")
            continue
        try:
            given[name] = _convert(FIELDS[name], value, key)
        except ValueError as error:
            wrong.append(str(error))
    wrong = [text if text.endswith(("?", ".")) else f"{text}." for text in wrong]
    if len(wrong) == 1:
        raise InputError(f"{path}: {wrong[0]}")
    if wrong:
        raise Refused(f"{path}: {len(wrong)} keys cannot be taken. Change them, or leave them out:", wrong)
    return given, keys


def text_of(path: Path) -> str:
    """The text of a file. Raises InputError."""
    try:
        return read_text(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not YAML: {error}") from None


def _read_yaml(path: Path, text: str) -> list[tuple[str, Any]]:
    """Keys and values, also those that occur twice."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        content = [(loader.construct_object(k, True), loader.construct_object(v, True)) for k, v in pairs]
        other = None if node is None or pairs else loader.construct_document(node)
    except (yaml.YAMLError, *_TRUSTING) as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if other is not None and other != {}:
        raise InputError(f"{path} holds a {type(other).__name__}, expected lines like 'batch-size: 16'.")
    return [(_written(key, f"{path}: a key"), value) for key, value in content]


def _written(value: Any, where: str) -> str:
    """A plain value as text. Nested lists are refused: a few bytes of aliases can expand to gigabytes."""
    if isinstance(value, (list, Mapping, Set)):
        raise InputError(f"{where}: a {type(value).__name__} is not a plain value.")
    try:
        return str(value)
    except ValueError:
        raise InputError(f"{where} is a number of thousands of digits.") from None


def _convert(f: Field[Any], value: Any, where: str) -> Any:
    """The value of an option. Raises ValueError."""
    parse = f.metadata["parse"]
    if parse is bool or isinstance(value, bool):
        if not (parse is bool and isinstance(value, bool)):
            raise ValueError(f"{where}: {value!r} is not {'true or false' if parse is bool else 'a plain value'}")
        return value
    try:
        if f.default == ():
            values = tuple(str(v) for v in (value if isinstance(value, list) else [value]))
            return parse(",".join(values)) if values and not f.metadata.get("repeat") else values
        return parse(",".join(map(str, value)) if isinstance(value, list) else str(value))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def options_of(out: Path) -> dict[str, Any]:
    """The options of the run in a folder; {} if it has none, or its config.yaml is another program's. Raises
    InputError.
    """
    path = out / "config.yaml"
    text = text_of(path) if path.is_file() else ""
    return from_yaml(path, text) if text.startswith(SIGNED) else {}


def stores_of(run: Path) -> list[Path]:
    """The folders of a run's store. Raises InputError if its config.yaml cannot be read."""
    return store_folders(from_yaml(run / "config.yaml").get("store", ()), run)


def saved_options(options: Options) -> dict[str, Any]:
    """The options as JSON and YAML have them; paths are absolute."""
    content: dict[str, Any] = {}
    for f in fields(Options):
        value = getattr(options, f.name)
        if f.name in _NOT_SAVED:
            continue
        if value is None:
            pass
        elif f.name in ("model", "tokenizer", "store", "plan", "teacher"):
            value = [full(v) for v in value] if isinstance(value, tuple) else written(full(value))
        elif f.name in ("data", "val", "chat_template"):
            value = [written(_absolute(v)) for v in value] if isinstance(value, tuple) else written(_absolute(value))
        elif f.metadata["parse"] is size:
            value = f"{value}B"
        content[f.name] = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Every) else value
    return content


def to_agree(options: Options) -> dict[str, str]:
    """The options that must be alike on all hosts: all but paths, limits of memory and trackers."""
    same = {flag_of(name): repr(value) for name, value in saved_options(options).items() if name not in OWN}
    return same | {"--resume": str(bool(options.resume)), "--dry-run": str(options.dry_run)}


def config_yaml(options: Options) -> bytes:
    """The config.yaml of a run with these options."""
    content = {name: value for name, value in saved_options(options).items() if value is not None}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode()


def repeats(config: bytes, options: Options) -> bool:
    """Whether a config.yaml, without the run's id, has these options, with or without those that were chosen."""
    try:
        saved = yaml.safe_load(config)
    except (yaml.YAMLError, *_TRUSTING):
        return False
    asked = yaml.safe_load(config_yaml(options))
    asked = {name: value for name, value in asked.items() if name not in CHOSEN or value != []}
    if not isinstance(saved, dict):
        return False
    return {name: value for name, value in saved.items() if name in asked or name not in CHOSEN} == asked


def changes(options: Options, before: Mapping[str, Any]) -> list[str]:
    """A line for each option that differs from `before`, which `saved_options` gave."""
    said = lambda value: "not given" if value in (None, []) else shown(repr(value), 500)
    both = [(name, value, before[name]) for name, value in saved_options(options).items() if name in before]
    return [f"{flag_of(name)} {said(value)}, was {said(was)}" for name, value, was in both if value != was]


def full(path: str | Path) -> str:
    """An absolute path; links are kept."""
    return os.path.abspath(path)  # noqa: PTH100, follows links


def _absolute(data: str) -> str:
    """A file, folder or pattern with :WEIGHT or not, as absolute path; a share (0.02), `-` and `plain` as they are."""
    word = data in ("-", "plain") or re.fullmatch(r"[\d.]+", data)
    path = re.sub(r":[\d.]+$", "", data)
    return full(data) if (Path(path).exists() or set("*?") & set(path)) and not word else data
