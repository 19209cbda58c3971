"""What a step waits for its weights, and turns without priority."""

from collections import deque
from types import SimpleNamespace

from script_files import script

from trireme.engine.queues.trace import Span
from trireme.storage import aio

request_classes = script("dev/request_classes")


def span(queue, kind, of, start, end):
    return Span(queue, kind, of, start, end, 0, 0)


def test_a_wait_is_from_the_last_task_to_the_weights():
    """Not what comes after them, as inputs, and not before the first task."""
    spans = [
        span("h2d", "weights", "block000", 0, 2),
        span("compute", "forward", "block000", 3, 4),
        span("h2d", "weights", "block001 base", 2, 7),
        span("h2d", "weights", "block001", 7, 7.5),
        span("compute", "forward", "block001", 8, 9),
        span("h2d", "weights", "head", 5, 6),
        span("compute", "loss", "head", 9, 10),
        span("compute", "backward", "block001", 10, 11),
    ]
    assert request_classes.waited(spans) == 7.5 - 4


def test_turns_are_equal_and_pass_over_a_direction_that_is_full():
    waiting = {rank: deque([rank]) for rank in aio.CLASSES}
    io = SimpleNamespace(_waiting=waiting, _may_start=lambda rank: rank != aio.WRITE)
    following = request_classes.in_turn()
    assert [following(io) for _ in range(6)] == [1, 3, 0, 1, 3, 0]
    waiting[aio.READ].clear()
    assert [following(io) for _ in range(2)] == [1, 3]
    io._may_start = lambda _: False
    assert following(io) is None
