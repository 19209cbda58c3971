"""Asynchronous reads and writes of aligned buffers on O_DIRECT files."""


class StoreError(OSError):
    """A disk that fails, is full, or holds something else than it should: which file, where, what to do."""
