"""Compiles all kernels now, for images, executors and wheels.

    python -m kdissect.compile [--cpu common] [--into DIR]

Reads the small captures of `samples/`, which reach all kernels, and stores the machine code in the
package (`machine_code/`), where every process that runs this copy finds it.

On x86-64, `--cpu common` compiles for x86-64-v3 instead of this machine's CPU; older CPUs compile
again at their first use.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parent
SAMPLES = PACKAGE / "samples"


def compile_all(folder: Path) -> int:
    """Compile into an empty folder; return the number of files written there."""
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    import kdissect
    from kdissect.extract.run import extract
    from kdissect.pipeline.options import Options
    from kdissect.pipeline.selection import Selection
    from kdissect.show.reading import CaptureReading

    gc.set_threshold(200_000, 50, 50)  # Numba's objects live on: collections take 8 % of the time
    captures = sorted(map(str, SAMPLES.glob("*.pcap")))
    keylog = str(SAMPLES / "tls.keylog")
    for paths in (captures[:1], captures):
        tables = kdissect.read(paths, keylog=keylog)
        for name in tables.names:
            tables[name].to_arrow()
    for _ in CaptureReading(captures, Options(keylog=(keylog,)), print):
        pass
    with tempfile.TemporaryDirectory() as made:
        extract(captures, Path(made) / "all.pcapng", Selection(), Options(keylog=(keylog,)))
    return len(list(folder.glob("*.code")))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kdissect.compile", description=__doc__)
    parser.add_argument("--cpu", choices=["this", "common"], default="this")
    parser.add_argument("--into", type=Path, default=PACKAGE / "machine_code")
    chosen = parser.parse_args()
    if chosen.cpu == "common" and platform.machine() in ("x86_64", "AMD64"):
        os.environ["NUMBA_CPU_NAME"] = "x86-64-v3"
        os.environ["NUMBA_CPU_FEATURES"] = ""
    try:
        shutil.rmtree(chosen.into, ignore_errors=True)
        chosen.into.mkdir(parents=True)
    except OSError as error:
        sys.stderr.write(f"kdissect.compile: {chosen.into}: {error.strerror}\n")
        return 3
    count = compile_all(chosen.into)
    sys.stdout.write(f"kdissect.compile: {count} kernels in {chosen.into}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
