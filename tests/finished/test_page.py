"""report.html: the energy of a run, and what a browser shows."""

import re

import pytest
from pages import check_page, in_browser
from runs import records

from trireme.engine.run.log import Log
from trireme.engine.run.page import PageFacts


@pytest.mark.parametrize(("joules", "shown"), [((3.6e6, 1.8e6), "1.5 kWh"), ((None, 1.8e6), ""), ((None, None), "")])
def test_energy_counts_on_after_a_stop_if_all_steps_have_it(tmp_path, joules, shown):
    since = 0
    for step, used in enumerate(joules, 1):
        log = Log(tmp_path, len(joules), 0, since, [])
        record = {"step": step, "loss": 1.0, "step_time_s": 1.0, "tokens": 4}
        log.add(record if used is None else record | {"gpu_joules": used})
        since = log.sync()
        log.draw(PageFacts("a run \udcff"))  # in the name of a file that is not UTF-8
        log.close()
    page = (tmp_path / "report.html").read_text()
    assert shown in page
    assert ("kWh" in page) == bool(shown)


@pytest.mark.full
@pytest.mark.parametrize("name", ["full", "lora", "dpo", "classify"])
def test_a_browser_shows_the_curve_and_the_tables(name, finished, tmp_path):
    out, _ = finished(name)
    dom, asked, console = in_browser(out / "report.html", tmp_path)
    assert (asked, console) == (set(), [])
    check_page(dom)
    lines = dict(re.findall(r'<polyline class="([\w-]*)" points="([^"]*)"', dom))
    counts = {name: len(points.split()) for name, points in lines.items()}
    steps, evals = len(records(out, "loss")), len(records(out, "eval_loss"))
    assert counts == {"raw": steps, "training": steps, "held-out": evals}
    assert dom.count("<tr>") == 1 + evals
    assert "<mark>" in dom
    assert "on held-out rows" in dom


@pytest.mark.full
def test_a_browser_notices_what_a_page_must_not_do(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<img src="http://127.0.0.1:9/a.png"><script>throw new Error("a fault")</script>')
    _, asked, console = in_browser(page, tmp_path)
    assert asked == {"http://127.0.0.1:9/a.png"}
    assert "a fault" in "".join(console)
