"""The files of scripts/, imported as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    """scripts/NAME.py, which may import the scripts beside it."""
    path = ROOT / "scripts" / f"{name}.py"
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # where dataclasses look up their annotations
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(path.parent))
