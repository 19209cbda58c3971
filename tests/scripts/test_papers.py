"""The tables: the papers' arithmetic meets their figures, and the page says what the script computes."""

import pytest
from script_files import ROOT, script

SIMULATED = "linear", "tensors"


@pytest.fixture(scope="module")
def figures():
    return script("papers/figures")


def test_published_figures_are_met_or_the_difference_is_named(figures):
    for p in figures.THROUGHPUT:
        cfg, tokens = figures.GPT[p.model], p.sequences * figures.SEQ
        pairs = figures.costs.attended_pairs([figures.SEQ] * p.sequences)
        seconds = figures.fuyou_seconds(cfg, p.sequences, p.gpu, p.drives)
        ratio = figures.costs.model_flops(cfg, tokens, pairs) / seconds / 1e12 / p.tflops
        assert (abs(ratio - 1) > 0.15) == bool(p.why), (p, ratio)
        assert p.why in ("", *figures.WHY)


def test_the_page_shows_what_is_computed(figures):
    tables = script("papers/tables")
    text = tables.PAGE.read_text()
    for p in figures.THROUGHPUT:
        assert f"| {p.system} | {p.model} |" in text
    made = {"throughput": [], "sizes": [], "windows": [], "buyers": [], "adapters": [], "mixtures": []}
    frame = [line for line in tables.page(made).splitlines() if line]
    assert all(line in text for line in frame), "renew it: python scripts/papers/tables.py --write"


@pytest.mark.parametrize("name", ["pipelined", *(pytest.param(name, marks=pytest.mark.full) for name in SIMULATED)])
def test_the_page_of_the_papers_shows_what_is_computed(name):
    """The rows that take no search for a plan."""
    page, experiments = (ROOT / "docs" / "papers.md").read_text(), script("papers/experiments")
    make, heads = experiments.TABLES[name]
    assert "\n".join(experiments.table(heads, make())) in page, f"renew it: papers/experiments.py {name}"
    assert all(f"| {heads} |" in page for _, heads in experiments.TABLES.values())
