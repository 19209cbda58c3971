"""Every script can be imported and describes its arguments, without a GPU."""

import inspect
import sys

import pytest
from script_files import ROOT, script

SCRIPTS = [
    f"{folder}/{path.stem}" for folder in ("bench", "papers") for path in (ROOT / "scripts" / folder).glob("*.py")
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_shows_its_help(name, monkeypatch, capsys):
    made = script(name)
    if not hasattr(made, "main"):  # a module of others
        return
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        made.main(*([["--help"]] if inspect.signature(made.main).parameters else []))
    assert end.value.code == 0
    assert "usage:" in capsys.readouterr().out
