"""Losses of preferences: from log-probabilities of documents to a loss for each pair and its derivatives. No torch.

A pair is two documents in a row. Of kto the second is the first's prompt with another row's completion, which measures
how far the model has moved (its gradient is 0); the first is desirable where its weight is above 0.
Legend: P pairs; logps are sums over a document's trained tokens, or of a reward model its scores;
sigma(x) = 1 / (1 + exp(-x)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

Method = Literal["dpo", "ipo", "orpo", "simpo", "kto", "reward"]
METHODS: tuple[Method, ...] = get_args(Method)
COMPARED: tuple[Method, ...] = ("dpo", "ipo", "kto")  # with a reference: the model before training
SURE = -1e-7  # a mean log-probability above it is rounding, and has no odds


@dataclass(frozen=True)
class Preference:
    """A method and its parameters, named as in TRL."""

    method: Method
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    center_rewards_coefficient: float = 0.0

    @property
    def compares(self) -> bool:
        """Whether it needs the reference's log-probabilities."""
        return self.method in COMPARED


class Documents(NamedTuple):
    """Documents of some micro-batches, pairs together."""

    lengths: np.ndarray  # (2P,) int64, tokens
    trained: np.ndarray  # (2P,) int64, of them with a label
    weights: np.ndarray  # (2P,) float64; of kto's undesirable answers below 0
    reference: np.ndarray  # (2P,) float64: logps; 0 where there is none. Of rewards a pair's first: its margin

    def chosen(self, selection: slice) -> Documents:
        return Documents(*(values[selection] for values in self))

    @property
    def pairs(self) -> np.ndarray:
        """Weight of each pair, (P,)."""
        return np.abs(self.weights[::2])

    def sums(self, losses: np.ndarray) -> np.ndarray:
        """logps, (2P,) float64, of losses by token, (N,)."""
        return -np.add.reduceat(losses.astype(np.float64), np.cumsum(self.lengths) - self.lengths)


def joined(parts: Sequence[Documents]) -> Documents:
    return Documents(*(np.concatenate(values) for values in zip(*parts, strict=True)))


class Compared(NamedTuple):
    losses: np.ndarray  # (P,) float64, without weights
    slopes: np.ndarray  # (2P,) float64: derivatives of the weighted losses' sum by logps
    chosen: np.ndarray  # (2P,) bool: documents that count as good; `rejected` as bad
    rejected: np.ndarray
    rewards: np.ndarray  # (2P,) float64
    logps: np.ndarray  # (2P,) float64
    weights: np.ndarray  # (P,) float64
    kl: float | None = None
    scored: bool = False  # by a reward model

    @property
    def loss(self) -> float:
        """The weighted mean."""
        return float((self.weights * self.losses).sum() / self.weights.sum())

    def metrics(self) -> dict[str, float]:
        """Means over the step by TRL's names. A side (chosen, rejected) without documents is left out."""
        if self.scored:
            good, bad, rewards = self.rewards[::2], self.rewards[1::2], self.rewards
            extent = {"min_reward": rewards.min(), "mean_reward": rewards.mean(), "max_reward": rewards.max()}
            means = extent | {"accuracy": (good > bad).mean(), "margin": (good - bad).mean()}
            return {name: float(value) for name, value in means.items()}
        means, sides = dict[str, float](), {"chosen": self.chosen, "rejected": self.rejected}
        for name, values in (("rewards", self.rewards), ("logps", self.logps)):
            means |= {f"{name}/{side}": float(values[mask].mean()) for side, mask in sides.items() if mask.any()}
        if self.kl is None:
            means["rewards/accuracies"] = float((self.rewards[::2] > self.rewards[1::2]).mean())
        else:
            means["kl"] = self.kl
        if {"rewards/chosen", "rewards/rejected"} <= means.keys():
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means


