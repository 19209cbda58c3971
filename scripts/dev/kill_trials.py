"""python scripts/dev/kill_trials.py [--count 60] [--merges 8] [--hosts 0]: kills runs at random times, one at a time.

Prints each trial as it ends, then a table. --first K --count 1 repeats trial K. Failures stay in --work.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--count", type=int, default=60, help="runs that are killed")
    parser.add_argument("--merges", type=int, default=8, help="merges that are killed")
    parser.add_argument("--hosts", type=int, default=0, help="runs of two hosts of which one is killed")
    parser.add_argument("--first", type=int, default=0, help="the first trial")
    parser.add_argument("--work", help="a new folder, on the drive to be tried [a temporary one]")
    given = parser.parse_args()
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root), *(str(root / "tests" / name) for name in ("helpers", "hosts"))]
    import host_kills
    import torch
    from kills import make_bench, merge_trial, trial

    torch.set_num_threads(1)  # a forked child has no others
    work = Path(given.work or tempfile.mkdtemp(prefix="trireme-kills-"))
    work.mkdir(parents=True, exist_ok=True)
    bench, begun, made = make_bench(work), time.monotonic(), []
    wholes = {kind: host_kills.whole(bench, kind) for kind in host_kills.KINDS if given.hosts}
    of_hosts = lambda bench, seed: host_kills.trial(bench, wholes, seed)
    for of_seed, count in ((trial, given.count), (merge_trial, given.merges), (of_hosts, given.hosts)):
        for seed in range(given.first, given.first + count):
            made.append(of_seed(bench, seed))
            print(made[-1], flush=True)
    for place in dict.fromkeys(t.place for t in made):
        here = [t for t in made if t.place == place]
        kills, wrong = Counter(name for t in here for name, _ in t.kills), sum(bool(t.wrong) for t in here)
        print(f"{place:13} {len(here):4} runs  {sum(kills.values()):4} kills  {wrong:3} wrong   killed before "
              + ", ".join(f"{name} {n}" for name, n in kills.most_common()))  # fmt: skip
    wrong = sum(bool(t.wrong) for t in made)
    print(f"{wrong} wrong in {time.monotonic() - begun:.0f} s; {work}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
