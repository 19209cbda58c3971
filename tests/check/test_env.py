"""`trireme env`: what an issue needs, whatever the machine lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trireme.engine.run.cli import main

SAYS = (
    "import sys; from trireme.engine.run.cli import main; assert not main(sys.argv[1:]) and 'torch' not in sys.modules"
)


@pytest.mark.grid
@pytest.mark.parametrize(("nvidia_smi", "says"), [
    ("echo NVIDIA H200, 570.1, 143771 MiB, 1 MiB", "NVIDIA H200, 570.1, 143771 MiB"),
    ("echo no driver >&2; exit 9", "no driver"), ("exit 9", "exit code 9"),
])  # fmt: skip
def test_it_says_what_an_issue_needs_and_no_secret(tmp_path, nvidia_smi, says):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    program.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HF_HUB_TOKEN": "hf_secret", "CUDA_VISIBLE_DEVICES": "1,0"}
    argv = [sys.executable, "-c", SAYS, "env", "--store", f"{tmp_path},/nowhere"]
    done = subprocess.run(
        argv, env=variables, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    words = ("torch", sys.version.split()[0], os.uname().release, "cores", "MemTotal", str(tmp_path), "/nowhere", "1,0")
    assert all(word in done.stdout for word in (*words, says))
    assert "hf_secret" not in done.stdout
    assert len(done.stdout.splitlines()) <= 24


def test_without_any_program_it_says_so(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["env"]) == 0
    assert capsys.readouterr().out.count("No such file") >= 6
