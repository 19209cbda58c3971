"""trireme from Python: what the page shows, results as the log has them, an exception for each exit code."""

import ast
import inspect
import json
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
from runs import make_small

from trireme.engine.run.finished import python as trireme
from trireme.engine.run.options import Options
from trireme.models import config
from trireme.storage.files import StoreError

ROOT = Path(__file__).parents[2]
SMALL = dict(model="model", data="stories.txt", seq_len=64, batch_size=4, max_steps=3, show=False)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(make_small(tmp_path, "model"))
    return tmp_path


@pytest.mark.full
def test_the_example_of_the_page(here, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    names = {"__name__": "example"}
    exec(example.replace("import trireme", "from trireme.engine.run.finished import python as trireme"), names)
    said, run = capsys.readouterr().out.splitlines(), names["run"]
    assert said[0].startswith("6 None ")
    records = [json.loads(line) for line in Path("runs/python/log.jsonl").read_text().splitlines()]
    assert names["losses"] == [record.get("loss") for record in records]
    assert run.losses == [(r["step"], r["loss"]) for r in records if "loss" in r]
    assert run.evaluations == [(r["step"], r["eval_loss"]) for r in records if "eval_loss" in r]
    assert run.best[1] == min(loss for step, loss in run.evaluations if step)
    assert run.steps == 6
    assert isinstance(run.tokens, int)
    assert float(said[-1]) > 1
    assert Path("runs/python/adapter_model.safetensors").exists()


def test_the_package_has_the_calls_and_editors_see_them():
    """In a process of its own, from the clone: nothing is imported until it is used."""
    code = """if True:
        import sys, trireme
        assert not [name for name in sys.modules if name.startswith(("trireme.", "torch"))]
        assert {"finetune", "plan", "InputError"} <= set(dir(trireme))
        print(trireme.finetune.__module__, trireme.DoesNotFit.exit_code)
        assert "torch" not in sys.modules
        from trireme.storage.layout import pack
        try:
            trireme.nothing
        except AttributeError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "trireme.engine.run.finished.python 3", "module 'trireme' has no attribute 'nothing'"
    ], done.stderr  # fmt: skip


def test_what_is_exported_is_what_there_is():
    tree = ast.parse((ROOT / "scripts" / "command" / "__init__.py").read_text())
    (names,) = (
        ast.literal_eval(n.value)
        for n in tree.body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
    )
    (imported,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.endswith(".python")
    )
    assert names == [alias.name for alias in imported.names] == sorted(names)
    assert all(hasattr(trireme, name) for name in names)


def test_every_option_is_a_keyword():
    """Where this fails, write the new option into finished/python.py's Given."""
    options = {f.name for f in fields(Options)} - {"demo", "dry_run"}
    assert set(trireme.Given.__annotations__) == options
    assert set(inspect.signature(trireme.finetune).parameters) == options | {"on_step", "show"}


@pytest.mark.parametrize(
    ("given", "argv"),
    [
        (dict(lora=16, no_pack=True, skip_bad=False, val=None), ["--lora=16", "--no-pack"]),
        (dict(data=["a", Path("b")], store=["c", "d"]), ["--data=a", "--data=b", "--store=c,d"]),
        (dict(val=["a", "b"]), ["--val=a", "--val=b"]),
        (dict(val=0.02), ["--val=0.02"]),
        (dict(betas=(0.9, 0.95), learning_rate=1e-5), ["--betas=0.9,0.95", "--learning-rate=1e-05"]),
        (dict(chat_template_kwargs={"a": False}), ['--chat-template-kwargs={"a": false}']),
        (dict(map={"prompt": "question", "completion": "my answer"}), ["--map=prompt=question,completion=my answer"]),
    ],
)
def test_options_are_those_of_the_command_line(given, argv):
    assert trireme.words_of(given) == argv


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(model="gone"), trireme.InputError, "gone is not a folder|no config.json|gone"),
        (dict(learnign_rate=1), trireme.InputError, "unknown option --learnign-rate. Did you mean --learning-rate"),
        (dict(dry_run=True), trireme.InputError, "a dry run is trireme.plan"),
        (dict(gpu_memory="1KiB"), trireme.DoesNotFit, "even the smallest plan needs"),
    ],
)
def test_an_exception_for_each_exit_code(here, change, error, message):
    with pytest.raises(error, match=message) as found:
        trireme.finetune(**{**SMALL, **change})
    assert found.value.exit_code == {trireme.InputError: 2, trireme.DoesNotFit: 3}[error]


