"""Losses of preferences: values and derivatives against their formulas in torch, differentiated by autograd."""

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from trireme.models.losses.comparison import Comparison
from trireme.models.losses.preferences import Documents, Preference, compare

TRAINED = np.array([5, 3, 1, 7, 4, 4])
PARAMETERS = {
    "dpo": dict(beta=0.3),
    "dpo smoothed": dict(beta=0.3, label_smoothing=0.2),
    "ipo": dict(beta=0.7),
    "orpo": dict(beta=0.25),
    "simpo": dict(beta=2.0, simpo_gamma=0.8),
    "simpo smoothed": dict(beta=2.0, simpo_gamma=0.8, label_smoothing=0.1),
    "reward": {},
    "reward centred": dict(center_rewards_coefficient=0.3),
    "kto": dict(beta=0.4, desirable_weight=1.5, undesirable_weight=0.7),
}


def of(case: str) -> Preference:
    return Preference(case.split()[0], **PARAMETERS[case])


def documents(method: str, weights=(1.0, 1.0, 1.0), shift=0.0):
    random = np.random.default_rng(0)
    logps = random.normal(-1.5, 0.5, 6) * TRAINED
    logps = -np.abs(logps)
    signs = np.array([1, -1, -1]) if method == "kto" else np.ones(3)
    weights = np.repeat(np.array(weights) * signs, 2)
    return Documents(TRAINED + 2, TRAINED, weights, logps + random.normal(-shift, 1.0, 6)), logps


def in_torch(p: Preference, docs: Documents, logps: torch.Tensor):
    """(losses of pairs, rewards of documents) as trl writes them."""
    lengths, reference = torch.tensor(docs.trained), torch.tensor(docs.reference)
    rewards = logps - reference if p.method == "ipo" else None  # over tokens; else of what is compared
    if p.method in ("ipo", "simpo", "orpo"):
        logps, reference = logps / lengths, reference / lengths
    chosen, rejected = logps[::2], logps[1::2]
    ref_chosen, ref_rejected = reference[::2], reference[1::2]
    if p.method == "reward":  # margins: those of the first documents
        losses = -logsigmoid(chosen - rejected - ref_chosen) + p.center_rewards_coefficient * (chosen + rejected) ** 2
        return losses, logps.detach()
    if p.method == "dpo":
        logits = (chosen - rejected) - (ref_chosen - ref_rejected)
        smooth = p.label_smoothing
        losses = -logsigmoid(p.beta * logits) * (1 - smooth) - logsigmoid(-p.beta * logits) * smooth
    elif p.method == "ipo":
        losses = ((chosen - rejected) - (ref_chosen - ref_rejected) - 1 / (2 * p.beta)) ** 2
    elif p.method == "simpo":
        logits = chosen - rejected - p.simpo_gamma / p.beta
        smooth = p.label_smoothing
        losses = -logsigmoid(p.beta * logits) * (1 - smooth) - logsigmoid(-p.beta * logits) * smooth
    elif p.method == "orpo":
        odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
        losses = -chosen - p.beta * logsigmoid(odds)
    else:
        kl = (rejected - ref_rejected).mean().detach().clamp(min=0)
        ratio, good = chosen - ref_chosen, torch.tensor(docs.weights[::2] > 0)
        losses = torch.where(
            good,
            p.desirable_weight * (1 - torch.sigmoid(p.beta * (ratio - kl))),
            p.undesirable_weight * (1 - torch.sigmoid(p.beta * (kl - ratio))),
        )
    if rewards is None:
        rewards = logps - reference if p.compares else logps
    return losses, p.beta * rewards.detach()


