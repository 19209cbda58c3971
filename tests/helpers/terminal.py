"""A terminal for the tests of what is printed."""

import re


def on_screen(output: str) -> list[str]:
    """The lines that a terminal shows in the end."""
    lines = [""]
    for part in re.split(r"(\r\x1b\[K|\r?\n)", output):
        if part == "\r\x1b[K":
            lines[-1] = ""
        elif part.endswith("\n"):
            lines.append("")
        else:
            lines[-1] += part
    return lines
