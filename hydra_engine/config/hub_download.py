"""Asks the Hugging Face Hub for the files of a repository and downloads them into the cache, by huggingface_hub, with
its bars on a terminal. Errors are one sentence each; a hub that does not answer costs seconds."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hydra_engine.config.hub_cache import hub_cache, repository_folder
from hydra_engine.core.units import size
from hydra_engine.errors import CheckpointError, HydraError, ResourceError

_TIMEOUT_S = 10.0  # until the hub answers
_MAKE_ROOM = "make room, or set HF_HOME to a folder of another disk"


class HubFile(NamedTuple):
    path: str
    num_bytes: int
    blob: str  # name of the file in the cache's blobs


def repository_files(name: str, revision: str | None) -> list[HubFile]:
    """Asks the hub for the files of a repository. Raises CheckpointError."""
    from huggingface_hub import HfApi

    with one_sentence(name, revision):
        siblings = (
            HfApi().model_info(name, revision=revision or "main", files_metadata=True, timeout=_TIMEOUT_S).siblings
        )
    return [
        HubFile(each.rfilename, each.size or 0, (each.lfs.sha256 if each.lfs else each.blob_id) or "")
        for each in siblings or ()
    ]


def download_files(name: str, revision: str | None, files: list[HubFile]) -> None:
    """Downloads files of a repository that the cache does not have. Raises ResourceError before it begins if the disk
    has too little room for them, and CheckpointError. After an interrupt the complete files stay."""
    from huggingface_hub import hf_hub_download

    check_room(name, files)
    with one_sentence(name, revision), _interruptible():
        for file in files:  # in this thread, which an interrupt ends; a large file arrives in parallel anyway
            hf_hub_download(name, file.path, revision=revision)


def num_missing_bytes(name: str, files: list[HubFile]) -> int:
    blobs = repository_folder(name) / "blobs"
    return sum(file.num_bytes for file in files if not (file.blob and (blobs / file.blob).exists()))


def check_room(name: str, files: list[HubFile]) -> None:
    """Raises ResourceError if the disk has too little room for the files that the cache does not have."""
    cache = hub_cache()
    there = next((folder for folder in (cache, *cache.parents) if folder.is_dir()), Path("/"))
    needed, free = num_missing_bytes(name, files), shutil.disk_usage(there).free
    if needed > free:
        raise ResourceError(
            f"{name!r} needs {size(needed)} more on the disk of {cache}, which has {size(free)} free; {_MAKE_ROOM}"
        )


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lets huggingface_hub remove the file that it is writing before SIGINT or SIGTERM does what it did before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def interrupt(number: int, _: object) -> None:
        arrived.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if arrived:
            signal.raise_signal(arrived[0])


@contextmanager
def one_sentence(name: str, revision: str | None) -> Iterator[None]:
    """Turns the errors of huggingface_hub into a HydraError."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # the version that huggingface_hub uses

    try:
        yield
    except GatedRepoError:
        why = f"accept its conditions at https://huggingface.co/{name}, then `hf auth login` or set HF_TOKEN"
    except RepositoryNotFoundError:
        why = "the Hugging Face Hub has no such model, or it is private: then `hf auth login` or set HF_TOKEN"
    except RevisionNotFoundError:
        why = f"it has no revision {revision!r}"
    except OfflineModeIsEnabled:
        why = "HF_HUB_OFFLINE forbids it; unset it, or copy the model's folder here and name that"
    except HfHubHTTPError as error:
        why = f"{_hub()} answers {error.response.status_code} {error.response.reason_phrase}; HF_ENDPOINT names the hub"
    except LocalEntryNotFoundError as error:  # hf_hub_download without an answer
        why = _unreachable(error.__cause__ or error)
    except (httpx.HTTPError, httpx.InvalidURL, ConnectionError) as error:
        why = _unreachable(error)
    except ValueError as error:  # an address of a proxy, or an answer that is no JSON
        why = _unreachable(error)
    except (OSError, RuntimeError) as error:  # RuntimeError: from hf_xet
        raise _failed(name, error) from None
    else:
        return
    raise CheckpointError(f"{name!r} cannot be downloaded: {why}")


def _failed(name: str, error: OSError | RuntimeError) -> HydraError:
    full = getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)
    if full:
        return ResourceError(f"{name!r} cannot be downloaded: the disk of {hub_cache()} is full; {_MAKE_ROOM}")
    return CheckpointError(f"{name!r} cannot be downloaded into {hub_cache()}: {_first_line(error)}")


def _unreachable(error: BaseException) -> str:
    return (
        f"no answer from {_hub()} ({_first_line(error)}); HF_ENDPOINT names another hub, HTTPS_PROXY a proxy, or copy "
        "the model's folder here and name that"
    )


def _hub() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)[:100]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().split("\n", 1)[0][:160].rstrip(" .")
    kind = type(error).__name__
    return f"{kind}: {text}" if text else kind
