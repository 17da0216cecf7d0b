"""Files appear whole or not at all; devices and links remain."""

import os
import stat

import pytest

from kdissect.atomic_file import atomic_write
from kdissect.errors import EnvironmentFailed, OutputError


def test_a_failed_write_leaves_the_old_file(tmp_path):
    """After an error the old content stays, and no part."""
    target = tmp_path / "out.txt"
    target.write_text("before")

    def fail():
        with atomic_write(target) as part, open(part, "w") as file:
            file.write("half")
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        fail()
    assert target.read_text() == "before"
    assert os.listdir(tmp_path) == ["out.txt"]
    with atomic_write(target) as part, open(part, "w") as file:
        file.write("after")
    assert target.read_text() == "after"
    assert stat.S_IMODE(target.stat().st_mode) & 0o400


def test_a_link_stays_a_link(tmp_path):
    """The target of the link is replaced."""
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("before")
    link.symlink_to(real)
    with atomic_write(link) as part, open(part, "w") as file:
        file.write("after")
    assert link.is_symlink()
    assert real.read_text() == "after"


def test_a_device_is_written_to():
    """Devices are opened, not replaced; a full one raises an error."""
    with atomic_write("/dev/null") as part, open(part, "ab") as file:
        file.write(b"nothing")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)

    def fill():
        with atomic_write("/dev/full") as part, open(part, "ab", buffering=0) as file:
            file.write(b"too much")

    with pytest.raises(EnvironmentFailed, match="No space left"):
        fill()
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_impossible_paths_are_refused_with_a_reason(tmp_path):
    """A folder, and a missing folder, raise OutputError."""
    for place, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "x", "cannot be written")):
        with pytest.raises(OutputError, match=words), atomic_write(place):
            pass
