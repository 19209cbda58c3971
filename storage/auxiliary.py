"""Auxiliary files of a checkpoint: all but weights, such as config, tokenizer, chat templates, licence."""

from __future__ import annotations

import json
import re
from pathlib import Path

from trireme.storage.headers import CheckpointError
from trireme.storage.untrusted import SMALL, is_plain, parse_json, read_small

SUFFIXES = {".json", ".jinja", ".model", ".tiktoken", ".txt"}
CODE, MODULES = ".py", "modules.json"  # of auto_map, copied and never run; of sentence-transformers: names folders
TEMPLATES = "additional_chat_templates"
TEMPLATE, CONFIG, TOKENIZER = "chat_template.jinja", "tokenizer_config.json", "tokenizer.json"
ENDS = ("config.json", "generation_config.json")  # name the end token
CONTENT = Path | bytes  # to copy, or to write
BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # hashes that name files of download caches
NAMED = 3  # files named in a message


def auxiliary(folder: Path) -> list[str]:
    """Names of the auxiliary files in `folder`, relative to it."""
    return sorted(name for name, why in _looks_alike(folder).items() if not why)


def auxiliary_files(
    folder: Path, tokenizer: Path | None = None, template: str | None = None, end: int | None = None
) -> dict[str, CONTENT]:
    """The auxiliary files by name.

    `tokenizer`: take those of another tokenizer's folder, and write `end` as its end token into the configuration.
    `template`: a chat template to write in both places where readers look for it. Raises StoreError; CheckpointError if
    the tokenizer cannot be copied, or its configuration is not JSON.
    """
    files: dict[str, CONTENT] = {name: folder / name for name in auxiliary(folder)}
    if tokenizer:
        names = [name for name in auxiliary(tokenizer) if _is_tokenizers(name)]
        if "tokenizer.json" not in names:
            raise CheckpointError(
                f"{tokenizer / 'tokenizer.json'} is not a file of its folder. Put the file itself there."
            )
        files = {name: path for name, path in files.items() if not _is_tokenizers(name)}
        files |= {name: tokenizer / name for name in names}
        for name in ENDS if end is not None else ():
            if name in files:
                files[name] = _with(folder / name, eos_token_id=end)
    if template is not None:
        files = {name: path for name, path in files.items() if not _is_template(name)}
        files[TEMPLATE] = template.encode()
        if CONFIG in files:
            files[CONFIG] = _with((tokenizer or folder) / CONFIG, chat_template=template)
    return dict(sorted(files.items()))


def content_of(auxiliary: CONTENT) -> bytes:
    """The bytes of an auxiliary file. Raises OSError, StoreError."""
    return auxiliary if isinstance(auxiliary, bytes) else read_small(auxiliary, links=True)


def _is_tokenizers(name: str) -> bool:
    """Whether a file belongs to the tokenizer: with another one it is not copied."""
    known = ("tokenizer", "special_tokens_map.json", "added_tokens.json", "vocab.", "merges.txt")
    return name.startswith(known) or Path(name).suffix in (".model", ".tiktoken") or _is_template(name)


def _is_template(name: str) -> bool:
    return name.startswith(("chat_template.", f"{TEMPLATES}/"))


def _with(path: Path, **fields: object) -> bytes:
    """A JSON file with some fields replaced."""
    try:
        content = parse_json(read_small(path, links=True), "file")
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}.") from None
    return json.dumps(content | fields, indent=2, ensure_ascii=False).encode()


def left_behind(folder: Path) -> str:
    """A line about auxiliary files that are not copied, or "". Raises CheckpointError if config.json is one of them."""
    left = sorted((name, why) for name, why in _looks_alike(folder).items() if why)
    for name, why in left:
        if name == "config.json":
            raise CheckpointError(f"{folder / name} {why}. Put the file itself there.")
    names = ", ".join(f"{name} {why}" for name, why in left[:NAMED])
    others = f", and {len(left) - NAMED} more" if len(left) > NAMED else ""
    return f"{folder}: not copied with the weights: {names}{others}" if left else ""


def is_auxiliary(name: str) -> bool:
    """Whether this can be the name of an auxiliary file: within its folder, and of a known kind."""
    folder, _, file = name.rpartition("/")
    return is_plain(name) and folder in ("", TEMPLATES) and Path(file).suffix in SUFFIXES


def _looks_alike(folder: Path) -> dict[str, str]:
    """All files that look like auxiliary ones: name -> why it is not copied, or ""."""
    code = any(b'"auto_map"' in _content(folder / name) for name in (ENDS[0], CONFIG))
    suffixes = SUFFIXES | ({CODE} if code else set())
    files = [p for p in folder.iterdir() if p.suffix in suffixes and not p.name.endswith(".index.json")]
    files += (folder / TEMPLATES).glob("*.jinja")
    files += [path for module in _modules(folder) for path in module.iterdir()]
    return {str(p.relative_to(folder)): _unfit(folder, p) for p in files if not p.name.startswith(".")}


def _modules(folder: Path) -> list[Path]:
    """The folders that modules.json names, such as 1_Pooling."""
    try:
        named = json.loads(_content(folder / MODULES) or "[]")
    except (ValueError, RecursionError):
        return []
    paths = [str(module.get("path")) for module in named if isinstance(module, dict)] if isinstance(named, list) else []
    plain = (folder / path for path in paths if path and is_plain(path) and "/" not in path)
    return [path for path in plain if path.is_dir() and not path.is_symlink()]


def _content(path: Path) -> bytes:
    """A small file; b"" if it cannot be read."""
    try:
        return read_small(path, links=True)
    except OSError:
        return b""


def _unfit(folder: Path, path: Path) -> str:
    """Why a file is not copied, or "".

    A link out of the folder may lead to a private file; a tokenizer is none. In the cache of Hugging Face files are
    links to blobs: snapshots/<revision>/<file> -> ../../blobs/<hash>.
    """
    if not is_plain(str(path.relative_to(folder))):
        return "has no plain name"
    if not path.is_file():
        return "is not a regular file"
    root, target = folder.resolve(), path.resolve()
    cache = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    inside = target.is_relative_to(root) or (target.parent == cache and BLOB.fullmatch(target.name))
    if not inside and not (path.name == TOKENIZER and b'"model"' in _content(path)):
        return "is a link out of the folder: OUT lacks it, copy it there"
    return f"has more than {SMALL >> 20} MiB" if path.stat().st_size > SMALL else ""
