"""Commands of the page on long runs, as they are executed; pages that the sources name."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("code", "queued"), [(0, False), (130, True), (2, False)])
def test_the_script_for_slurm(tmp_path, code, queued):
    """With commands of SLURM that write down how they are called."""
    (script,) = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs/several.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "job").write_text(script.replace("/scratch/$USER", str(tmp_path)))
    for name, does in (
        ("srun", 'exec "$@"'),
        ("scontrol", f'echo scontrol "$@" >> {tmp_path}/told'),
        ("trireme", f'echo "$@" >> {tmp_path}/told; mkdir -p {tmp_path}/chats; touch {tmp_path}/chats/config.yaml; '
         f"exit {code}"),
    ):  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    ends = [subprocess.run(["bash", str(tmp_path / "job")], env=environment, timeout=20).returncode for _ in range(2)]
    assert ends == [code, code], "SLURM shows a job that failed as failed"
    again = ["scontrol requeue 77"] * queued
    told = (tmp_path / "told").read_text().splitlines()
    assert told == [f"qwen --data rows.jsonl --out {tmp_path}/chats", *again, f"--resume {tmp_path}/chats", *again]


def test_the_sources_name_pages_that_exist():
    folders = ("kernels", "models", "storage", "engine", "scripts")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = {page for path in sources for page in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
    assert len(named) >= 3
    assert not [page for page in named if not (ROOT / page).is_file()]
