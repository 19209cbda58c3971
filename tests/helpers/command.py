"""The command as a shell calls it, what a terminal shows of it, and what it must leave alone when it refuses."""

import re
from pathlib import Path

from trireme.engine.run import cli


def tree(folder: Path) -> dict:
    return {p: p.stat().st_size for p in folder.rglob("*") if p.is_file()} | {
        p: None for p in folder.rglob("*") if p.is_dir()
    }


def fails(capsys, here: Path, *argv: str, code: int = 2) -> str:
    """The one line that the command ends with, having left nothing behind."""
    before = tree(here)
    assert cli.main(list(argv)) == code
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert len(err) < 500, err
    assert tree(here) == before
    return err


def write(path: str, text: str | bytes) -> None:
    Path(path).write_bytes(text.encode() if isinstance(text, str) else text)


def on_screen(output: str) -> list[str]:
    """The lines that a terminal shows in the end."""
    lines = [""]
    for part in re.split(r"(\r\x1b\[K|\r?\n)", output):
        if part == "\r\x1b[K":
            lines[-1] = ""
        elif part.endswith("\n"):
            lines.append("")
        else:
            lines[-1] += part
    return lines
