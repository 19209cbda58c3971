"""`import trireme`: training, plans, text and loss (docs/after-training.md). Imports nothing until it is used."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

_here = Path(__file__).resolve().parent
if _here.name == "command":  # of a clone, whose root has the folders
    __path__[:] = [str(_here), str(_here.parents[1])]

__all__ = ["Error", "Plan", "Run", "evaluate", "finetune", "plan", "sample"]

if TYPE_CHECKING:
    from trireme.engine.run.after.python import Error, Plan, Run, evaluate, finetune, plan, sample
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'trireme' has no attribute {name!r}")
        from trireme.engine.run.after import python

        return getattr(python, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
