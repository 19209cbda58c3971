"""Whole models against transformers, for each family and its variants; and their blocks, whatever is saved."""

import json
from contextlib import nullcontext

import pytest
import torch
import transformers
from blocks import check_every_subset
from engines import exchange, final_weights, opened
from safetensors.torch import load_file, save_file
from tiny import CASES, InDouble, Tiny, apart, oracle, own_name, relative, shifted_labels

from trireme.engine.memory import DTYPE
from trireme.models import hf
from trireme.models.config import read_config
from trireme.models.families.table import FAMILIES
from trireme.models.rows import rope_tables

pytestmark = pytest.mark.grid


def packed(lengths, vocab, seed=1):
    ids = torch.randint(vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return ids, shifted_labels(ids, lengths)


def oracle_run(model, ids, labels, lengths):
    """(logits, losses) of the documents one by one, gradients of the mean loss in model.grad."""
    logits = torch.cat([model(doc[None]).logits[0] for doc in ids.split(lengths)])
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    losses[labels >= 0].mean().backward()
    return logits.detach(), losses.detach()


IN_FP64 = [case for case, (model_type, _) in CASES.items() if FAMILIES[model_type].scan or FAMILIES[model_type].layers]


@pytest.mark.grid("granite 4 hybrid with experts", "qwen3.5", "nemotron 3")
@pytest.mark.parametrize("case", IN_FP64)
def test_where_rounding_grows_in_fp64(case):
    """In recurrences of random weights, and of scores that are not scaled; experts change: fp32 is no oracle."""
    # transformers rounds Falcon-H1's ssm_multipliers, and Gemma 4's factor of embeddings, to fp32
    most = {"falcon_h1": 1e-7, "gemma4_text": 4e-6}.get(CASES[case][0], 1e-11)
    check_as_transformers(case, "F64", most, InDouble())


@pytest.mark.grid("gpt2", "llama 3.1 rope", "gemma2", "qwen3 moe", "gpt oss", "deepseek v3")
@pytest.mark.parametrize("case", [case for case in CASES if case not in IN_FP64])
def test_as_transformers(case):
    check_tables(*check_as_transformers(case, "F32", 1e-5))


def check_as_transformers(case, dtype, most, arithmetic=None):
    """Documents packed into one run give what transformers gives for each alone. Returns its model and our config."""
    with arithmetic or nullcontext():
        reference, cfg = oracle(*CASES[case])  # computes frequencies of rope
    reference.to(DTYPE[dtype]).set_experts_implementation("eager")  # grouped products have no fp64
    lengths = [13, 1, 20, 9]
    ids, labels = packed(lengths, cfg.vocab)
    labels[3:6] = -100
    tiny = Tiny(cfg, reference.state_dict(), dtype)
    with arithmetic or nullcontext():
        logits, losses = oracle_run(reference, ids, labels, lengths)
        assert relative(tiny.logits(ids, lengths), logits) < most
        assert relative(tiny.train(ids, labels, lengths, keep=("qkv", "resid")), losses) < most
    grads = tiny.grads
    assert all((p.grad is None) == cfg.carries(name) for name, p in reference.named_parameters() if p.requires_grad)
    for name, p in ((name, p) for name, p in reference.named_parameters() if p.grad is not None):
        error = relative(grads.pop(own_name(cfg, name)).view(p.shape), p.grad)
        # a key bias moves no softmax: its gradient is zero but for rounding
        assert error < most or name.endswith("k_proj.bias") and float(p.grad.norm()) < 1e-6, (name, error)
    assert not grads
    return reference, cfg


ONE_EACH = {model_type: case for case, (model_type, _) in reversed(CASES.items())}


@pytest.mark.parametrize("case", ONE_EACH.values())
def test_a_saved_folder_goes_through(case, tmp_path):
    """config.json as transformers writes it is read, and tensors under the names they came by make the same model."""
    reference, cfg = oracle(*CASES[case])
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    reference.save_pretrained(theirs)
    assert read_config(theirs) == cfg
    state = load_file(theirs / "model.safetensors")
    cfg = hf.as_stored(cfg, {name: tuple(t.shape) for name, t in state.items()})
    tiny = Tiny(cfg, state)
    canonical = hf.canonical_names(cfg, {name: tuple(t.shape) for name, t in state.items()})
    views = dict(part for unit in tiny.views for name, view in unit.items() for part in apart(cfg, name, view))
    ours.mkdir()
    (ours / "config.json").write_bytes((theirs / "config.json").read_bytes())
    kept = {name: state[name] if there is None else views[there].clone() for name, there in canonical.items()}
    save_file(kept, ours / "model.safetensors", {"format": "pt"})
    reopened = transformers.AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float32)
    state = reopened.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in reference.state_dict().items())


