"""Score heads: losses of transformers' classifiers, gradients of autograd, sizes as counted."""

from dataclasses import replace
from functools import partial

import pytest
import tiny
import torch
import transformers
from engines import exchange, opened, scored
from tiny import CASES
from torch.nn.functional import cross_entropy

from trireme.engine.build import collate, to_devices
from trireme.engine.step import evaluate
from trireme.models import head
from trireme.models.config import InputError, Lora, parse_config
from trireme.models.config import scored as with_scores
from trireme.models.families.known import WITHOUT_SCORES
from trireme.models.families.scores import class_of
from trireme.models.families.table import FAMILIES
from trireme.models.norm import Norm
from trireme.models.rows import rope_tables
from trireme.models.sizes import costs, measure, shapes

LLAMA = dict(
    model_type="llama", vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
)


def test_classes_are_named_as_by_transformers_and_families_without_one():
    classes = transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    inner = {name for name in FAMILIES if name not in classes}
    assert inner == WITHOUT_SCORES
    for name in FAMILIES.keys() - inner:
        assert class_of(name) == classes[name]
    cfg = replace(parse_config(LLAMA), model_type="olmoe")
    with pytest.raises(InputError, match="X: .*olmoe"):
        with_scores(cfg, 2, "X")
    with pytest.raises(InputError, match="X: gemma3"):
        with_scores(replace(cfg, wrapper="gemma3"), 2, "X")


@pytest.mark.grid
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt_neox", "qwen3 moe", "qwen3.5"])
def test_classes_are_those_of_transformers(name, tmp_path):
    """One document at a time; without the factors and caps of a language model's logits."""
    like, _ = tiny.oracle(*CASES[name])
    keys = {key: value for key, value in like.config.to_dict().items() if key != "architectures"}
    config = transformers.AutoConfig.for_model(**keys)
    config.num_labels, config.pad_token_id = 3, None
    theirs = (
        transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").float().eval()
    )
    for p in theirs.parameters():
        torch.nn.init.normal_(p, 0.0, 0.1)
    theirs.save_pretrained(tmp_path)
    cfg, source, _ = opened(tmp_path)
    assert (cfg.scores, cfg.tied, shapes.output_name(cfg)) == (3, False, "score.weight")
    assert shapes.parameters(cfg) == sum(p.numel() for p in theirs.parameters()) + sum(
        buffer.numel() for buffer_name, buffer in theirs.named_buffers() if buffer_name.endswith("correction_bias")
    )
    e, x = exchange(cfg, source, "gpu", dtype="F32")
    x.load()
    step = scored(cfg, 1, 2, 24)[0]
    for mb in step:
        mb.weights = None
    micro = [to_devices(collate(cfg, mb), [(rope_tables(cfg, 64, "cpu"), "cpu")]) for mb in step]
    for mb, losses in zip(step, evaluate(e, micro), strict=True):
        parts = (torch.from_numpy(values).long().split(mb.lengths) for values in (mb.ids, mb.labels))
        for ids, labels, found in zip(*parts, losses.split(mb.lengths), strict=True):
            (at,) = (labels >= 0).nonzero()[0].tolist()
            expected = cross_entropy(theirs(input_ids=ids[None, : at + 1]).logits, labels[at][None])
            assert found[at].item() == pytest.approx(expected.item(), abs=1e-5)
            assert found.count_nonzero() == 1


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("trained", [True, False])
def test_gradients_are_those_of_autograd(labels, trained):
    """Of more documents than a head reads at once; a head without a document adds nothing."""
    T = 2 * head.SCORE_ROWS + 100  # half of them end a document
    cfg = replace(parse_config(LLAMA), scores=labels, tied=False)
    torch.manual_seed(0)
    make = partial(torch.randn, dtype=torch.float32)
    x, weight, w_out, rows = make(T, 16), make(16), make(labels, 16), torch.arange(1, T, 2)
    classes, factors = torch.full((T,), -100), torch.rand(T)
    classes[rows] = torch.randint(0, labels, (len(rows),))
    g = [torch.zeros(16), torch.zeros(labels, 16) if trained else torch.empty(0, 0)]
    dx, correct = torch.full_like(x, float("nan")), torch.zeros(1, dtype=torch.float64)
    w = head.HeadWeights(Norm(weight, cfg.eps), w_out)
    of, into = head.Targets(classes, rows, factors, None, correct), (head.HeadWeights(Norm(g[0], cfg.eps), g[1]), dx)
    losses = head.head_loss(cfg, w, x, of, 0.5, *into)
    wide = [t.double().requires_grad_() for t in (x, weight, w_out)]
    normed = wide[0] * torch.rsqrt(wide[0].pow(2).mean(1, keepdim=True) + cfg.eps) * wide[1]
    scores = (normed @ wide[2].T)[rows]
    each = -scores[:, 0] if labels == 1 else cross_entropy(scores, classes[rows], reduction="none")
    (0.5 * each * factors[rows]).sum().backward()
    torch.testing.assert_close(losses[rows].double(), each.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dx.double(), wide[0].grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(g[0].double(), wide[1].grad, rtol=1e-5, atol=1e-6)
    if trained:
        torch.testing.assert_close(g[1].double(), wide[2].grad, rtol=1e-5, atol=1e-6)
    right = (scores.argmax(1) == classes[rows]) if labels > 1 else torch.ones(len(rows))
    assert correct.item() == pytest.approx((right * factors[rows]).sum().item())
    none = head.head_loss(cfg, w, x, head.Targets(classes, rows[:0], factors), 0.5, *into)
    assert not none.any()
    assert not dx.any()


def test_a_score_head_is_counted_in_place_of_the_output_matrix():
    base = parse_config(LLAMA | dict(tie_word_embeddings=False))
    cfg, u = replace(base, scores=3), base.n_units - 1
    assert shapes.parameters(base) - shapes.parameters(cfg) == (50 - 3) * 16
    assert measure.forward_flops(cfg, u, 7, 0) == 2 * 7 * 3 * 16
    assert measure.backward_flops(cfg, u, 7, 0) == 4 * 7 * 3 * 16
    lora = replace(cfg, lora=Lora(2, 4.0, ("q_proj",)), frozen=("*",))
    assert measure.backward_flops(lora, u, 7, 0) == 4 * 7 * 3 * 16
    names = [name for part in shapes.trained_parts(lora, u) for group in part for name, _ in group]
    assert names == ["score.weight"]
    assert costs.model_flops(base, 10, 5) - costs.model_flops(cfg, 10, 5) == 6 * 10 * 50 * 16


@pytest.mark.parametrize(("keys", "labels"), [
    ({}, 0),
    (dict(architectures=["LlamaForCausalLM"]), 0),
    (dict(architectures=["LlamaForSequenceClassification"]), 2),  # as transformers has it by default
    (dict(architectures=["LlamaForSequenceClassification"], id2label={"0": "LABEL_0"}), 1),
    (dict(architectures=["LlamaForSequenceClassification"], num_labels=5), 5),
])  # fmt: skip
def test_labels_by_config_json(keys, labels):
    cfg = parse_config(LLAMA | keys)
    assert (cfg.scores, cfg.opener.endswith("SequenceClassification")) == (labels, labels > 0)
    assert parse_config(LLAMA | keys | dict(initializer_range=0.3)).score_std == 0.3
