"""The tables: the papers' arithmetic meets their figures, and the page says what the script computes."""

import pytest
from script_files import script


@pytest.fixture(scope="module")
def figures():
    return script("bench/paper_figures")


def test_published_figures_are_met_or_the_difference_is_named(figures):
    for p in figures.THROUGHPUT:
        cfg, tokens = figures.GPT[p.model], p.sequences * figures.SEQ
        pairs = figures.costs.attended_pairs([figures.SEQ] * p.sequences)
        seconds = figures.fuyou_seconds(cfg, p.sequences, p.gpu, p.drives)
        ratio = figures.costs.model_flops(cfg, tokens, pairs) / seconds / 1e12 / p.tflops
        assert (abs(ratio - 1) > 0.15) == bool(p.why), (p, ratio)
        assert p.why in ("", *figures.WHY)


def test_models_have_the_size_of_their_name(figures):
    for name, cfg in {**figures.GPT, **figures.NARROW, **figures.BUYERS}.items():
        assert figures.shapes.parameters(cfg) / 1e9 == pytest.approx(float(name[:-1]), rel=0.08), name


def test_more_drives_help_where_the_drive_binds(figures):
    cfg = figures.BUYERS["13B"]
    machines = [figures.machine(figures.GPUS["rtx4090"], 64 << 30, figures.DRIVE, n) for n in (1, 2, 4)]
    found = [figures.best(cfg, m, 16, "forward") for m in machines]
    seconds = [s for _, s in found]
    assert len({f.work.sequences for f, _ in found}) == 1
    assert seconds == sorted(seconds, reverse=True)


def test_a_wider_window_helps_until_it_does_not(figures):
    """STRONGHOLD, figure 9."""
    for row in figures.windows():
        assert row["share"][0] < 0.95
        assert row["share"] == pytest.approx(sorted(row["share"]), abs=0.01)
        assert min(row["share"][3:]) > 0.98


def test_the_page_shows_what_is_computed(figures):
    tables = script("bench/paper_tables")
    text = tables.PAGE.read_text()
    for p in figures.THROUGHPUT:
        assert f"| {p.system} | {p.model} |" in text
    made = {"throughput": [], "sizes": [], "windows": [], "buyers": [], "adapters": [], "mixtures": []}
    frame = [line for line in tables.page(made).splitlines() if line]
    assert all(line in text for line in frame), "renew it: python scripts/bench/paper_tables.py --write"
