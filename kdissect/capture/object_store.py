"""Object stores: what a URL stands for, captures listed and opened there.

Through `pyarrow.fs`: ``s3://`` (``s3a://`` and ``s3n://`` are the same), ``gs://``, ``abfs://``, ``hdfs://``.
Credentials and endpoints are those of the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL ...).
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

import pyarrow as pa

from kdissect.errors import CaptureError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_S3 = ("s3", "s3a", "s3n")
_MAGIC = re.compile(r"[*?\[]")
MAX_ATTEMPTS = 4  # of a request, where AWS_MAX_ATTEMPTS does not say


# What a driver tells its workers, as Spark does of the same variables: access, and where to.
_SETTINGS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION",
    "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_MAX_ATTEMPTS",
)  # fmt: skip


def _pafs() -> Any:
    """Loaded where it is needed: it brings the stores' libraries along."""
    import pyarrow.fs

    return pyarrow.fs


def is_remote(path: str) -> bool:
    """True for a URL; what has a scheme is not a file of this machine."""
    return _URL.match(path) is not None


def settings() -> dict[str, str]:
    """This process's way to S3, as far as variables of the environment tell it."""
    return {name: os.environ[name] for name in _SETTINGS if name in os.environ}


def use(told: dict[str, str]) -> None:
    """Go to S3 by the settings of another process; where it has none, by our own."""
    if any(os.environ.get(name) != value for name, value in told.items()):
        os.environ.update(told)
        _s3.cache_clear()


@cache
def _s3() -> Any:
    """S3 by the environment; pyarrow would look a bucket's region up, which needs Amazon's own."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    scheme, _, host = (endpoint or "").rpartition("://")
    tries = os.environ.get("AWS_MAX_ATTEMPTS", "")
    return _pafs().S3FileSystem(
        endpoint_override=host or None,
        scheme=scheme or "https",
        region=region or None,
        retry_strategy=_pafs().AwsStandardS3RetryStrategy(
            max_attempts=int(tries) if tries.isdecimal() else MAX_ATTEMPTS
        ),
    )


def place(url: str) -> tuple[Any, str, str]:
    """(file system, path there, what to put before a path to have its URL again).

    Raises CaptureError for a URL that names no store.
    """
    match = _URL.match(url)
    assert match is not None, url
    scheme, rest = match[1].lower(), match[2]
    try:
        if scheme in _S3:
            return _s3(), rest.rstrip("/"), f"{match[1]}://"
        found, path = _pafs().FileSystem.from_uri(url)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CaptureError(f"{url}: {clause(error)}") from None
    return found, path, url[: len(url) - len(path)] if url.endswith(path) else f"{match[1]}://"


def matching(url: str) -> list[tuple[str, int]] | None:
    """(url, size) of the files that a URL stands for: one, those under a prefix, or of a glob.

    None where nothing is there. Raises CaptureError where the store cannot be asked.
    """
    store, path, before = place(url)
    magic = _MAGIC.search(path)
    base = path[: path.rfind("/", 0, magic.start()) + 1].rstrip("/") if magic else path
    try:
        if magic is None:
            info = store.get_file_info(path)
            if info.type == _pafs().FileType.File:
                return [(url, int(info.size))]
            if info.type == _pafs().FileType.NotFound:
                return None
        selector = _pafs().FileSelector(base, allow_not_found=True, recursive=True)
        infos = [info for info in store.get_file_info(selector) if info.is_file]
    except (pa.ArrowException, OSError) as error:
        raise CaptureError(f"{url}: {clause(error)}") from None
    if magic is not None:
        pattern = re.compile(_translated(path), re.DOTALL)
        infos = [info for info in infos if pattern.fullmatch(info.path)]
    found = [(before + info.path, int(info.size)) for info in infos]
    return sorted(found) or None


def opened(url: str) -> Any:
    """A pyarrow NativeFile. Raises CaptureError where it cannot be read."""
    store, path, _ = place(url)
    try:
        return store.open_input_file(path)
    except (pa.ArrowException, OSError) as error:
        raise CaptureError(f"{url}: {clause(error)}") from None


def _translated(pattern: str) -> str:
    """A glob as a regular expression; only ``**`` crosses folders."""
    out = ""
    pos = 0
    while pos < len(pattern):
        if pattern.startswith("**/", pos):
            out, pos = out + "(?:.*/)?", pos + 3
            continue
        if pattern.startswith("**", pos):
            out, pos = out + ".*", pos + 2
            continue
        char = pattern[pos]
        end = pattern.find("]", pos + 2) if char == "[" else -1
        if end > 0:
            inside = pattern[pos + 1 : end].replace("\\", "\\\\")
            out += f"[{'^' + inside[1:] if inside.startswith('!') else inside}]"
            pos = end + 1
            continue
        out += {"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char))
        pos += 1
    return out


def clause(error: Exception) -> str:
    """What a store's library says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
