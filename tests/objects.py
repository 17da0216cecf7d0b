"""An S3 server on loopback for tests, which logs its requests."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

from kdissect.capture.object_store import _s3

SECRETS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
_ERRORS = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}


def _error(status: int) -> bytes:
    """The body of a refusal, as Amazon's S3 has it."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{_ERRORS[status]}</Code><Message>Refused by the test.</Message>"
        "<RequestId>K2H6N7ZGQT6WHCEG</RequestId><HostId>WWoZlnK4pTjKCYn6eNV7GgOurabfqLkjbSyqTvDMGBaI"
        "9uwzyNhSaDhOCPs8paFGye7S6b/AB3A=</HostId></Error>"
    ).encode()


Fault = Callable[[str, str, tuple[int, int] | None], int]


@dataclass(slots=True)
class Store:
    """A server with one bucket. `requests`: method, path, and range or None of each request.

    `failing` sets what the status of a request must be, by these three; 0 for what the server says.
    """

    host: str
    port: int
    bucket: str
    requests: list[tuple[str, str, tuple[int, int] | None]] = field(default_factory=list)
    fault: Fault | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ENDPOINT_URL": f"http://{self.host}:{self.port}", **SECRETS}

    @property
    def filesystem(self) -> Any:
        return pafs.S3FileSystem(
            endpoint_override=f"{self.host}:{self.port}", scheme="http", allow_bucket_creation=True
        )

    def url(self, name: str) -> str:
        return f"s3://{self.bucket}/{name}"

    def put(self, name: str, data: bytes | Path) -> str:
        """Store an object; its URL."""
        content = data if isinstance(data, bytes) else data.read_bytes()
        with self.filesystem.open_output_stream(f"{self.bucket}/{name}", compression=None) as out:
            out.write(content)
        return self.url(name)

    def names(self, under: str) -> list[str]:
        """Objects below a prefix, without it, as `files_in` has those of a folder."""
        base = f"{self.bucket}/{under}"
        selector = pafs.FileSelector(base, recursive=True, allow_not_found=True)
        infos = self.filesystem.get_file_info(selector)
        return sorted(info.path[len(base) + 1 :] for info in infos if info.is_file)

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        """Meanwhile the store answers with the statuses that `fault` says."""
        self.fault = fault
        try:
            yield
        finally:
            self.fault = None

    def get_bytes(self, name: str) -> int:
        """The bytes of ranged reads of an object since `requests` was cleared."""
        asked = [
            span
            for method, path, span in self.requests
            if method == "GET" and path == f"/{self.bucket}/{name}"
        ]
        assert None not in asked, "an object was read as a whole"
        return sum(last + 1 - first for first, last in asked)  # type: ignore[misc]


@contextmanager
def refusing_each_once(
    store: Store, applies: Callable[[str, str, tuple[int, int] | None], bool] = lambda *_: True
) -> Iterator[list[tuple[str, str, tuple[int, int] | None]]]:
    """Let the store refuse each request that `applies` the first time; the list of the refused."""
    refused: list[tuple[str, str, tuple[int, int] | None]] = []
    lock = threading.Lock()

    def fault(*request: Any) -> int:
        with lock:
            if request in refused or not applies(*request):
                return 0
            refused.append(request)
            return 503

    with store.failing(fault):
        yield refused


class _Counting:
    """A WSGI application that logs each request before it responds."""

    def __init__(self, inner: Any, store: Store) -> None:
        self.inner = inner
        self.store = store

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", environ.get("HTTP_RANGE", ""))
        span = (int(found[1]), int(found[2])) if found else None
        request = (environ["REQUEST_METHOD"], environ["PATH_INFO"], span)
        self.store.requests.append(request)
        status = self.store.fault(*request) if self.store.fault is not None else 0
        if status:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = _error(status)
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
            start_response(f"{status} Refused", headers)
            return [b"" if request[0] == "HEAD" else body]
        return self.inner(environ, start_response)


def files_in(folder: Path) -> list[str]:
    """The files of a folder by name."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in paths)


@contextmanager
def object_store(bucket: str = "captures") -> Iterator[Store]:
    """A server with an empty bucket; the environment says where it is meanwhile."""
    pytest.importorskip("moto", reason="moto is not installed")
    from moto.moto_server.werkzeug_app import create_backend_app
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    store = Store(host, port, bucket)
    # moto's own application looks for the service of each request, which takes a third of its time
    server._server.app = _Counting(create_backend_app("s3"), store)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        _s3.cache_clear()
        try:
            store.filesystem.create_dir(bucket)
            yield store
        finally:
            _s3.cache_clear()
            server.stop()
