"""Frozen tensors and adapters: the gradients of what is trained are as before, and as peft's."""

import re
from dataclasses import replace

import pytest
import torch
from tiny import CASES, Tiny, oracle, relative, shifted_labels
from wrapped import either

from trireme.engine.tuning.adapters import peft_names
from trireme.kernels import reference
from trireme.models.config import InputError, Lora
from trireme.models.lora import Dropout, part_key
from trireme.models.sizes import shapes

pytestmark = pytest.mark.grid


LENGTHS = [9, 1, 14]
TARGETS = {"gpt2": ("c_attn", "c_proj", "c_fc"), "llama": ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")}
PACKED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LATER = {  # other families -> targets
    "phi3": PACKED, "phi3 tied, longrope beyond": PACKED[:1], "smollm3": TARGETS["llama"], "granite": TARGETS["llama"],
    "starcoder2": ("q_proj", "k_proj", "c_fc", "c_proj"), "olmo2": TARGETS["llama"], "exaone4": ("k_proj", "up_proj"),
    "qwen2 moe": ("q_proj", "shared_expert.gate_proj", "shared_expert.down_proj"),
    "qwen3 moe": ("q_proj", "k_proj", "v_proj", "o_proj"), "mixtral": ("experts",), "gpt oss": ("experts", "k_proj"),
    "deepseek v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "experts"),
    "youtu untied, queries without a latent": ("q_proj", "kv_b_proj"),
    "flint": ("experts", "q_proj", "shared_expert.down_proj"),
    "muse glimmer": ("q_proj", "self_attn.gate_proj", "o_proj", "down_proj"),
    "lara mini": ("experts", "q_proj", "in_proj_qkv", "in_proj_a", "out_proj"),
    "mimo v2 flash": ("experts", "q_proj", "v_proj", "o_proj"),
    "laguna": ("experts", "q_proj", "g_proj"), "laguna tied, gates of each value, heads of all": ("v_proj", "g_proj"),
    "afmoe": ("experts", "o_proj"), "kolibri1": ("experts", "k_proj", "shared_experts.down_proj"),
    "glm4 moe": ("experts", "o_proj"), "qwen3 moe among dense layers": ("experts",),
    "arcee": ("k_proj", "up_proj", "down_proj"), "hunyuan": TARGETS["llama"],
    "gemma3": TARGETS["llama"], "glm4": ("v_proj", *PACKED[1:]),
    "qwen3.5": ("q_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "down_proj"),
    "olmo hybrid": ("q_proj", "g_proj", "a_proj", "o_proj", "up_proj"),
    "granite 4 hybrid": ("in_proj", "out_proj", "v_proj", "input_linear", "output_linear"),
    "granite 4 hybrid with experts": ("experts", "in_proj", "shared_mlp.input_linear"),
    "falcon h1": ("in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"),
    "nemotron 3": ("in_proj", "q_proj", "shared_experts.up_proj", "shared_experts.down_proj"),
    "nemotron 3 of all kinds, latents, groups": ("experts", "fc1_latent_proj", "fc2_latent_proj", "o_proj"),
    "qwen3 next": ("v_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
}  # fmt: skip
FAMILIES = ("gpt2", "gpt2 untied", "llama", "llama tied", "llama biases", "qwen3", "qwen2")


def tokens():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 97, (sum(LENGTHS),), generator=generator)
    return ids, shifted_labels(ids, LENGTHS)


def adapted(case: str, targets: tuple[str, ...]):
    """(peft's model with random adapters, ours with the same)"""
    import peft

    reference, cfg = either(case)
    base = {name: t.clone() for name, t in reference.state_dict().items()}
    modules = [target for target in targets if target != "experts"]
    parameters = [] if len(modules) == len(targets) else ["experts.gate_up_proj", "experts.down_proj"]
    parameters = [
        name.replace("gate_", "gate_" if all(layer.experts.gated for layer in cfg.layers if layer.experts) else "")
        for name in parameters
    ]
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=modules,
        target_parameters=parameters,
        fan_in_fan_out="gpt2" in case,
        exclude_modules=".*vision.*" if any("vision" in name for name, _ in reference.named_modules()) else None,
    )
    theirs = peft.get_peft_model(reference, config)
    for name, p in theirs.named_parameters():
        if "lora_" in name:
            p.data.copy_(torch.randn_like(p) * 0.3)
    cfg = replace(cfg, lora=Lora(3, 6.0, targets), frozen=("*",))
    state = as_ours(cfg, {name: p.data for name, p in theirs.named_parameters() if "lora_" in name})
    ours = Tiny(replace(cfg, frozen=tuple(base) + ("lm_head.weight", "*")), base | state)
    return theirs, ours


def as_ours(cfg, theirs):
    """Tensors of adapters by our names, B of experts by expert and rank."""
    names, ranks = {there: name for name, there in peft_names(cfg).items()}, cfg.lora.rank
    found = {names[name.replace(".default", "")]: t for name, t in theirs.items()}
    turned = lambda t: t.view(len(t), ranks, -1).permute(2, 1, 0).reshape(-1, len(t))
    experts = {name for name in found if ".experts." in name and "lora_B" in name}
    return {name: turned(t) if name in experts else t for name, t in found.items()}


def their_loss(theirs, ids, labels):
    """The mean over labels, document by document."""
    total, at = 0.0, 0
    for n in LENGTHS:
        Masked.at = at
        logits = theirs(ids[None, at : at + n]).logits[0]
        total = total + torch.nn.functional.cross_entropy(
            logits, labels[at : at + n], reduction="sum", ignore_index=-100
        )
        at += n
    return total / (labels >= 0).sum()


def check(case: str, targets: tuple[str, ...], keep: tuple[str, ...], most: float = 1e-5) -> None:
    compare(*adapted(case, targets), keep, most)


def compare(theirs, ours, keep: tuple[str, ...] = (), most: float = 1e-5) -> None:
    ids, labels = tokens()
    loss = their_loss(theirs, ids, labels)
    loss.backward()
    losses = ours.train(ids, labels, LENGTHS, keep)
    assert float(losses.sum() / (labels >= 0).sum()) == pytest.approx(loss.item(), rel=1e-5)
    grads = as_ours(ours.cfg, {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad})
    assert grads.keys() == ours.grads.keys()
    for name, grad in grads.items():
        assert relative(ours.grads[name], grad) < most, name


@pytest.mark.parametrize("keep", [(), ("qkv", "attn_out", "lse", "resid"), ("gate_up", "fc", "resid")])
@pytest.mark.parametrize("case", FAMILIES)
def test_losses_and_gradients_are_those_of_peft(case, keep):
    check(case, TARGETS["gpt2" if "gpt2" in case else "llama"], keep)


class Masked(torch.nn.Module):
    """In place of a module's dropout in peft: the mask of our kernel, of tokens from `at`."""

    at = 0

    def __init__(self, name):
        super().__init__()
        layer, rest = re.search(r"\.(\d+)\.(.*)\.lora_dropout", name).groups()
        self.key = 77 ^ part_key(f"layer {layer}") ^ part_key(rest)

    def forward(self, x):
        ones = torch.ones(x.shape[-2:])
        return x * reference.dropout(ones, 0.3, self.key, 5 + Masked.at)


@pytest.mark.parametrize(("case", "rows"), [("llama", 1 << 14), ("llama", 10), ("gpt2", 1 << 14), ("qwen2 moe", 10)])
def test_dropout_is_that_of_peft(case, rows):
    """With the same mask for each matrix, layer and token, in tiles of the MLP too."""
    theirs, ours = adapted(case, LATER.get(case) or TARGETS[case])
    for name, module in theirs.named_modules():
        if name.endswith("lora_dropout"):
            module["default"] = Masked(name)
    ours.cfg = replace(ours.cfg, mlp_rows=rows)
    plain = ours.rows
    ours.rows = lambda *of: plain(*of)._replace(dropout=Dropout(0.3, 77, 5))
    compare(theirs, ours, most=1e-4)  # 1.3e-5 on some processors


@pytest.mark.parametrize("case", LATER)
def test_the_dialects_of_other_families(case):
    """What they multiply, norm and pack differently; the branch's matmul is kept in one, made again in the other."""
    for keep in (("qkv", "attn_branch", "mlp_branch", "gate_up"), ()):
        check(case, LATER[case], keep, 1e-4)  # longer sums, larger factors; 3e-5 on some processors


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("frozen", [("*norm*", "*ln_*", "*bias"), ("*embed_tokens*", "*wte*", "lm_head*"), ("*mlp*",)])
def test_the_gradients_of_what_is_trained_do_not_change(case, frozen):
    reference, cfg = oracle(*CASES[case])
    whole = Tiny(cfg, reference.state_dict())
    some = Tiny(replace(cfg, frozen=frozen), reference.state_dict())
    ids, labels = tokens()
    assert torch.equal(whole.train(ids, labels, LENGTHS), some.train(ids, labels, LENGTHS))
    assert 0 < len(some.grads) < len(whole.grads)
    for name, grad in some.grads.items():
        assert torch.equal(grad, whole.grads[name]), name


def test_one_product_is_frozen_as_a_whole():
    _, cfg = oracle(*CASES["llama"])
    with pytest.raises(InputError, match="are multiplied as one matrix"):
        shapes.trained_parts(replace(cfg, frozen=("*q_proj*",)), 1)
