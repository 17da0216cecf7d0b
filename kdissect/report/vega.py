"""Vega, which draws the charts of the page, as one script."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.metadata import version

from kdissect import kernel_cache
from kdissect.atomic_file import atomic_write
from kdissect.charts import VEGA_LITE


def vega_script() -> str:
    """Vega, Vega-Lite and their embedder as one script that sets `window.vegaEmbed`.

    Bundling takes seconds, so the script is kept beside the compiled kernels.
    """
    import vl_convert

    folder = kernel_cache.folder()
    file = folder and folder / f"vega-embed-{VEGA_LITE}-{version('vl-convert-python')}.js"
    if file is not None:
        with suppress(OSError, UnicodeDecodeError):
            return file.read_text("utf-8")
    script: str = vl_convert.javascript_bundle(
        "window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE
    )
    # of an editor, of a tracker in an error message, of a schema: none is used, none stays
    script = re.sub(r"https://(github\.com|vega\.github\.io)", "about:blank#", script)
    if file is not None:
        with (
            suppress(OSError),
            atomic_write(file) as part,
            open(part, "w", encoding="utf-8") as out,
        ):
            out.write(script)
    return script
