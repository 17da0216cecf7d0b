"""Options for `python -m build --wheel`: machine code fits one platform and Python."""

from __future__ import annotations

import sys
import sysconfig

platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
if platform.startswith("linux_"):
    # the code calls nothing but Numba's own functions, so any glibc that Numba takes will do
    platform = platform.replace("linux_", "manylinux2014_")
python = f"cp{sys.version_info.major}{sys.version_info.minor}"
for option in (f"--plat-name={platform}", f"--python-tag={python}"):
    sys.stdout.write(f"-C=--build-option={option}\n")
