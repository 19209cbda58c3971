"""Models with a score head in place of the output matrix: classifiers and reward models. No torch.

As transformers' *ForSequenceClassification: `score.weight` (labels, D) without a bias, applied to each document's last
token that is not the padding's.
"""

from __future__ import annotations

from typing import Any

from trireme.models.families.keys import InputError, Keys
from trireme.models.families.known import IN_CLASSES, WITHOUT_SCORES

OUTPUT = "score"  # name of the head's module
CLASS = "ForSequenceClassification"  # end of the names of transformers' classes
MOST = 1 << 16  # labels
STD = 0.02  # transformers' initializer_range, where config.json has none


def labels_of(raw: dict[str, Any], source: str) -> int:
    """The number of labels of a score head, by config.json; 0 for a language model. Raises InputError."""
    classes = raw.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else ""
    if not (isinstance(first, str) and first.endswith(CLASS)):
        return 0
    names, keys = raw.get("id2label"), Keys(raw, source)
    count = len(names) if isinstance(names, dict) and names else 2
    count = keys.count("num_labels", count, MOST, null=count)
    if count > MOST:
        raise InputError(f"{source}: id2label has {count:,} labels; the most is {MOST:,}.")
    return count


def class_of(model_type: str) -> str:
    """transformers' class of a model with a score head."""
    return (IN_CLASSES.get(model_type) or "".join(part.capitalize() for part in model_type.split("_"))) + CLASS


def std_of(raw: dict[str, Any]) -> float:
    """Standard deviation of a new head's weights."""
    std = raw.get("initializer_range")
    return float(std) if isinstance(std, (int, float)) and 0 < std < 1 else STD


def scores_obstacle(model_type: str, wrapper: str) -> str:
    """Why a model cannot have a score head; "" if it can."""
    if wrapper:
        return f"{wrapper} is a model of images and text"
    return f"transformers has no class {CLASS} of {model_type}" if model_type in WITHOUT_SCORES else ""
