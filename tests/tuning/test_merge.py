"""Merging: killed at any moment it can be done again, and nothing that is not finite comes of it."""

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from adapters_of_peft import make, set_keys, tensors_of
from engines import fork
from packed_files import write_shards
from runs import ended
from safetensors.torch import load_file, save_file

from trireme.engine.tuning.adapters import WEIGHTS
from trireme.engine.tuning.base import stamps
from trireme.engine.tuning.merging import merge_adapter, new_folder
from trireme.models.config import InputError, read_config
from trireme.storage.checkpoint import open_source
from trireme.storage.files import StoreError

NAME = "model.layers.1.mlp.down_proj"


class Killed(BaseException):
    pass


class Kills:
    """From its n-th change of a file or folder on, a merge can change none: as if it were killed before it.

    An audit hook cannot be taken away: for processes that end.
    """

    def __init__(self):
        self.left = sys.maxsize
        sys.addaudithook(self.hear)

    def hear(self, event, args):
        writes = event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT
        if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            self.left -= 1
            if self.left < 0:
                raise Killed

    def before(self, n, merge):
        """Whether it made as many."""
        self.left = n
        with suppress(Killed):
            merge()
        killed, self.left = self.left < 0, sys.maxsize
        return killed


@pytest.fixture
def made(tmp_path):
    """A folder with an adapter, and its base in fp16."""
    make(tmp_path, target_modules=["down_proj"])
    path = tmp_path / "base/model.safetensors"
    save_file({name: t.half() for name, t in load_file(path).items()}, path, {"format": "pt"})
    (tmp_path / "base/additional_chat_templates").mkdir()
    (tmp_path / "base/additional_chat_templates/tools.jinja").write_text("{{ messages }}")
    return tmp_path


def merge(folder, out="out", source=None):
    base = folder / "base"
    with new_folder(folder / out) as place:
        merge_adapter(folder / "adapter", read_config(base), source or open_source(base), place)


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.full
def test_a_killed_merge_is_done_by_the_same_command(made):
    """What it leaves is never under the name of the output."""
    merge(made, "whole")
    whole = files(made / "whole")
    pid = fork()
    if not pid:
        try:
            kills, n = Kills(), 0
            while kills.before(n, lambda: merge(made)):
                assert not (made / "out").exists() or files(made / "out") == whole, n
                if not (made / "out").exists():
                    merge(made)
                assert files(made / "out") == whole, n
                (made / "out").rename(made / f"out-{n}")
                n += 1
            assert n > 2 * len(whole), n
            os._exit(0)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)
    assert ended(pid) == 0
    assert not list(made.glob(".out*/*"))


def test_a_folder_with_files_and_a_file_are_refused(made):
    for out, fill in (("full", lambda p: p.mkdir() or (p / "x").touch()), ("file", Path.touch)):
        fill(made / out)
        with pytest.raises(InputError, match="Name another folder"):
            merge(made, out)
    assert {p.name for p in made.iterdir()} == {"base", "adapter", "full", "file"}
    (made / "empty").mkdir()
    merge(made, "empty")


@pytest.mark.parametrize("touched", ["first", "other"])
def test_a_base_that_changes_meanwhile_is_noticed(made, touched):
    """Also a file of which all is copied."""
    base, copied = made / "base", "model.layers.0.self_attn.rotary_emb.inv_freq"
    first = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    write_shards(base, {"first.safetensors": first, "other.safetensors": {copied: torch.ones(4)}})

    class Touched(type(open_source(base))):
        def values(self, *given):
            os.utime(base / f"{touched}.safetensors", ns=(0, 0))
            return super().values(*given)

    source = open_source(base)
    assert stamps(source)
    with pytest.raises(StoreError, match=f"restore it: .*{touched}.safetensors"):
        merge(made, source=Touched(source.folder, source.files, source.tensors, source.auxiliary))
    assert not (made / "out").exists()


def spoil(path, name, value):
    tensors = load_file(path)
    tensors[name].view(-1)[3] = value
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(("where", "name"), [
    ("base/model.safetensors", f"{NAME}.weight"), ("base/model.safetensors", "model.layers.0.self_attn.q_proj.weight"),
    (f"adapter/{WEIGHTS}", f"base_model.model.{NAME}.lora_B.weight"),
])  # fmt: skip
def test_what_is_not_finite_is_refused(made, where, name, value):
    spoil(made / where, name, value)
    with pytest.raises(InputError, match=f"{where}: {name} .*damaged"):
        merge(made, "new/out")
    assert not (made / "new").exists()


@pytest.mark.parametrize(("scale", "alpha"), [(3000.0, 1e6), (1e25, 1.0)])
def test_what_f16_cannot_hold_is_refused(made, scale, alpha):
    with tensors_of(made / "adapter") as tensors:
        for t in tensors.values():
            t.mul_(scale)
    set_keys(made / "adapter", lora_alpha=alpha)
    with pytest.raises(InputError, match="lora_alpha"):
        merge(made)
    assert not (made / "out").exists()
