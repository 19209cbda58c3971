"""The names of the queues (lanes): what each one transfers, for which GPU, over which link. No torch.

With one GPU `compute` is the calling thread with its CUDA stream. Several GPUs have lanes of their own, threads all:
`compute`, `compute1`, ... On the CPU they are pretended.
"""

from __future__ import annotations

# What a step waits for; optimizer records, which would hold it up in the same queue.
READS, WRITES = ("ssd_read", "state_read"), ("ssd_write", "state_write")
LANES = ("compute", "h2d", "d2h", *READS, *WRITES, "cpu", "update")  # update: optimizer on the GPU
HOPS = ("hop_in", "hop_out")  # activations between GPUs, which would wait behind weights
# Between hosts: shares and weights; sums from the host before, to the next. On the bus too a sum would hold others up.
NET, SUMS = ("net", "sum_in", "sum_out"), ("sum_up", "sum_down")
ON_GPU = ("compute", "h2d", "d2h", "update", *HOPS, *SUMS)
BUS = {"hop_in": "h2d", "hop_out": "d2h", "sum_up": "h2d", "sum_down": "d2h"}  # lane -> the way that it shares


def numbered(name: str, gpu: int) -> str:
    """A GPU's lane or tier."""
    return f"{name}{gpu}" if gpu else name


def kind_of(lane: str) -> str:
    """A lane's name without its GPU."""
    return lane.rstrip("0123456789")


def gpu_of(lane: str) -> int:
    return int(lane[len(kind_of(lane)) :] or 0)


def plain(lane: str) -> str:
    """A lane's kind; of hops and sums, the way on the bus that they take."""
    return BUS.get(kind_of(lane), kind_of(lane))


def lanes_of(gpus: int, hosts: int = 1) -> tuple[str, ...]:
    own = tuple(lane for lane in ON_GPU if (gpus > 1 or lane not in HOPS) and (hosts > 1 or lane not in SUMS))
    others = (numbered(lane, gpu) for gpu in range(1, gpus) for lane in own)
    return (*LANES, *(lane for lane in own if lane not in LANES), *(NET if hosts > 1 else ()), *others)
