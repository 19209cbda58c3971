"""python scripts/dev/reading_path.py CHECKPOINT --data FILE [...]: the files that a run's functions are in.

Runs the command with these arguments in this process. Counts, in engine/run, engine/data and engine/tuning, the files
whose functions are called, and the calls from one of these files to another. Child processes are not seen.
"""

import inspect
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "engine" / name for name in ("run", "data", "tuning")]


def main(words: list[str]) -> int:
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
    try:
        code = command()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    for name, count in calls.most_common():
        print(f"{count:8,} calls, {crossings[name]:6,} from another of these files  {name}", file=sys.stderr)
    print(f"{len(calls)} files, {sum(crossings.values()):,} changes of file", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
