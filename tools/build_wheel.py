"""Builds the wheel into dist/: for one platform, one Python and one Numba, as machine code needs.

Without machine code kdissect runs with a range of Numba's versions. The machine code of a wheel
belongs to one of them, so the wheel asks for that one.
"""

import base64
import hashlib
import re
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path


def build() -> Path:
    """Runs `build` with the tags of this platform and Python; returns the wheel."""
    platform = re.sub("[-.]", "_", sysconfig.get_platform())
    # the code calls nothing but Numba's own functions, so any glibc that Numba takes will do
    platform = re.sub("^linux_", "manylinux2014_", platform)
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    options = [
        f"-C=--build-option=--{name}" for name in (f"plat-name={platform}", f"python-tag={python}")
    ]
    command = [sys.executable, "-m", "build", "--quiet", "--wheel", "--no-isolation", *options]
    subprocess.run(command, check=True)
    (wheel,) = Path("dist").glob("*.whl")
    return wheel


def pin_numba(wheel: Path) -> None:
    """Writes the requirement of Numba's version into the metadata, and their digest."""
    with zipfile.ZipFile(wheel) as archive:
        files = {item.filename: archive.read(item) for item in archive.infolist()}
    (metadata,) = [name for name in files if name.endswith(".dist-info/METADATA")]
    record = metadata.replace("METADATA", "RECORD")
    text, count = re.subn(
        rb"(?m)^Requires-Dist: numba\b.*$",
        f"Requires-Dist: numba=={version('numba')}".encode(),
        files[metadata],
    )
    assert count == 1
    files[metadata] = text
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
    line = f"{metadata},sha256={digest},{len(text)}"
    files[record] = re.sub(
        rb"(?m)^" + re.escape(metadata).encode() + rb",.*$", line.encode(), files[record]
    )
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


if __name__ == "__main__":
    pin_numba(build())
