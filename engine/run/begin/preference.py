"""--method and --teacher: what is made of the data, with parameters by TRL's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.engine.data.files.scores import is_scores, read_names
from trireme.engine.data.formats.pairs import Kind
from trireme.engine.run.options import Options
from trireme.models.config import InputError, Teaching
from trireme.models.losses.preferences import METHODS, Preference

PARAMETERS: Mapping[str, tuple[str, ...]] = {  # methods that have it
    "beta": METHODS,
    "label_smoothing": ("dpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


TOP_K = 64  # of a teacher's pass
OF_A_TEACHER = ("distill_weight", "temperature", "top_k")


def teaching_of(options: Options) -> Teaching | None:
    """None without a teacher. Raises InputError."""
    if not options.teacher:
        for name in OF_A_TEACHER:
            if (value := getattr(options, name)) is not None:
                raise InputError(f"--{name.replace('_', '-')} {value:g} is for --teacher FOLDER. Leave it out.")
        return None
    if options.method != "sft":
        raise InputError(f"--teacher: --method {options.method} compares answers, and has none. Leave one of both out.")
    k = options.top_k or TOP_K
    if is_scores(options.teacher):
        k = read_names(options.teacher).k
        if options.top_k not in (None, k):
            raise InputError(f"--top-k {options.top_k}: {options.teacher} has {k} tokens of each. Leave it out.")
    weight = 0.5 if options.distill_weight is None else options.distill_weight
    return Teaching(k, weight, options.temperature or 1.0)


def preference_of(options: Options) -> Preference | None:
    """None of supervised fine-tuning. Raises InputError where a parameter is not one of the method."""
    given = {name: value for name in PARAMETERS if (value := getattr(options, name)) is not None}
    if options.method == "sft":
        given.pop("label_smoothing", None)  # of the cross-entropy
    for name, value in given.items():
        if options.method not in PARAMETERS[name]:
            methods = " or ".join(PARAMETERS[name]) if len(PARAMETERS[name]) < len(METHODS) else "dpo and its relatives"
            raise InputError(f"--{name.replace('_', '-')} {value:g} is for --method {methods}. Leave it out.")
    method = next((method for method in METHODS if method == options.method), None)
    return Preference(method, **given) if method else None


def kind_of_data(options: Options) -> Kind:
    if options.method == "sft":
        return ""
    return "labels" if options.method == "kto" else "pairs"


def described(of: Preference) -> str:
    """The method with its parameters."""
    return f"{of.method} ({', '.join(f'{name} {value:g}' for name, value in parameters(of).items())})"


def parameters(of: Preference) -> dict[str, Any]:
    """Of its method."""
    return {name: getattr(of, name) for name, methods in PARAMETERS.items() if of.method in methods}
