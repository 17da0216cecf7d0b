"""Files appear whole or not at all; devices and links remain."""

import os
import stat

import pytest

from kdissect.atomic_file import atomic_write
from kdissect.errors import EnvironmentFailed


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
