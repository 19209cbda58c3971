"""The hub's own client, the optional package huggingface_hub; its failures become one line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trireme.engine.run.hub.names import Named
from trireme.models.config import InputError
from trireme.storage.untrusted import shown

LOGIN = "log in (hf auth login), or set HF_TOKEN"
OURS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO)  # of this machine's drives


def client() -> Any:
    """The package, or None if it is not installed."""
    try:
        import huggingface_hub.errors  # late: optional, and slow
        import huggingface_hub.utils
    except ImportError:
        return None
    return huggingface_hub


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def reached(error: BaseException) -> bool:
    """Whether a server has answered."""
    return getattr(error, "response", None) is not None


@contextmanager
def asking(hub: Any, name: Named, what: str) -> Iterator[None]:
    """A context in which the client's failures become InputErrors; failures of this machine's drives stay. `what`: was
    not done.
    """
    errors = hub.errors
    page = f"{endpoint()}/{'datasets/' * (name.kind == 'dataset')}{name.repo}"
    try:
        yield
    except errors.GatedRepoError:
        raise InputError(f"{name}: access is restricted. Accept the terms at {page}, then {LOGIN}.") from None
    except errors.LocalTokenNotFoundError:
        raise InputError(f"{name}: not {what}: no token was found: {LOGIN}.") from None
    except errors.RepositoryNotFoundError:
        kind = "folder" if name.kind == "model" else "file"
        raise InputError(
            f"{name} is not a {kind} here, and no {_word(name)} {name.repo} was found on the hub. Correct the name; if "
            f"it is private, {LOGIN}."
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{name}: {name.repo} has no revision {name.revision!r}. See {page}/commits.") from None
    except Exception as error:  # of its transport, another package in each version
        if isinstance(error, OSError) and error.errno in OURS:
            raise
        if reached(error):
            code = getattr(error.response, "status_code", "?")  # type: ignore[attr-defined]
            way = f". If it is the token: {LOGIN}" if code in (401, 403) else ". Try again later"
            said = shown(str(getattr(error, "server_message", None) or "no reason given"), 200)
            raise InputError(f"{name}: not {what}: the hub answered {code}, {said}{way}.") from None
        if isinstance(error, errors.OfflineModeIsEnabled):
            raise InputError(f"{name}: not {what}: HF_HUB_OFFLINE is set. Unset it, or name a folder.") from None
        said = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{name}: not {what}: {endpoint()} cannot be reached or broke off ({shown(said, 200)}). Try again: "
            "files that are complete are kept."
        ) from None


def _word(name: Named) -> str:
    return "data set" if name.kind == "dataset" else "model"