def compare(pref: Preference, docs: Documents, logps: np.ndarray, kl: float | None = None) -> Compared:
    """Losses and derivatives of pairs. logps (2P,) float64. `kl`: of kto's whole step; None: of these pairs.

    Formulas and defaults as in TRL; sources: DPO (Rafailov et al. 2023, arXiv:2305.18290) with label smoothing
    (Mitchell 2023), IPO (Azar et al. 2023, arXiv:2310.12036) of means, ORPO (Hong et al. 2024, arXiv:2403.07691), whose
    likelihood term is the mean over the chosen answer's tokens as in the paper, SimPO (Meng et al. 2024,
    arXiv:2405.14734), KTO (Ethayarajh et al. 2024, arXiv:2402.01306), rewards as of Bradley and Terry with a margin
    (Touvron et al. 2023, arXiv:2307.09288) and centered (Eisenstein et al. 2023, arXiv:2312.09244).
    """
    if pref.method == "kto":
        return _kto(pref, docs, logps, kl)
    if pref.method == "reward":
        return _rewards(pref, docs, logps)
    lengths = docs.trained if pref.method != "dpo" else np.ones(len(logps))
    values = (logps - docs.reference if pref.compares else logps) / lengths
    good, bad = values[::2], values[1::2]
    if pref.method == "orpo":
        losses, by_good, by_bad = _orpo(pref, good, bad)
    elif pref.method == "ipo":
        excess = good - bad - 1 / (2 * pref.beta)
        losses, by_good, by_bad = excess**2, 2 * excess, -2 * excess
    else:
        z = pref.beta * (good - bad) - (pref.simpo_gamma if pref.method == "simpo" else 0.0)
        losses = -(1 - pref.label_smoothing) * _log_sigma(z) - pref.label_smoothing * _log_sigma(-z)
        by_good = pref.beta * (pref.label_smoothing * _sigma(z) - (1 - pref.label_smoothing) * _sigma(-z))
        by_bad = -by_good
    slopes = np.stack([by_good, by_bad], 1).reshape(-1) / lengths * np.repeat(docs.pairs, 2)
    chosen = np.arange(len(logps)) % 2 == 0
    if pref.method == "ipo":  # TRL logs sums
        return Compared(losses, slopes, chosen, ~chosen, pref.beta * (logps - docs.reference), logps, docs.pairs)
    return Compared(losses, slopes, chosen, ~chosen, pref.beta * values, logps / lengths, docs.pairs)


def _orpo(pref: Preference, good: np.ndarray, bad: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(losses, derivatives by the mean log-probability of either side)."""
    good, bad = np.minimum(good, SURE), np.minimum(bad, SURE)
    odds = good - np.log(-np.expm1(good)) - bad + np.log(-np.expm1(bad))
    slope = pref.beta * _sigma(-odds)
    return -good - pref.beta * _log_sigma(odds), -1 + slope / np.expm1(good), -slope / np.expm1(bad)


def _kto(pref: Preference, docs: Documents, logps: np.ndarray, kl: float | None) -> Compared:
    ratios = logps - docs.reference
    kl = max(0.0, float(ratios[1::2].mean())) if kl is None else kl
    answers, signs = ratios[::2], np.sign(docs.weights[::2])
    weights = docs.pairs * np.where(signs > 0, pref.desirable_weight, pref.undesirable_weight)
    value = _sigma(signs * pref.beta * (answers - kl))
    losses = np.where(signs > 0, pref.desirable_weight, pref.undesirable_weight) * (1 - value)
    slopes = np.zeros(len(logps))
    slopes[::2] = -weights * signs * pref.beta * value * (1 - value)
    chosen, rejected = np.zeros(len(logps), bool), np.zeros(len(logps), bool)
    chosen[::2], rejected[::2] = signs > 0, signs < 0
    return Compared(losses, slopes, chosen, rejected, pref.beta * ratios, logps, docs.pairs, kl)


def _rewards(pref: Preference, docs: Documents, scores: np.ndarray) -> Compared:
    good, bad = scores[::2], scores[1::2]
    z, total = good - bad - docs.reference[::2], good + bad
    losses = -_log_sigma(z) + pref.center_rewards_coefficient * total**2
    slope, centred = _sigma(-z), 2 * pref.center_rewards_coefficient * total
    slopes = np.stack([centred - slope, centred + slope], 1).reshape(-1) * np.repeat(docs.pairs, 2)
    chosen = np.arange(len(scores)) % 2 == 0
    return Compared(losses, slopes, chosen, ~chosen, scores, scores, docs.pairs, scored=True)


def _sigma(x: np.ndarray) -> np.ndarray:
    return np.exp(_log_sigma(x))


def _log_sigma(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0.0, -x)
