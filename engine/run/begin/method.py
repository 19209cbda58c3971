"""--method, --labels and --teacher: what is trained from the data. Parameters have TRL's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trireme.engine.data.dataset import find_labels
from trireme.engine.data.prepare import Kind
from trireme.engine.data.taught import is_scores, read_names
from trireme.engine.run.config.option_names import flag_of
from trireme.engine.run.options import Options
from trireme.engine.tuning.headed import check_problem, names_in
from trireme.models.config import InputError, ModelConfig, Teaching, labels_of, scored
from trireme.models.losses.preferences import METHODS, Preference

BETAS = tuple(method for method in METHODS if method != "reward")
PARAMETERS: Mapping[str, tuple[str, ...]] = {  # methods that have it
    "beta": BETAS,
    "label_smoothing": ("dpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "center_rewards_coefficient": ("reward",),
}


TOP_K = 64  # of a teacher's pass
OF_A_TEACHER = ("distill_weight", "temperature", "top_k")


def teaching_of(options: Options) -> Teaching | None:
    """The loss with a teacher; None without one. Raises InputError."""
    if not options.teacher:
        for name in OF_A_TEACHER:
            if (value := getattr(options, name)) is not None:
                raise InputError(f"{flag_of(name)} {value:g} is for --teacher FOLDER. Leave it out.")
        return None
    if options.method != "sft":
        raise InputError(f"--teacher: a teacher is for --method sft, not {options.method}. Leave one of them out.")
    k = options.top_k or TOP_K
    if is_scores(options.teacher):
        k = read_names(options.teacher).k
        if options.top_k not in (None, k):
            raise InputError(f"--top-k {options.top_k}: {options.teacher} has {k} tokens of each. Leave it out.")
    weight = 0.5 if options.distill_weight is None else options.distill_weight
    return Teaching(k, weight, options.temperature or 1.0)


def preference_of(options: Options) -> Preference | None:
    """The method of preferences; None for supervised fine-tuning. Raises InputError for parameters of other methods."""
    given = {name: value for name in PARAMETERS if (value := getattr(options, name)) is not None}
    if options.method == "sft":
        given.pop("label_smoothing", None)  # of the cross-entropy
    for name, value in given.items():
        if options.method not in PARAMETERS[name]:
            methods = " or ".join(PARAMETERS[name]) if PARAMETERS[name] != BETAS else "dpo and its relatives"
            raise InputError(f"{flag_of(name)} {value:g} is for --method {methods}. Leave it out.")
    method = next((method for method in METHODS if method == options.method), None)
    return Preference(method, **given) if method else None


KINDS: Mapping[str, Kind] = {"sft": "", "kto": "labels", "reward": "rewards", "classify": "classes"}


def kind_of_data(options: Options) -> Kind:
    return KINDS.get(options.method, "pairs")


# ---------------------------------------------------------------- score heads


def with_labels(options: Options, config: dict[str, Any]) -> Options:
    """The options with the names of the labels: those given, or those of config.json, or of the data. Raises
    InputError.
    """
    if options.method != "classify":
        return options
    there = labels_of(config, options.model)
    known = names_in(config, there) if there > 1 else ()
    if known:
        check_problem(config, options.model)
        if options.labels and ",".join(options.labels) != ",".join(known):
            named = ",".join(known)[:200]
            raise InputError(f"--labels: the checkpoint is a classifier of {there} labels: {named}. Leave it out.")
        return replace(options, labels=known)
    if options.labels or not options.data:
        return options
    return replace(options, labels=find_labels(options.data, options.map))


def with_head(options: Options, cfg: ModelConfig) -> ModelConfig:
    """The config with the head that the method trains. Raises InputError if the checkpoint has another."""
    where = options.model or options.shape or ""
    scores = {"reward": 1, "classify": len(options.labels)}.get(options.method)
    if scores is None:
        if cfg.scores:
            needs = "--method reward" if cfg.scores == 1 else "--method classify"
            raise InputError(f"{where} has a score head ({of_head(cfg)}), and no output matrix. Train it: {needs}.")
        return cfg
    if not scores:
        raise InputError("--method classify: how many classes? No --data names them. Give --labels N, or their names.")
    if cfg.scores and cfg.scores != scores:
        raise InputError(f"--method {options.method}: {where} has a score head already, {of_head(cfg)}.")
    return cfg if cfg.scores else scored(cfg, scores, where)


def of_head(cfg: ModelConfig) -> str:
    return "a reward" if cfg.scores == 1 else f"{cfg.scores} labels"


def described(of: Preference) -> str:
    """The method with its parameters."""
    return f"{of.method} ({', '.join(f'{name} {value:g}' for name, value in parameters(of).items())})"


def parameters(of: Preference) -> dict[str, Any]:
    """The parameters of a method, by name."""
    return {name: getattr(of, name) for name, methods in PARAMETERS.items() if of.method in methods}
