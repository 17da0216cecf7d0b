"""Recording loopback traffic for tests, with tcpdump or dumpcap, whichever may capture here."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.broker.kafka_broker import Unavailable, free_ports

_READY_S, _SETTLE_S = 15, 1.0
_FILE_HEADER_SIZE = 24


def _command(path: Path, ports: Sequence[int], program: str) -> list[str]:
    wanted = " or ".join(f"tcp port {port}" for port in ports)
    if program == "tcpdump":
        # the user stays who it is, so that the file may be written
        return ["tcpdump", "-i", "lo", "-s", "0", "-U", "--immediate-mode", "-B", "65536",
                "-Z", "root", "-w", str(path), wanted]  # fmt: skip
    return ["dumpcap", "-q", "-i", "lo", "-s", "0", "-B", "64", "-P", "-w", str(path), "-f", wanted]


def _start(path: Path, ports: Sequence[int], program: str) -> subprocess.Popen[bytes]:
    """Started, and seen to capture: packets to a port of our own have arrived in the file."""
    path.unlink(missing_ok=True)
    probe = free_ports(1)[0]
    process = subprocess.Popen(
        _command(path, [*ports, probe], program), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    end = time.monotonic() + _READY_S
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", probe), 0.1).close()
        if path.exists() and path.stat().st_size > _FILE_HEADER_SIZE:
            return process
        time.sleep(0.02)
    if process.poll() is None:
        process.kill()
    _, errors = process.communicate()
    raise Unavailable(f"{program} cannot capture: {errors.decode(errors='replace').strip()[:200]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


@cache
def capturer() -> str:
    """The program that may capture loopback traffic here; else Unavailable has the reason."""
    reasons = []
    for program in ("tcpdump", "dumpcap"):
        if shutil.which(program) is None:
            reasons.append(f"{program} is not installed")
            continue
        folder = Path(tempfile.mkdtemp())
        try:
            _stop(_start(folder / "probe.pcap", [9], program))
            return program
        except Unavailable as error:
            reasons.append(str(error))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    raise Unavailable("; ".join(reasons))


@contextmanager
def recording(path: Path, ports: Sequence[int]) -> Iterator[Path]:
    """Record the packets of some loopback ports into a pcap file, while the block runs."""
    process = _start(path, ports, capturer())
    try:
        yield path
        time.sleep(_SETTLE_S)  # the kernel hands over its last block
    finally:
        _stop(process)
        if os.path.exists(path):
            os.chmod(path, 0o644)