@pytest.mark.parametrize("case", PARAMETERS)
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 2.0, 1.0)])
@pytest.mark.parametrize("shift", [-2.0, 2.0])  # with and without a positive KL
def test_losses_and_derivatives_are_those_of_the_formulas(case, weights, shift):
    p = of(case)
    docs, values = documents(p.method, weights, shift=shift)
    logps = torch.tensor(values, requires_grad=True)
    losses, rewards = in_torch(p, docs, logps)
    (losses * torch.tensor(weights)).sum().backward()
    found = compare(p, docs, values)
    np.testing.assert_allclose(found.losses, losses.detach(), rtol=1e-12)
    np.testing.assert_allclose(found.slopes, logps.grad, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(found.rewards, rewards, rtol=1e-12)
    assert found.loss == pytest.approx(np.average(losses.detach(), weights=weights))


def test_metrics_have_trl_s_names():
    docs, values = documents("dpo")
    rewards = in_torch(of("dpo"), docs, torch.tensor(values))[1].numpy()
    chosen, rejected = rewards[::2], rewards[1::2]
    assert compare(of("dpo"), docs, values).metrics() == pytest.approx({
        "rewards/chosen": chosen.mean(), "rewards/rejected": rejected.mean(),
        "rewards/accuracies": (chosen > rejected).mean(), "rewards/margins": (chosen - rejected).mean(),
        "logps/chosen": values[::2].mean(), "logps/rejected": values[1::2].mean(),
    })  # fmt: skip
    docs, values = documents("reward")
    good, bad = values[::2], values[1::2]
    assert compare(of("reward"), docs, values).metrics() == pytest.approx({
        "min_reward": values.min(), "mean_reward": values.mean(), "max_reward": values.max(),
        "accuracy": (good > bad).mean(), "margin": (good - bad).mean(),
    })  # fmt: skip


def test_of_unpaired_answers_a_side_may_be_missing():
    p = of("kto")
    docs, values = documents("kto", shift=2.0)
    found = compare(p, docs, values).metrics()
    assert found["kl"] == pytest.approx(np.mean((values - docs.reference)[1::2]))
    assert found["rewards/chosen"] == pytest.approx(0.4 * (values - docs.reference)[0])
    assert found["rewards/margins"] == found["rewards/chosen"] - found["rewards/rejected"]
    assert "rewards/accuracies" not in found
    good = compare(p, docs._replace(weights=np.abs(docs.weights)), values).metrics()
    assert not {"rewards/rejected", "rewards/margins", "logps/rejected"} & good.keys()


def test_an_answer_that_is_certain_has_finite_odds():
    docs, values = documents("orpo")
    values[0] = values[3] = 0.0
    found = compare(of("orpo"), docs, values)
    assert np.isfinite(found.losses).all()
    assert np.isfinite(found.slopes).all()


@pytest.mark.parametrize("case", ["dpo", "kto"])
def test_micro_batches_and_hosts_share_a_comparison(case):
    """Sums over each document's tokens, and a factor for each token; of kto its counterparts are read before."""
    p = of(case)
    docs, _ = documents(p.method)
    parts = [Documents(*(each[:2] for each in docs)), Documents(*(each[2:] for each in docs))]
    losses = torch.rand(int(docs.lengths.sum()))
    pieces = losses.split([int(part.lengths.sum()) for part in parts])
    logps = torch.from_numpy(docs.sums(losses.numpy()))
    sums = np.array([float(part.double().sum()) for part in losses.split(docs.lengths.tolist())])
    np.testing.assert_allclose(logps, -sums, rtol=1e-12)
    expected = compare(p, docs, logps.numpy())
    trained = slice(None, None, 2 if case == "kto" else 1)

    def tokens(b, which):
        return torch.cat(pieces[b].split(parts[b].lengths.tolist())[which])

    def factors(made, own, gather):
        if case == "kto":
            made.measure([tokens(b, slice(1, None, 2)) for b in own], gather)
        return [made.factors(i, tokens(b, trained)) for i, b in enumerate(own)]

    both = Comparison(p, [parts])
    found = factors(both, (0, 1), lambda parts: None)
    wanted = np.repeat(-expected.slopes[trained], docs.lengths[trained])
    np.testing.assert_allclose(torch.cat(found), wanted, rtol=1e-6)
    (pairs,) = both.conclude(lambda parts: None)
    assert pairs.tolist() == (expected.weights * expected.losses).tolist()
    assert both.metrics == expected.metrics()
    gather = lambda given: [
        each.copy_(part) for each, part in zip(given, logps.split([2, len(logps) - 2, 0]), strict=True)
    ]
    for host, own in enumerate([(0,), (1,), ()]):  # the last without a document
        alone = Comparison(p, [parts[:1], parts[1:], []], host)
        assert all(map(torch.equal, factors(alone, own, gather), [found[b] for b in own]))
        assert own or torch.equal(alone.factors(0, torch.rand(3)), torch.zeros(3))
        assert [each.tolist() for each in alone.conclude(gather)] == [pairs.tolist()] * (host == 0)
        assert alone.metrics == both.metrics
