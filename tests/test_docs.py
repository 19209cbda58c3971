"""What README and docs say of the program, held against what it says and does."""

import ast
import os
import re
from pathlib import Path

import pytest

from trireme.engine.run.begin.job import prepare
from trireme.engine.run.command import parse

ROOT = Path(__file__).parents[1]
FOLDERS = ("engine", "models", "storage", "kernels")
OTHER = r"…|[\d,.]*\d|[\w.]*_[\w.]*|[\w.-]*\.json\w*|[][:;/()\"']"  # numbers, names and what stands between phrases


def test_troubleshooting_has_the_words_of_the_program():
    found = [node for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") for node in parsed(file)]
    words = [" ".join(node.value.split()) for node in found if isinstance(getattr(node, "value", None), str)]
    words += [os.strerror(number) for number in range(40)]
    phrases = re.findall(r"\*\*`(.+?)`\*\*", (ROOT / "docs" / "troubleshooting.md").read_text(), re.DOTALL)
    assert len(phrases) > 50
    parts = {part.strip(" .,") for phrase in phrases for part in re.split(OTHER, " ".join(phrase.split()))}
    assert [part for part in parts if not any(part in said for said in words)] == []


def parsed(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


@pytest.mark.full
def test_the_figures_that_readme_has_from_simulations():
    text = (ROOT / "README.md").read_text()
    (line,) = re.findall(r"^trireme (--shape .*)$", text, re.MULTILINE)
    adapters = line.replace("--batch-size 128", "--batch-size 32").replace("2x4TB", "4TB") + " --lora 16"
    for how, command in (("", line), (", `--lora 16`", adapters)):
        (said,) = re.findall(rf"^\| 70B{how} \| RTX 4090 \| 64 GiB \| \d \| ([\d.]+), of", text, re.MULTILINE)
        assert f"{prepare(parse(command.split())).forecast.step.step_s:.3g}" == said