def test_an_exception_in_on_step_is_a_warning_once(capsys):
    heard = []
    hear = trireme.hearing(lambda record: heard.append(record["step"]) or 1 / (2 - record["step"]))
    for step in (1, 2, 3):
        hear({"step": step})
    assert heard == [1, 2]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: on_step has failed and is not called any more: ZeroDivisionError")


def test_nothing_is_taken_for_another_argument(here):
    with pytest.raises(TypeError, match="positional"):
        trireme.finetune("model", "stories.txt")


def test_several_files_are_evaluated_together(here):
    Path("short.txt").write_text("Once there was a cat.")
    files = ["stories.txt", Path("short.txt")]
    one, other = (trireme.evaluate("model", name, seq_len=64) for name in files)
    both = trireme.evaluate("model", files, seq_len=64)
    assert both["trained_tokens"] == one["trained_tokens"] + other["trained_tokens"]
    total = sum(each["loss"] * each["trained_tokens"] for each in (one, other))
    assert both["loss"] == pytest.approx(total / both["trained_tokens"], rel=1e-12)


def test_rows_of_token_ids_are_evaluated_without_a_tokenizer(here):
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]}] * 3
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with_one = trireme.evaluate("model", "rows.jsonl")
    Path("model/tokenizer.json").unlink()
    assert trireme.evaluate("model", "rows.jsonl") == with_one
    with pytest.raises(trireme.InputError, match="the checkpoint has no tokenizer.json, which this data needs"):
        trireme.evaluate("model", "stories.txt")
    with pytest.raises(trireme.InputError, match="data has no tokenizer.json"):
        trireme.evaluate("model", "rows.jsonl", tokenizer="data")
    with pytest.raises(trireme.InputError, match="model has no tokenizer.json. Name a folder that has one"):
        trireme.sample("model", "Once")


@pytest.mark.parametrize("data", [5, b"a.txt", {"text": "a"}, [{"text": "a"}], ["a.txt", None]])
def test_data_that_are_no_names_are_refused(data):
    for call in (lambda: trireme.evaluate("model", data), lambda: trireme.finetune(model="model", data=data)):
        with pytest.raises(trireme.InputError, match="^--data: .* is no name of a file. Give a path or a list of"):
            call()


@pytest.mark.parametrize("prompt", [5, b"Once", ["Once", "There"], Path("prompt.txt")])
def test_a_prompt_is_a_text_or_messages(prompt):
    with pytest.raises(trireme.InputError, match="^the prompt is .*; expected a text or a list of messages"):
        trireme.sample("model", prompt)


def test_a_file_that_a_drive_does_not_give_is_a_device_error(here, monkeypatch):
    def fails(*args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(config, "read_small", fails)
    with pytest.raises(trireme.DeviceError, match=r"model/config\.json cannot be read: Input/output error"):
        trireme.finetune(**SMALL)


@pytest.mark.full
def test_stopped_by_a_signal_it_is_saved_and_goes_on(here):
    stop = lambda record: signal.raise_signal(signal.SIGINT) if record["step"] == 1 else None
    with pytest.raises(trireme.Interrupted, match="finetune.resume='out'. continues the run") as found:
        trireme.finetune(**SMALL, out="out", on_step=stop)
    assert found.value.exit_code == 130
    run = trireme.finetune(resume="out", show=False)
    assert [step for step, _ in run.losses] == [1, 2, 3]


def test_a_full_drive_is_a_device_error(here, monkeypatch):
    from trireme.engine.run import train

    def full(*args, **kwargs):
        raise StoreError(28, "No space left on device", "out/store")

    monkeypatch.setattr(train, "finetune", full)
    with pytest.raises(trireme.DeviceError, match="out/store: No space left on device") as found:
        trireme.finetune(**SMALL)
    assert found.value.exit_code == 4


@pytest.mark.full
def test_a_plan_for_another_machine(here):
    plan = trireme.plan(shape="llama-8b", assume="gpu=rtx4090,ram=64GiB,ssd=2TB", lora=16, batch_size=4)
    assert plan.step_s > 0
    assert plan.tokens_per_second == pytest.approx(plan.tokens_per_step / plan.step_s)
    assert 0 < plan.gpu_bytes < 24 << 30
    assert plan.run_s > plan.steps * plan.step_s
    assert plan.report[0].startswith("model    ")


def test_pages_of_calls_are_indented_as_python():
    for example in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        ast.parse(textwrap.dedent(example))