@pytest.mark.parametrize(
    "case",
    ["qwen3 moe", "minimax m2", "hy v3", "afmoe", "kolibri1", "laguna", "mimo v2 flash", "granite moe", "nemotron 3"],
)
def test_files_with_the_names_of_modules_go_through(case, tmp_path):
    """As transformers writes them of a model in parts, or where it is told to: a layer's experts in one, and so on."""
    reference, _ = oracle(*CASES[case])
    reference.save_pretrained(tmp_path / "theirs", save_original_format=False)
    reference.save_pretrained(tmp_path / "released")

    def loaded(folder):
        e, x = exchange(*opened(tmp_path / folder)[:2], dtype="F32")
        x.load()
        return torch.cat([*final_weights(e).values()]), x

    (weights, x), (expected, _) = loaded("theirs"), loaded("released")
    assert torch.equal(weights, expected)
    x.save(tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(t, after[name]) for name, t in before.items())


@pytest.mark.parametrize("case", IN_FP64)
def test_tables_of_angles_are_those_of_transformers(case):
    check_tables(*oracle(*CASES[case]))


def check_tables(reference, cfg):
    """Of angles, bitwise: each kind of layer has a table of ours."""
    one = getattr(reference.base_model, "rotary_emb", None)
    rotaries = getattr(reference.base_model, "rotary_embs", [one] if one else [])  # one of them, or one for each theta
    tables = rope_tables(cfg, 40, "cpu")
    if not rotaries:
        assert not tables
        return
    x, positions = torch.zeros(1), torch.arange(40)[None]
    ours = [tables[spec.rope].key for spec in cfg.attentions if spec.rope]
    for rotary, kind in ((r, kind) for r in rotaries for kind in getattr(r, "layer_types", [None])):
        theirs = rotary(x, positions, *([] if kind is None else [kind]))
        complex_ = torch.is_tensor(theirs)  # DeepSeek-V2's
        cos, sin = (theirs.real, theirs.imag) if complex_ else theirs
        near = lambda a, b, c=complex_: torch.equal(a, b) or (c and relative(a, b) < 1e-7)
        assert any(
            near(t.cos, cos[0][:, : t.cos.shape[1]]) and near(t.sin, sin[0][:, : t.sin.shape[1]]) for t in ours
        ), kind


@pytest.mark.parametrize("folder", ["stories260k", "capp-gpt2"])
def test_a_real_checkpoint_has_the_losses_that_transformers_gave(real, folder):
    """Losses and gradient norms that transformers gave for a real checkpoint."""
    expected = json.loads((real / folder / "reference.json").read_text())
    cfg = read_config(real / folder)
    tiny = Tiny(cfg, load_file(real / folder / "model.safetensors"))
    ids = torch.tensor(expected["ids"])
    losses = tiny.train(ids, shifted_labels(ids, [len(ids)]), [len(ids)])
    assert losses[:-1].tolist() == pytest.approx(expected["token_losses"], rel=1e-5, abs=1e-5)
    assert float(losses[:-1].mean()) == pytest.approx(expected["loss"], rel=1e-5)
    norms = {name: float(g.double().norm()) for name, g in tiny.grads.items()}
    assert norms == pytest.approx(expected["grad_norms"], rel=1e-5)


@pytest.mark.parametrize("grad_dtype", ["F32", "BF16"])
@pytest.mark.parametrize("case", ["gpt2", "llama biases", "qwen3", "phi3", "granite", "olmo2", "gemma3"])
def test_gradients_in_bf16_are_as_near_as_those_of_transformers(case, grad_dtype):
    """In bf16 our gradients are as near to the fp32 ones as those of transformers in bf16."""
    reference, cfg = oracle(*CASES[case])
    lengths = [30, 14]
    ids, labels = packed(lengths, cfg.vocab)
    reference.bfloat16()
    oracle_run(reference, ids, labels, lengths)
    exact, tiny = Tiny(cfg, reference.state_dict()), Tiny(cfg, reference.state_dict(), "BF16", grad_dtype)
    exact.train(ids, labels, lengths)
    tiny.train(ids, labels, lengths)
    theirs = {name: relative(p.grad, exact.grads[name]) for name, p in reference.named_parameters()}
    for name, g in tiny.grads.items():
        assert relative(g, exact.grads[name]) < 1.2 * theirs[name] + 0.002, name


# ---------------------------------------------------------------- blocks by themselves

DTYPES = ("BF16", "F32"), ("BF16", "BF16"), ("F32", "F32")
# Blocks that differ in what follows from what: all subsets of their saved tensors; few of those that are like them.
FIRST = "llama", "gpt2", "gemma2", "gpt_neox", "falcon h1", "qwen2 moe", "gpt oss"
OTHERS = (
    "llama biases", "mistral window", "qwen3", "gpt2 scaled by layer",
    "phi3", "granite", "smollm3", "starcoder2", "olmo2", "olmo3", "exaone4", "seed_oss", "gemma3",
    "ministral3 tied, window", "glm4", "granite 4", "qwen3 moe",
    "glm4 moe", "minimax m2", "hy v3", "afmoe", "kolibri1", "granite moe", "granite swa", "ernie moe", "hunyuan",
    "arcee", "laguna", "mimo v2 flash",
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "dtype", "grad_dtype"),
    [(case, *DTYPES[i % 3]) for i, case in enumerate((*FIRST, *OTHERS))],
)
def test_gradients_are_equal_whatever_is_saved(case, dtype, grad_dtype):
    model_type, keys = CASES[case]
    check_every_subset(model_type, dtype, grad_dtype, few=case in OTHERS, **keys)
