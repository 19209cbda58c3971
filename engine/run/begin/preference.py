"""--method: what is made of the data, with its parameters by TRL's names."""

from __future__ import annotations

from collections.abc import Mapping

from trireme.engine.data.formats.pairs import Kind
from trireme.engine.run.options import Options
from trireme.models.config import InputError
from trireme.models.losses.preferences import METHODS, Preference

PARAMETERS: Mapping[str, tuple[str, ...]] = {  # methods that have it
    "beta": METHODS,
    "label_smoothing": ("dpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


def preference_of(options: Options) -> Preference | None:
    """None of supervised fine-tuning. Raises InputError where a parameter is not one of the method."""
    given = {name: value for name in PARAMETERS if (value := getattr(options, name)) is not None}
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
    own = [name for name, methods in PARAMETERS.items() if of.method in methods]
    return f"{of.method} ({', '.join(f'{name} {getattr(of, name):g}' for name in own)})"
