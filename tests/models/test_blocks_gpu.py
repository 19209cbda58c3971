"""On a GPU: the blocks of every family compute what they do on a CPU, and let the host run ahead."""

from dataclasses import replace

import pytest
import torch
from tiny import CASES, Tiny, oracle, relative, shifted_labels

from trireme.models import model
from trireme.models.rows import make_load
from trireme.models.sizes import shapes

pytestmark = pytest.mark.gpu
LENGTHS = [13, 1, 20, 9]
KINDS = [
    "gpt2 scaled by layer",
    "gpt_neox",
    "gpt_neox in sequence, whole heads",
    "ministral3 tied, window",
    "smollm3 window, biases",
    "granite 4 tied, biases, no rope",
    "starcoder2 window, untied",
    "olmo2 tied, biases",
    "exaone4",
    "seed_oss other biases",
    "gemma2",
    "gemma3 untied, two ropes",
    "glm4",
    "qwen3 moe",
    "qwen3 moe of one expert",
    "qwen2 moe",
    "mixtral window, tied",
    "olmoe",
    "gpt oss, other limits",
    "glm4 moe, q and k norms, biases",
    "deepseek v3",
    "deepseek v2, groups, queries without a latent, yarn",
    "youtu",
    "qwen3.5",
    "qwen3 next",
    "olmo hybrid",
    "granite 4 hybrid with experts",
    "falcon h1",
    "nemotron 3 of all kinds, latents, groups",
]


@pytest.fixture(scope="module", params=KINDS)
def case(request):
    """(config, weights, token ids) of a model."""
    reference, cfg = oracle(*CASES[request.param])
    ids = torch.randint(cfg.vocab, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return cfg, reference.state_dict(), ids


def saved_names(cfg):
    """Of tensors that some layer can save."""
    return list({name: None for layer in cfg.layers for name in shapes.saved_of(cfg, layer, 1)})


def test_losses_and_gradients_are_those_of_a_cpu(case):
    cfg, state, ids = case
    here, there = Tiny(cfg, state), Tiny(cfg, state, device="cuda")
    labels, keep = shifted_labels(ids, LENGTHS), saved_names(cfg)[::2]
    expected = here.train(ids, labels, LENGTHS)
    losses = there.train(ids.to(there.device), labels.to(there.device), LENGTHS, keep)
    assert relative(losses.cpu(), expected) < 1e-4
    norm = max(float(grad.norm()) for grad in here.grads.values())
    for name, grad in here.grads.items():  # of some biases nothing but rounding is left
        assert float((there.grads[name].cpu() - grad).norm()) < 1e-3 * float(grad.norm()) + 1e-5 * norm, name


def test_no_block_waits_for_the_gpu(case):
    """The MLP in tiles and whole, with the loss that evens out experts."""
    cfg, state, ids = case
    tiny = Tiny(cfg, state, "BF16", "F32", device="cuda")
    load = make_load(cfg, len(ids), 0.1, tiny.device)
    ids, rows, keep = ids.to(tiny.device), tiny.rows(LENGTHS, load), saved_names(cfg)[1::2]

    def step():
        xs, saves = tiny.hidden(ids, rows, keep)
        dy, dx = torch.ones_like(xs[0]), torch.empty_like(xs[0])
        for u in range(cfg.n_layers, 0, -1):
            model.backward(tiny.cfg, u, tiny.w[u], tiny.g[u], xs[u - 1], saves[u - 1], dy, rows, dx)
            dy, dx = dx, dy

    before = torch.cuda.get_sync_debug_mode()
    for tile in (cfg.mlp_rows, 16):
        tiny.cfg = replace(cfg, mlp_rows=tile)
        step()  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
