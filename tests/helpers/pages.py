"""What every report.html has to be, without a browser."""

import re
from html.parser import HTMLParser

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
