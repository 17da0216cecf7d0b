"""Object stores: resolves URLs, lists and opens objects.

Through `pyarrow.fs`: ``s3://`` (``s3a://`` and ``s3n://`` are the same), ``gs://``, ``abfs://``,
``hdfs://``. Credentials and endpoints come from the environment (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL ...).

Retries: a request that fails temporarily (HTTP 429 and 5xx, a broken connection) is made up to
AWS_MAX_ATTEMPTS times. The pause after attempt n is random, up to 2**(n - 1) seconds and at most
PAUSE_MAX_S. The S3 library does this itself, except for short reads (`repeated`).
"""

from __future__ import annotations

import io
import os
import random
import re
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeVar

import pyarrow as pa

from kdissect.errors import CaptureError, EnvironmentFailed

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_S3 = ("s3", "s3a", "s3n")
_MAGIC = re.compile(r"[*?\[]")
MAX_ATTEMPTS = 6  # per request, if AWS_MAX_ATTEMPTS is not set
PAUSE_MAX_S = 20.0  # as in the S3 library
_HIDDEN_ERROR = "Failed to flush response stream"
Value = TypeVar("Value")

# Variables that a driver passes to its workers, as Spark does: credentials and endpoints.
_SETTINGS = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"),
    *("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_MAX_ATTEMPTS"),
)


def _pafs() -> Any:
    """pyarrow.fs, imported on first use, because it loads the stores' libraries."""
    import pyarrow.fs

    return pyarrow.fs


def is_remote(path: str) -> bool:
    """Return whether a path is a URL; a path with a scheme is no local file."""
    return _URL.match(path) is not None


def settings() -> dict[str, str]:
    """This process's S3 settings from the environment."""
    return {name: os.environ[name] for name in _SETTINGS if name in os.environ}


def use(settings: dict[str, str]) -> None:
    """Use another process's S3 settings; settings that it lacks stay as they are here."""
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.environ.update(settings)
        _s3.cache_clear()


@cache
def _s3() -> Any:
    """S3 as the environment configures it. pyarrow would ask Amazon for a bucket's region."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    scheme, _, host = (endpoint or "").rpartition("://")
    return _pafs().S3FileSystem(
        endpoint_override=host or None,
        scheme=scheme or "https",
        region=region or None,
        retry_strategy=_pafs().AwsStandardS3RetryStrategy(max_attempts=_max_attempts()),
        # a small file takes one request, not the three of a multipart upload
        allow_delayed_open=True,
    )


def _max_attempts() -> int:
    setting = os.environ.get("AWS_MAX_ATTEMPTS", "")
    return int(setting) if setting.isdecimal() else MAX_ATTEMPTS


def place(url: str) -> tuple[Any, str, str]:
    """(file system, path in it, prefix that turns such a path into a URL again).

    Raises CaptureError if the URL names no store.
    """
    match = _URL.match(url)
    assert match is not None, url
    scheme, rest = match[1].lower(), match[2]
    try:
        if scheme in _S3:
            return _s3(), rest.rstrip("/"), f"{match[1]}://"
        file_system, path = _pafs().FileSystem.from_uri(url)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CaptureError(f"{url}: {clause(error)}") from None
    return (
        file_system,
        path,
        url[: len(url) - len(path)] if url.endswith(path) else f"{match[1]}://",
    )


def matching(url: str) -> list[tuple[str, int, str]] | None:
    """(url, size, time of change) of the objects that a URL stands for: one, those under a prefix,
    or of a glob.

    None if there are none. Raises CaptureError if the store cannot be listed.
    """
    store, path, before = place(url)
    magic = _MAGIC.search(path)
    base = path[: path.rfind("/", 0, magic.start()) + 1].rstrip("/") if magic else path
    try:
        if magic is None:
            info = store.get_file_info(path)
            if info.type == _pafs().FileType.File:
                return [(url, int(info.size), str(info.mtime_ns))]
            if info.type == _pafs().FileType.NotFound:
                return None
        selector = _pafs().FileSelector(base, allow_not_found=True, recursive=True)
        infos = [info for info in store.get_file_info(selector) if info.is_file]
    except (pa.ArrowException, OSError) as error:
        raise CaptureError(f"{url}: {clause(error)}") from None
    if magic is not None:
        infos = [info for info in infos if _matches(info.path.split("/"), path.split("/"))]
    files = [(before + info.path, int(info.size), str(info.mtime_ns)) for info in infos]
    return sorted(files) or None


def repeated(read: Callable[[], Value]) -> Value:
    """The value of `read`; calls it again if the S3 library gave up too early.

    The library reads the response to a range into a buffer of the range's length. An error whose
    body is longer, such as the XML of a 503, hides its status, and the library raises at once.
    """
    attempt = 1
    while True:
        try:
            return read()
        except Exception as error:
            if _HIDDEN_ERROR not in str(error) or attempt >= _max_attempts():
                raise
        time.sleep(random.uniform(0, min(2.0 ** (attempt - 1), PAUSE_MAX_S)))
        attempt += 1


class ObjectFile(io.RawIOBase):
    """An object that is open for reading. Reads raise EnvironmentFailed if the store fails."""

    def __init__(self, url: str, file: Any) -> None:
        """file: a pyarrow NativeFile at the start of the object."""
        super().__init__()
        self.url = url
        self._file = file
        self._pos = 0

    def size(self) -> int:
        return int(self._file.size())

    def version(self) -> tuple[int, str]:
        """(size in bytes, the store's tag of the content)."""
        facts = self._file.metadata() or {}
        tag = facts.get("ETag") or facts.get("Last-Modified") or b""
        return int(self._file.size()), (tag if isinstance(tag, str) else tag.decode()).strip('"')

    def read_at(self, count: int, pos: int) -> bytes:
        """Bytes pos to pos + count; fewer at the object's end."""
        try:
            data: bytes = repeated(lambda: self._file.read_at(count, pos))
            return data
        except (pa.ArrowException, OSError) as error:
            place = f"bytes {pos} to {pos + count}"
            raise EnvironmentFailed(
                f"{self.url}: {place} cannot be read: {clause(error)}"
            ) from None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.read_at(len(buffer), self._pos)
        buffer[: len(data)] = data
        self._pos += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def opened(url: str) -> ObjectFile:
    """Open an object. Raises CaptureError if it does not exist or may not be read."""
    store, path, _ = place(url)
    try:
        return ObjectFile(url, store.open_input_file(path))
    except (pa.ArrowException, OSError) as error:
        raise CaptureError(f"{url}: {clause(error)}") from None


def _matches(names: list[str], patterns: list[str]) -> bool:
    """Return whether the folders and the name of a path match those of a glob."""
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_matches(names[some:], patterns[1:]) for some in range(len(names) + 1))
    is_first = bool(names) and fnmatchcase(names[0], patterns[0])
    return is_first and _matches(names[1:], patterns[1:])


def clause(error: Exception) -> str:
    """The first line of a store library's error, at most 300 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
