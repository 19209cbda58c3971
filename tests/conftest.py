"""Which cases are tested; fixtures are in helpers/shared_fixtures.py."""

import os
import sys
from collections import Counter
from itertools import combinations

import pytest

sys.dont_write_bytecode = False  # whatever the environment says: test modules and commands start in half the time
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # no test leaves this machine


def pytest_configure(config):
    """The process that only hands out tests to those of -n does without torch, which takes seconds."""
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        config.pluginmanager.import_plugin("shared_fixtures")  # pytest has fixtures


def pytest_ignore_collect(collection_path, config):
    """Modules that -m leaves out whole are not imported."""
    return True if collection_path.name.endswith("_gpu.py") and "not gpu" in config.option.markexpr else None


def pytest_pycollect_makeitem(collector, name, obj):
    """Makes no cases of functions that -m leaves out: half of the time of collection."""
    terms = collector.config.option.markexpr.split(" and ")
    left_out = {term.removeprefix("not ") for term in terms if term.startswith("not ")}
    of_module = getattr(collector.module, "pytestmark", [])
    marks = [*getattr(obj, "pytestmark", []), *(of_module if isinstance(of_module, list) else [of_module])]
    if name.startswith("test") and any(mark.name in left_out for mark in marks):
        return []
    return None


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by marker
def pytest_collection_modifyitems(config, items):
    """Leaves out what `turns` does not take; marks cases of a `grid` but the named ones, or the first, `full`."""
    functions = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("turns") and not item.get_closest_marker("gpu"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    taken = {item for cases in functions.values() for item in _by_turns(cases)}
    left_out = [item for cases in functions.values() for item in cases if item not in taken]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
    seen = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        grid = item.get_closest_marker("grid")
        if grid and (item.callspec.id not in grid.args if grid.args else function in seen):
            item.add_marker("full")
        seen.add(function)


def _by_turns(cases: list) -> list:
    """The first of a function's cases, those that `grid` names, and as few more as have every value of every
    parameter: each about as often as others, and beside ever another.
    """
    values = {case: [*enumerate(case.callspec._idlist)] for case in cases}
    grid = cases[0].get_closest_marker("grid")
    chosen = [case for case in cases if grid and case.callspec.id in grid.args] or cases[:1]
    used = Counter(value for case in chosen for value in values[case])
    pairs = {pair for case in chosen for pair in combinations(values[case], 2)}
    every = {value for of in values.values() for value in of}
    while len(used) < len(every):

        def worth(case) -> tuple[int, int, int]:
            new, beside = sum(not used[v] for v in values[case]), combinations(values[case], 2)
            return new, -sum(used[v] for v in values[case]), sum(pair not in pairs for pair in beside)

        chosen.append(max(cases, key=worth))
        used.update(values[chosen[-1]])
        pairs.update(combinations(values[chosen[-1]], 2))
    return chosen
