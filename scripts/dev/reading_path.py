"""python scripts/dev/reading_path.py CHECKPOINT --data FILE [...]: the files that a run's functions are in.

Runs the command in this process, without tokens of former runs, and counts the files of engine/run, engine/data and
engine/tuning whose functions are called, and calls from one to another; not those of child processes.
"""

import inspect
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "engine" / name for name in ("run", "data", "tuning")]


def main(words: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    from trireme.__main__ import main as command

    calls, crossings, names = Counter[str](), Counter[str](), {}

    def place(frame: FrameType | None) -> str:
        """A file's path below the root, or "" for others."""
        if frame is None or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # the body of a module or class
            return ""
        if frame.f_code.co_name.startswith("<") and frame.f_code.co_name != "<lambda>" and not place(frame.f_back):
            return ""  # a comprehension of such a body
        path = frame.f_code.co_filename
        if path not in names:
            file = Path(path).resolve()
            names[path] = str(file.relative_to(ROOT)) if any(folder in file.parents for folder in FOLDERS) else ""
        return names[path]

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (here := place(frame)):
            calls[here] += 1
            crossings[here] += place(frame.f_back) not in ("", here)

    threading.setprofile(watch)
    sys.setprofile(watch)
    sys.argv[1:] = words
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        code = command()
    sys.setprofile(None)
    for name, count in calls.most_common():
        print(f"{count:8,} calls, {crossings[name]:6,} from another of these files  {name}", file=sys.stderr)
    print(f"{len(calls)} files, {sum(crossings.values()):,} changes of file", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
