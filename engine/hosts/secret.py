"""The secret that the hosts of a run share: a file of the user, the same on each host.

It is not in a run's folder, which may be given to others, and need not be on a disk that all hosts can read.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

from trireme.models.config import InputError
from trireme.storage.untrusted import quoted, read_small

LEAST, MOST = 32, 4096  # bytes
PATIENCE = 20.0  # seconds for host 0 to make it, where hosts share the folder


def secret_path() -> Path:
    """$XDG_CONFIG_HOME/trireme/hosts.secret, or the same in ~/.config. Raises InputError without a home folder."""
    try:
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    except RuntimeError:
        raise InputError("several hosts need a secret in ~/.config/trireme, and there is no home. Set HOME.") from None
    return folder / "trireme" / "hosts.secret"


def shared_secret(host: int) -> bytes:
    """A key of 32 bytes, from the file's content. Host 0 makes the file if it is missing. Raises InputError."""
    path, end = secret_path(), time.monotonic() + PATIENCE
    while True:
        try:
            return _read(path)
        except FileNotFoundError:
            if host == 0:
                _make(path)
            elif time.monotonic() > end:
                raise InputError(f"the hosts' secret is not here. Copy host 0's {path} to the same path.") from None
            else:
                time.sleep(0.1)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}. It holds the hosts' secret.") from None


def _read(path: Path) -> bytes:
    """Raises InputError, OSError."""
    about = path.stat()
    if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
        word = quoted(path)
        raise InputError(f"{path} can be read or written by others. Make a new one: rm {word}, or chmod 600 {word}.")
    content = read_small(path, MOST, links=True).strip()
    if len(content) < LEAST:
        raise InputError(f"{path} has {len(content)} characters, expected {LEAST} or more. Remove it: host 0 makes it.")
    return hashlib.sha256(b"trireme hosts 1\n" + content).digest()


def _make(path: Path) -> None:
    """Writes the file at once, and never over another one. Raises InputError."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(f"{secrets.token_hex(32)}\n")
            with suppress(FileExistsError):
                os.link(part, path)
        finally:
            part.unlink()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}. The hosts' secret would be there.") from None
