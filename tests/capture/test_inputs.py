"""What a user can name, how it is recognised, and how it is unpacked."""

import errno
import gzip
import io
import os
import random
import shutil
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from kdissect.capture.copies import local_path, spooled
from kdissect.capture.inputs import InputFile, find_captures
from kdissect.errors import CaptureError
from tests.builders.captures import Blocks, pcap
from tests.builders.packets import ethernet, ipv4, tcp
from tests.capture.scanned import planned

CAPTURE = pcap([ethernet(ipv4(tcp(bytes([n]) * n))) for n in range(200)])
NOISE = random.Random(1).randbytes(300_000)


@pytest.fixture(params=["gzip", "zstd", "lz4"])
def compression(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def unpacked(file: InputFile, folder: Path) -> bytes:
    return Path(local_path(file, str(folder))).read_bytes()


def compress(data: bytes, compression: str, path: Path) -> bytes:
    with pa.OSFile(str(path), "wb") as raw, pa.CompressedOutputStream(raw, compression) as out:
        out.write(data)
    return path.read_bytes()


def test_format_is_known_by_content_not_by_name(tmp_path: Path) -> None:
    """A pcapng named .pcap is a pcapng."""
    (tmp_path / "a.txt").write_bytes(CAPTURE)
    (tmp_path / "b.pcap").write_bytes(Blocks(False).section())
    found = {Path(file.path).name: file.format for file in find_captures([tmp_path])}
    assert found == {"a.txt": "pcap", "b.pcap": "pcapng"}


def test_compressed_files_unpack_to_the_same_bytes(tmp_path: Path, compression: str) -> None:
    """Files with several compressed members unpack wholly, too."""
    whole = compress(CAPTURE + NOISE, compression, tmp_path / "whole")
    first = compress(CAPTURE[:1000], compression, tmp_path / "first")
    rest = compress(CAPTURE[1000:] + NOISE, compression, tmp_path / "rest")
    for data in (whole, first + rest):
        path = tmp_path / "made"
        path.write_bytes(data)
        (file,) = find_captures([path])
        assert (file.format, file.compression, file.size) == ("pcap", compression, len(data))
        plain = spooled(file, str(tmp_path))
        assert plain.error is None
        assert unpacked(plain, tmp_path) == CAPTURE + NOISE


def test_a_damaged_compressed_file_gives_its_whole_part(tmp_path: Path, compression: str) -> None:
    """The bytes before the damage are unpacked, and the error counts them."""
    content = CAPTURE + NOISE
    whole = compress(content, compression, tmp_path / "whole")
    path = tmp_path / "made"
    path.write_bytes(whole[: len(whole) // 2])
    plain = spooled(find_captures([path])[0], str(tmp_path))
    got = unpacked(plain, tmp_path)
    assert content.startswith(got)
    assert plain.error is not None
    assert f"damaged after {len(got)} plain bytes" in plain.error
    if compression == "gzip":
        assert len(got) > len(content) // 3
    flipped = bytearray(whole)
    for pos in range(len(whole) // 2, len(whole) // 2 + 64):
        flipped[pos] ^= 0xFF
    path.write_bytes(flipped)
    os.utime(path, (1, 1))
    shutil.rmtree(tmp_path / "again", ignore_errors=True)
    (tmp_path / "again").mkdir()
    plain = spooled(find_captures([path])[0], str(tmp_path / "again"))
    assert len(unpacked(plain, tmp_path / "again")) <= len(content) + 2**22


def test_a_wrong_checksum_loses_no_byte(tmp_path: Path) -> None:
    """What comes before the damage is there, also if all of it is read at once."""
    for content in (CAPTURE, CAPTURE + NOISE):
        data = bytearray(gzip.compress(content))
        data[-8] ^= 1  # RFC 1952, 2.3.1: the CRC is at the end, before the size
        path = tmp_path / f"{len(content)}.gz"
        path.write_bytes(data)
        plain = spooled(find_captures([path])[0], str(tmp_path))
        assert unpacked(plain, tmp_path) == content
        assert plain.error is not None
        assert f"gzip data is damaged after {len(content)} plain bytes" in plain.error


def test_gzip_with_garbage_after_it(tmp_path: Path) -> None:
    """The capture is whole; the error names the other bytes."""
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(CAPTURE) + b"garbage")
    plain = spooled(find_captures([path])[0], str(tmp_path))
    assert unpacked(plain, tmp_path) == CAPTURE
    assert plain.error is not None


def test_a_folder_lists_other_files(tmp_path: Path) -> None:
    """Each other file of a folder is listed with the reason."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "x.pcap").write_bytes(CAPTURE)
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "log.gz").write_bytes(gzip.compress(b"text, and more of it"))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(CAPTURE)[:10])
    (tmp_path / "none.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "empty.pcap").touch()
    os.mkfifo(tmp_path / "pipe")
    found = {Path(file.path).name: file.error for file in find_captures([tmp_path])}
    assert found == {
        "x.pcap": None,
        "notes.json": "not a pcap or pcapng file",
        "log.gz": "gzip of something that is no capture",
        "none.gz": "gzip of something that is no capture",
        "cut.gz": "gzip data is damaged before its first bytes: Truncated compressed stream",
        "empty.pcap": "the file is empty",
        "pipe": "not a regular file",
    }


def test_a_folder_that_cannot_be_read_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its captures are missing, so it stands for them; named itself, it is an error."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (tmp_path / "x.pcap").write_bytes(CAPTURE)
    scandir = os.scandir

    def refuse(path: str | Path) -> object:
        if str(path) == str(secret):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = {Path(file.path).name: file.error for file in find_captures([tmp_path])}
    assert found == {"x.pcap": None, "secret": "Permission denied"}
    with pytest.raises(CaptureError, match=r"secret: Permission denied$"):
        find_captures([secret])


def test_other_files_are_listed_after_the_captures(tmp_path: Path) -> None:
    """They have no packets, and no number of a source."""
    for name in ("b.pcap", "c.pcap"):
        (tmp_path / name).write_bytes(CAPTURE)
    (tmp_path / "a.json").write_text("{}")
    plan = planned(find_captures([tmp_path]))
    assert [capture.source for capture in plan.captures] == [0, 1, -1]
    assert plan.captures[2].error
    assert [plan.sources().name(number) for number in (0, 1)] == [
        capture.path for capture in plan.captures[:2]
    ]


def test_file_reached_twice_is_one_input(tmp_path: Path) -> None:
    """A path, its folder, a glob and a link name one file."""
    (tmp_path / "x.pcap").write_bytes(CAPTURE)
    os.symlink(tmp_path / "x.pcap", tmp_path / "y.pcap")
    files = find_captures([tmp_path / "x.pcap", tmp_path, str(tmp_path / "*.pcap")])
    assert [Path(file.path).name for file in files] == ["x.pcap"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.pcap", "no such file or directory"),
        ("notes.json", "not a pcap or pcapng file"),
        ("empty.pcap", "the file is empty"),
        ("*.none", "no file matches"),
        ("*.json", "no capture among the files that match"),
        ("folder", "no capture in this folder (1 other files)"),
        ("set", "is a table set; name its captures"),
    ],
)
def test_unusable_path_is_one_clear_line(tmp_path: Path, name: str, reason: str) -> None:
    """A missing, empty or other file raises CaptureError with its name."""
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "empty.pcap").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.json").write_text("{}")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "_kdissect.json").write_text("{}")
    with pytest.raises(CaptureError) as error:
        find_captures([tmp_path / name])
    assert str(error.value) == f"{tmp_path / name}: {reason}"


def test_no_path_at_all() -> None:
    """An empty list raises CaptureError."""
    with pytest.raises(CaptureError, match="no path was given"):
        find_captures([])


def test_name_with_glob_characters_is_a_name(tmp_path: Path) -> None:
    """An existing file is taken by its name, brackets included."""
    path = tmp_path / "x[1].pcap"
    path.write_bytes(CAPTURE)
    assert [file.path for file in find_captures([path])] == [str(path)]


class _Stdin:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


@pytest.mark.parametrize("data", [CAPTURE, gzip.compress(CAPTURE)])
def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """'-' is copied to the spool folder and unpacked."""
    monkeypatch.setattr("sys.stdin", _Stdin(data))
    (file,) = find_captures(["-"])
    plain = spooled(file, str(tmp_path))
    assert (plain.path, plain.format) == ("-", "pcap")
    assert Path(plain.data_path).read_bytes() == CAPTURE
    assert len([path for path in tmp_path.iterdir() if path.suffix != ".lock"]) == 1


def test_standard_input_without_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other bytes on stdin raise CaptureError."""
    monkeypatch.setattr("sys.stdin", _Stdin(b"hello, world"))
    with pytest.raises(CaptureError, match=r"^-: not a pcap"):
        spooled(find_captures(["-"])[0], str(tmp_path))


def test_named_pipe(tmp_path: Path) -> None:
    """A pipe is copied to the spool folder."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(CAPTURE,))
    writer.start()
    plain = spooled(find_captures([pipe])[0], str(tmp_path))
    writer.join(10)
    assert Path(plain.data_path).read_bytes() == CAPTURE


def test_plain_file_needs_no_spooling(tmp_path: Path) -> None:
    """An uncompressed capture is read in place."""
    path = tmp_path / "x.pcap"
    path.write_bytes(CAPTURE)
    (file,) = find_captures([path])
    assert file == InputFile(str(path), "pcap", "none", len(CAPTURE), None, str(path))
    assert spooled(file, str(tmp_path / "nowhere")) is file
