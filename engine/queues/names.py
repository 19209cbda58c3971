"""The names of the queues: what each one transfers, for which GPU, over which link. Imports no torch.

With one GPU, `compute` is the calling thread with its CUDA stream. With several, each GPU has queues of its own,
`compute`, `compute1`, ..., and all of them are threads; on a CPU the GPUs are emulated.
"""

from __future__ import annotations

from functools import cache

# What a step waits for; optimizer records, which would hold it up in the same queue.
READS, WRITES = ("ssd_read", "state_read"), ("ssd_write", "state_write")
LATER = ("state_read", "state_write")  # their requests let others go first
# Streamed updates: state to the GPU, the update, state back. Behind weights and activations they would wait for both.
STREAMED = ("update_in", "update", "update_out")
QUEUES = ("compute", "h2d", "d2h", *READS, *WRITES, "cpu", *STREAMED)
HOPS = ("hop_in", "hop_out")  # activations between GPUs through RAM, which would wait behind weights
PEERS = ("peer", "peer_out", "peer_in")  # by peer copies: to the next GPU; saved in the memory of another, and back
# Between hosts: shares and weights; sums from the host before, to the next. On the bus too a sum would hold others up.
NET, SUMS = ("net", "sum_in", "sum_out"), ("sum_up", "sum_down")
ON_GPU = ("compute", "h2d", "d2h", *STREAMED, *HOPS, *PEERS, *SUMS)
BUS = {  # queue -> the way that it shares
    "hop_in": "h2d", "hop_out": "d2h", "sum_up": "h2d", "sum_down": "d2h", "update_in": "h2d", "update_out": "d2h",
}  # fmt: skip

TITLES = {  # for people: in traces and pictures
    "compute": "GPU computes", "update": "GPU: AdamW", "cpu": "CPU: AdamW",
    "update_in": "state to GPU", "update_out": "state from GPU",
    "h2d": "RAM to GPU", "d2h": "GPU to RAM",
    "ssd_read": "SSD to RAM", "state_read": "state to RAM",
    "ssd_write": "RAM to SSD", "state_write": "state to SSD",
    "hop_in": "activations to GPU", "hop_out": "activations to RAM",
    "peer": "activations to another GPU", "peer_out": "saved in a peer", "peer_in": "saved from a peer",
    "net": "host to host", "sum_in": "sums from a host", "sum_out": "sums to a host",
    "sum_up": "sums to GPU", "sum_down": "sums to RAM",
}  # fmt: skip


def numbered(name: str, gpu: int) -> str:
    """The name of a GPU's queue or tier."""
    return f"{name}{gpu}" if gpu else name


@cache
def kind_of(queue: str) -> str:
    """A queue's name without the number of its GPU."""
    return queue.rstrip("0123456789")


@cache
def gpu_of(queue: str) -> int:
    """The GPU of a queue."""
    return int(queue[len(kind_of(queue)) :] or 0)


@cache
def plain(queue: str) -> str:
    """A queue's kind; of transfers between GPUs through RAM, and of sums, the direction on PCIe that they take."""
    return BUS.get(kind_of(queue), kind_of(queue))


def title(queue: str) -> str:
    """A queue for people, with its name in logs."""
    return f"{TITLES[kind_of(queue)]} ({queue})"


def queues_of(gpus: int, hosts: int = 1) -> tuple[str, ...]:
    """All queues of a machine with these GPUs, one of `hosts`."""
    unused = (*((*HOPS, *PEERS) if gpus == 1 else ()), *(SUMS if hosts == 1 else ()))
    kinds = tuple(queue for queue in ON_GPU if queue not in unused)
    numbered_names = (numbered(queue, gpu) for gpu in range(1, gpus) for queue in kinds)
    return (*QUEUES, *(queue for queue in kinds if queue not in QUEUES), *(NET if hosts > 1 else ()), *numbered_names)
