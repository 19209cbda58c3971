"""The tables: the papers' arithmetic meets their figures, and the page says what the script computes."""

import pytest
from script_files import script


@pytest.fixture(scope="module")
def tables():
    return script("bench/paper_tables")


def test_published_figures_are_met_or_the_difference_is_named(tables):
    for p in tables.THROUGHPUT:
        cfg, tokens = tables.GPT[p.model], p.sequences * tables.SEQ
        pairs = tables.costs.attended_pairs([tables.SEQ] * p.sequences)
        seconds = tables.fuyou_seconds(cfg, p.sequences, p.gpu, p.drives)
        ratio = tables.costs.model_flops(cfg, tokens, pairs) / seconds / 1e12 / p.tflops
        assert (abs(ratio - 1) > 0.15) == bool(p.why), (p, ratio)
        assert p.why in ("", *tables.WHY)


def test_models_have_the_size_of_their_name(tables):
    for name, cfg in {**tables.GPT, **tables.NARROW, **tables.BUYERS}.items():
        assert tables.shapes.parameters(cfg) / 1e9 == pytest.approx(float(name[:-1]), rel=0.08), name


def test_more_drives_help_where_the_drive_binds(tables):
    cfg = tables.BUYERS["13B"]
    machines = [tables.machine(tables.GPUS["rtx4090"], 64 << 30, tables.DRIVE, n) for n in (1, 2, 4)]
    found = [tables.best(cfg, m, 16, "forward") for m in machines]
    seconds = [s for _, s in found]
    assert len({f.work.sequences for f, _ in found}) == 1
    assert seconds == sorted(seconds, reverse=True)


def test_a_wider_window_helps_until_it_does_not(tables):
    """STRONGHOLD, figure 9."""
    for row in tables.windows():
        assert row["share"][0] < 0.95
        assert row["share"] == pytest.approx(sorted(row["share"]), abs=0.01)
        assert min(row["share"][3:]) > 0.98


def test_the_page_shows_what_is_computed(tables):
    text = tables.PAGE.read_text()
    for p in tables.THROUGHPUT:
        assert f"| {p.system} | {p.model} |" in text
    made = {"throughput": [], "sizes": [], "windows": [], "buyers": [], "adapters": [], "mixtures": []}
    frame = [line for line in tables.page(made).splitlines() if line]
    assert all(line in text for line in frame), "renew it: python scripts/bench/paper_tables.py --write"
