"""What every report.html has to be, without a browser and in one."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

VOID = {"meta"}
NARROW = 360  # pixels of a telephone's screen


class Structure(HTMLParser):
    """Asserts that tags are closed in order, that nothing is loaded or run, and that no width is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = list[str]()
        self.seen = set[str]()

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)
        names = dict(attrs)
        assert not names.keys() & {"src", "href", "xlink:href", "style", "onload"}, (tag, attrs)
        assert names.get("width", "%").endswith("%"), (tag, attrs)
        assert tag != "svg" or "viewbox" in names

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


def check_page(html: str) -> None:
    """Asserts that a page is whole, needs no network, fits a narrow screen and has both colour schemes."""
    structure = Structure()
    structure.feed(html)
    structure.close()
    assert not structure.stack
    assert {"svg", "title", "style"} <= structure.seen
    assert not structure.seen & {"script", "link", "img", "iframe", "object"}
    style = html[html.index("<style>") : html.index("</style>")]
    assert "prefers-color-scheme:dark" in style
    assert not re.search(r"url\(|@import|@font-face", style)
    assert all(int(px) <= NARROW for px in re.findall(r"(?<!max-)width:(\d+)px", style))
    assert 'name="viewport"' in html
    assert len(html.encode()) <= 200_000


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ITS_OWN = "not an origin"  # of what a browser asks for by itself; pages are of origin null, as files


def in_browser(page: Path, folder: Path) -> tuple[str, set[str], list[str]]:
    """What Chromium makes of a page: its elements as HTML, the addresses that it asks for, lines of the console. Skips
    the test where there is none. `folder`: for the profile and the log of the network, from which nothing leaves.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium here: apt install chromium")
    log = folder / "network.json"
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    words += ["--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", f"--log-net-log={log}"]
    words += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    asked = {event["url"] for event in events if "url" in event and event.get("initiator", ITS_OWN) != ITS_OWN}
    return done.stdout, asked, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
