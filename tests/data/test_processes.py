"""Tokenizers and templates of strangers: no run hangs, dies or fills memory by them, and the row is named."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import in_process
import pytest
from chats import CHATML, TALK, make_tokenizer

from trireme.engine.data import codec as processes
from trireme.engine.data.codec import Died, Pending, encode_batches, load_codec
from trireme.engine.data.dataset import DataOptions, load_dataset
from trireme.engine.data.forms import Chat, Text

ROOT = Path(__file__).parents[2]
ON = "{% if messages[0].content == 'bad' %}HERE{% endif %}" + CHATML


def made(folder, template=CHATML):
    make_tokenizer(folder, chat_template=template)
    return load_codec(folder)


def chats(*words):
    return [Pending(i, Chat([{**TALK[0], "content": word}, TALK[1]])) for i, word in enumerate(words, 1)]


@pytest.mark.parametrize("hostile", ["{% set x = 'a' * 10**11 %}", "{% set x = [0] * 10**10 %}", "{{ messages[9].x }}"])
def test_a_row_that_fails_is_a_bad_row(tmp_path, hostile):
    codec = made(tmp_path, ON.replace("HERE", hostile))
    ((_, found),) = encode_batches(codec, [chats("good", "bad", "good")], 1)
    assert [*found.faults] == [1]
    assert found.lengths[0] == found.lengths[2] > found.lengths[1] == 0
    codec.close()


def test_rows_that_are_nested_too_deeply_are_bad_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    deep = lambda n: "[" * n + "1" + "]" * n
    row = json.dumps({"messages": [{**TALK[0], "x": "HERE"}, TALK[1]]})
    rows = [row.replace('"HERE"', deep(n)) for n in (1, 300, 900)] + [f'{{"x": {deep(900)}}}']
    path.write_text("\n".join(rows))
    codec = made(tmp_path)
    data = load_dataset([str(path)], codec, DataOptions(skip_bad=True))
    assert data.report.files[0].meta["bad"] >= 2
    assert data.report.files[0].meta["rows"] == 4
    codec.close()


def test_a_process_that_dies_is_replaced_and_names_its_row(tmp_path):
    codec = made(tmp_path)
    assert codec.decode([68]) == "a"
    os.kill(codec.submit(in_process.pid).result(), signal.SIGKILL)  # from outside: nothing is lost
    results = list(encode_batches(codec, [chats("good", "good")], 1))
    assert sum(len(batch) for batch, result in results if not result.faults) == 2
    os.kill(codec.submit(in_process.pid).result(), signal.SIGKILL)
    assert codec.decode([68]) == "a"
    batches, numbers = [[Pending(n, Text("a"))] for n in range(7)], []
    batches.append([Pending(7, Text("a")), Pending(8, _Abort())])
    with pytest.raises(Died) as error:
        numbers += (pending.number for batch, _ in encode_batches(codec, batches, 1 << 30) for pending in batch)
    assert error.value.row == 8
    assert numbers == [*range(8)]
    assert codec.decode([68]) == "a"
    codec.close()


class _Abort(Text):
    """Ends the process that looks at it."""

    def __new__(cls):
        return super().__new__(cls, "a")

    def __reduce__(self):
        return os.abort, ()


def test_what_has_no_end_is_ended_by_its_limit(tmp_path):
    """A template, say; which row it was is found as for a process that dies."""
    codec = made(tmp_path)
    with pytest.raises(Died):
        codec.call(in_process.spin)
    assert codec.decode([68]) == "a"
    codec.close()


SCRIPT = """
from trireme.engine.data.codec import load_codec
print("begun", flush=True)
codec = load_codec({folder!r})
print(codec.decode([68]), codec.submit(__import__("tests_pid").pid).result(), flush=True)
{rest}
"""


@pytest.mark.full
def test_a_script_without_a_guard_is_run_once_and_its_processes_end_with_it(tmp_path):
    make_tokenizer(tmp_path)
    (tmp_path / "tests_pid.py").write_text("import os\ndef pid(_): return os.getpid()\n")
    path, env = tmp_path / "script.py", os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    path.write_text(SCRIPT.format(folder=str(tmp_path), rest="import time; time.sleep(60)"))
    with subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout.readline() == "begun\n"
        word, child = process.stdout.readline().split()
        assert word == "a"
        process.kill()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break
        time.sleep(0.1)
    else:
        pytest.fail("the process is still there")


@pytest.mark.full
def test_limits_of_a_process(tmp_path):
    codec = made(tmp_path)
    soft, core, left = codec.submit(in_process.limits).result()
    assert soft < 4 * processes.MEMORY
    assert core == 0
    assert 0 < left <= processes.PATIENCE + processes.PER_CHARACTER * processes.SHOWN + 1
    codec.close()
