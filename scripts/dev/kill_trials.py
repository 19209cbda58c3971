"""python scripts/dev/kill_trials.py [--count 500] [--hosts 40] [--flips 50]: kills runs at random times and flips bits.

Prints a table of the results. --first K --count 1 repeats trial K. Failures stay in --work.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--count", type=int, default=500, help="runs that are killed")
    parser.add_argument("--merges", type=int, default=50, help="merges that are killed")
    parser.add_argument("--hosts", type=int, default=40, help="runs of two hosts of which one is killed")
    parser.add_argument("--flips", type=int, default=50, help="flipped bits in each kind of file")
    parser.add_argument("--first", type=int, default=0, help="the first trial and flip")
    parser.add_argument("--work", help="a new folder, on the drive to be tried [a temporary one]")
    given = parser.parse_args()
    sys.path[:0] = [str(Path(__file__).parents[2] / "tests" / name) for name in ("helpers", "hosts")]
    import host_kills
    import torch
    from kills import KINDS, flip, make_bench, merge_trial, trial

    from trireme.engine.run import job

    job.shared_tokens = lambda: None  # tokens in each run's own folder, to be flipped
    torch.set_num_threads(1)  # a forked child has no others
    work = Path(given.work or tempfile.mkdtemp(prefix="trireme-kills-"))
    work.mkdir(parents=True, exist_ok=True)
    bench, wrong, begun = make_bench(work), 0, time.monotonic()
    seeds = lambda n: range(given.first, given.first + n)
    made = [trial(bench, seed) for seed in seeds(given.count)]
    made += [merge_trial(bench, seed) for seed in seeds(given.merges)]
    wholes = {kind: host_kills.whole(bench, kind) for kind in host_kills.KINDS if given.hosts}
    made += [host_kills.trial(bench, wholes, seed) for seed in seeds(given.hosts)]
    for place in dict.fromkeys(t.place for t in made):
        here = [t for t in made if t.place == place]
        kills, bad = Counter(name for t in here for name, _ in t.kills), [t for t in here if t.wrong]
        print(f"{place:13} {len(here):4} runs  {sum(kills.values()):4} kills  {len(bad):3} wrong   killed before "
              + ", ".join(f"{name} {n}" for name, n in kills.most_common()))  # fmt: skip
        for t in bad:
            print(f"         wrong: {t}")
        wrong += len(bad)
    for kind in KINDS if given.flips else ():
        found = [(*flip(bench, kind, seed), seed) for seed in seeds(given.flips)]
        count = Counter(outcome for outcome, _, _ in found)
        bad = [f for f in found if f[0] not in ("noticed", "harmless")]
        print(f"{kind:11} {len(found):4} flips  " + ", ".join(f"{n} {outcome}" for outcome, n in count.most_common()))
        for outcome, what, seed in bad:
            print(f"            {outcome}: flip {seed}, {what}")
        wrong += len(bad)
    print(f"{wrong} wrong in {time.monotonic() - begun:.0f} s; {work}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
