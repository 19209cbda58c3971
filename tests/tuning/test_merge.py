"""Merging: killed at any moment it can be done again, and nothing that is not finite comes of it."""

import fcntl
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engines import fork
from runs import ended
from safetensors.torch import load_file, save_file
from tiny import CASES, oracle

from trireme.engine.run.finished.merge import merge_of_run
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.adapters import WEIGHTS
from trireme.engine.tuning.merge import merged
from trireme.engine.tuning.peft_config import CONFIG
from trireme.engine.tuning.spellings import PREFIX
from trireme.models.config import InputError
from trireme.storage.files import StoreError

NAME = "model.layers.1.mlp.down_proj"


@dataclass
class Made:
    folder: Path

    def merge(self, out="out") -> None:
        merge_of_run(self.folder / "adapter", "", self.folder / out, Screen())

    def files(self, out="out") -> dict[str, bytes]:
        paths = (p for p in (self.folder / out).rglob("*") if p.is_file())
        return {str(p.relative_to(self.folder / out)): p.read_bytes() for p in paths}


def adapter(folder: Path, base: Path, scale=0.1, alpha=6.0) -> None:
    folder.mkdir()
    config = dict(peft_type="LORA", r=2, lora_alpha=alpha, target_modules=[NAME], base_model_name_or_path=str(base))
    (folder / CONFIG).write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    shapes = {f"{PREFIX}{NAME}.lora_A.weight": (2, 56), f"{PREFIX}{NAME}.lora_B.weight": (40, 2)}
    save_file({n: torch.randn(s, generator=generator) * scale for n, s in shapes.items()}, folder / WEIGHTS)


@pytest.fixture
def made(tmp_path) -> Made:
    model, _ = oracle(*CASES["llama"])
    model.half().save_pretrained(tmp_path / "base")
    (tmp_path / "base/generation_config.json").unlink()
    (tmp_path / "base/additional_chat_templates").mkdir()
    (tmp_path / "base/additional_chat_templates/tools.jinja").write_text("{{ messages }}")
    adapter(tmp_path / "adapter", tmp_path / "base")
    return Made(tmp_path)


class Killed(BaseException):
    pass


class Kills:
    """From its n-th change of a file or folder on, a merge can change none: as if it were killed before it.

    An audit hook cannot be taken away: for processes that end.
    """

    def __init__(self):
        self.left = sys.maxsize
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT
        if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            self.left -= 1
            if self.left < 0:
                raise Killed

    def before(self, n: int, merge: Callable[[], None]) -> bool:
        """Whether it made as many."""
        self.left = n
        with suppress(Killed):
            merge()
        killed, self.left = self.left < 0, sys.maxsize
        return killed


def in_child(body: Callable[[], None]) -> None:
    pid = fork()
    if not pid:
        try:
            body()
            os._exit(0)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)
    assert ended(pid) == 0


@pytest.mark.full
def test_a_killed_merge_is_done_by_the_same_command(made):
    made.merge("whole")
    whole = made.files("whole")

    def body() -> None:
        kills, n = Kills(), 0
        while kills.before(n, lambda: made.merge(f"out{n}")):  # noqa: B023
            made.merge(f"out{n}")
            assert made.files(f"out{n}") == whole, n
            n += 1
        assert n > 3 * len(whole), n
        assert made.files(f"out{n}") == whole

    assert "additional_chat_templates/tools.jinja" in whole
    in_child(body)


def test_what_another_command_has_left_is_not_touched(made):
    def body() -> None:
        assert Kills().before(9, made.merge)
        left = made.files()
        assert len(left) > 1
        (made.folder / "base/additional_chat_templates/tools.jinja").unlink()
        with pytest.raises(InputError, match="--out .*out is there already. Name another folder"):
            made.merge()
        assert made.files() == left

    in_child(body)


def test_a_link_to_nothing_is_no_place(made):
    (made.folder / "out").symlink_to("gone")
    with pytest.raises(InputError, match="--out .*out is a link to gone, which is not there"):
        made.merge()


@pytest.mark.parametrize("touched", ["first", "other"])
def test_a_base_that_changes_meanwhile_is_noticed(made, monkeypatch, touched):
    """Also a file of which all is copied."""
    base, copied = made.folder / "base", "model.layers.0.self_attn.rotary_emb.inv_freq"
    files = dict.fromkeys(load_file(base / "model.safetensors"), "first.safetensors") | {copied: "other.safetensors"}
    (base / "model.safetensors").rename(base / "first.safetensors")
    save_file({copied: torch.ones(4)}, base / "other.safetensors", {"format": "pt"})
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))

    def touches(*given):
        os.utime(base / f"{touched}.safetensors", ns=(0, 0))
        return merged(*given)

    monkeypatch.setattr("trireme.engine.tuning.merge.merged", touches)
    with pytest.raises(StoreError, match=f"was changed while it was merged; restore it: .*{touched}.safetensors"):
        made.merge()
    assert not (made.folder / "out").exists()


def test_two_merges_do_not_write_to_one_folder(made):
    (made.folder / "out").mkdir()
    fd = os.open(made.folder / "out", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(InputError, match="another process is merging there"):
        made.merge()
    os.close(fd)
    made.merge()


def spoil(path: Path, name: str, value: float) -> None:
    tensors = load_file(path)
    tensors[name][1, 1] = value
    save_file(tensors, path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [f"{NAME}.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_base_that_is_not_finite_is_refused(made, name, value):
    spoil(made.folder / "base/model.safetensors", name, value)
    with pytest.raises(InputError, match=f"base/model.safetensors: {name} holds NaN or .*; the checkpoint is damaged"):
        made.merge("new/out")
    assert not (made.folder / "new").exists()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_an_adapter_that_is_not_finite_is_refused(made, value):
    name = f"{PREFIX}{NAME}.lora_B.weight"
    spoil(made.folder / "adapter" / WEIGHTS, name, value)
    with pytest.raises(InputError, match=f"{WEIGHTS}: {name} holds NaN or infinite values; the adapter is damaged"):
        made.merge()
    assert not (made.folder / "out").exists()


@pytest.mark.parametrize(("scale", "alpha"), [(300.0, 1e6), (1e25, 1.0)])
def test_what_f16_cannot_hold_is_refused(made, scale, alpha):
    adapter(made.folder / "large", made.folder / "base", scale, alpha)
    (made.folder / "adapter").rename(made.folder / "small")
    (made.folder / "large").rename(made.folder / "adapter")
    (made.folder / "out").mkdir()
    with pytest.raises(InputError, match=f"{NAME}.weight: with the adapter of .*adapter, values are beyond F16"):
        made.merge()
    assert not any((made.folder / "out").iterdir())
