"""Long texts: the MLP half in tiles of rows, and contexts that are extended."""

import json
from dataclasses import replace

import pytest
import stories
import torch
import transformers
from blocks import check_subsets
from safetensors.torch import load_file
from tiny import CASES, LLAMA, YARN, Tiny, oracle, relative, shifted_labels

from trireme.engine.run.job import make
from trireme.engine.run.loop import train as finetune
from trireme.engine.run.options import Options
from trireme.models.config import InputError, parse_config, read_config
from trireme.models.families.extend import extended
from trireme.models.rows import rope_tables
from trireme.models.sizes import shapes

pytestmark = pytest.mark.grid

TILED = ["gpt2", "llama biases", "qwen3", "granite", "gemma3", "qwen3 moe", "qwen2 moe"]


@pytest.mark.parametrize("case", TILED)
def test_tiles_are_the_mlp(case):
    """Logits, losses and gradients of the untiled half, but for rounding; a text of one tile has its bits."""
    reference, cfg = oracle(*CASES[case])
    state, lengths = reference.state_dict(), [13, 1, 20, 9]
    ids = torch.randint(cfg.vocab, (43,), generator=torch.Generator().manual_seed(1))
    labels = shifted_labels(ids, lengths)
    whole, one, many = (Tiny(replace(cfg, mlp_rows=n), state) for n in (1 << 14, 43, 8))
    losses = whole.train(ids, labels, lengths)
    assert torch.equal(one.train(ids, labels, lengths), losses)
    assert all(torch.equal(g, whole.grads[name]) for name, g in one.grads.items())
    assert relative(many.train(ids, labels, lengths), losses) < 1e-6
    for name, g in many.grads.items():
        assert relative(g, whole.grads[name]) < 1e-5 or "k_proj.bias" in name, name


@pytest.mark.parametrize(("dtype", "grad_dtype"), [("F32", "F32"), ("BF16", "F32"), ("BF16", "BF16")])
@pytest.mark.parametrize("case", TILED)
def test_every_subset_of_saved_in_tiles(case, dtype, grad_dtype):
    """Gives the same bits, the last tile being shorter."""
    reference, cfg = oracle(*CASES[case])
    tiny = Tiny(replace(cfg, mlp_rows=8), reference.state_dict(), dtype, grad_dtype)
    mine = [name for name in shapes.saved_shapes(cfg, 1) if name not in ("qkv", "attn_out", "lse", "attn_branch")]
    check_subsets(tiny, mine)


# ---------------------------------------------------------------- --rope-factor

OLD = LLAMA | dict(model_type="llama", rope_theta=5e5)  # the spelling of transformers 4
NEW = LLAMA | dict(model_type="qwen3", rope_parameters=dict(rope_type="default", rope_theta=1e6))
PART = LLAMA | dict(model_type="glm4", head_dim=8, partial_rotary_factor=0.5, rope_scaling=None, pad_token_id=None)


@pytest.mark.parametrize("raw", [OLD, NEW, PART])
def test_an_extended_context_is_yarn(raw):
    """As read by us and by transformers: the same positions, tables equal to the bit."""
    longer = extended(raw, 2.5, "config.json")
    cfg = parse_config(longer)
    rope = cfg.attentions[0].rope
    assert (cfg.max_positions, rope.kind, rope.factor, rope.original_positions) == (160, "yarn", 2.5, 64)
    kept = dict(kind="default", factor=1.0, original_positions=0, attention_factor=1.0)
    assert replace(rope, **kept) == parse_config(raw).attentions[0].rope
    config = transformers.AutoConfig.for_model(**longer)
    assert config.max_position_embeddings == 160
    model = transformers.AutoModelForCausalLM.from_config(config)
    cos, sin = model.base_model.rotary_emb(torch.zeros(1), torch.arange(160)[None])
    table = rope_tables(cfg, 160, "cpu")[rope].key
    half = cos.shape[2] // 2
    assert torch.equal(table.cos, cos[0, :, :half])
    assert torch.equal(table.sin, sin[0, :, :half])


def test_an_extended_context_inside_a_wrapper():
    text = OLD | dict(model_type="mistral")
    longer = extended(dict(model_type="mistral3", text_config=text), 2.0, "config.json")
    assert parse_config(longer).max_positions == 128
    assert parse_config(longer).attentions[0].rope.kind == "yarn"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (dict(model_type="gpt2", vocab_size=9, n_embd=8, n_layer=1, n_head=1), "learned"),
        (OLD | dict(rope_scaling=YARN), 'scaled already, by "yarn"'),
        (OLD | dict(model_type="gemma3_text"), "two kinds"),
        (OLD | dict(model_type="olmo3", rope_parameters=dict(full_attention=YARN)), "two kinds"),
        (OLD | dict(rope_scaling="yarn"), "rope_scaling"),
        (OLD | dict(model_type="phi3"), "longrope"),
    ],
)
def test_positions_that_cannot_be_extended(raw, words):
    with pytest.raises(InputError, match=words) as e:
        extended(raw, 2.0, "config.json")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("kind", [None, [], {}, "mamba", "mistral3"])
def test_what_cannot_be_read_is_refused_later(kind):
    for raw in (dict(model_type=kind), dict(model_type="mistral3", text_config=dict(model_type=kind))):
        with pytest.raises(InputError):
            parse_config(extended(raw, 2.0, "config.json"))


@pytest.mark.full
def test_a_run_beyond_the_context(tmp_path):
    """config.json of the output says the new one, and transformers opens it with our logits at that length."""
    stories.make_text(tmp_path / "stories.txt", 20, seed=1)
    stories.make_checkpoint(tmp_path / "model", tmp_path / "stories.txt", seed=1)
    config = json.loads((tmp_path / "model/config.json").read_text()) | dict(max_position_embeddings=64)
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    options = Options(
        model=str(tmp_path / "model"), data=(str(tmp_path / "stories.txt"),), out=str(tmp_path / "out"), seq_len=128,
        batch_size=2, max_steps=2, lr=1e-2, device="cpu", rope_factor=2.0,
    )  # fmt: skip
    with pytest.raises(InputError, match="--rope-factor 2"):
        make(replace(options, rope_factor=None))
    with pytest.raises(InputError, match="--merge"):
        make(replace(options, lora=2))
    finetune(options)
    cfg = read_config(tmp_path / "out")
    assert cfg == read_config(tmp_path / "model", 2.0)
    assert (cfg.max_positions, cfg.attentions[0].rope.kind) == (128, "yarn")
    reopened = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.randint(1, cfg.vocab, (128,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reopened(ids[None]).logits[0]
    assert relative(Tiny(cfg, load_file(tmp_path / "out/model.safetensors")).logits(ids, [128]), expected) < 1e-5
