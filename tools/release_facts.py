"""Reads the versions that releases speak from the code of their own jars.

    python -m tools.release_facts kafka-clients-0.8.2.2.jar ... kafka-clients-4.3.1.jar

Asks Kafka's `ApiKeys` in each jar, by a few lines of Java, for the versions that a release's
brokers and controllers take, drafts left out, and adds them to ``releases.toml`` (see `releases`).
The jars come from anywhere; ``slf4j-api`` is needed beside them (``--classpath``), and a JDK.
Definitions say less: before 2.8 part of them was not what the code used, and they do not say what
is enabled.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from kdissect.protocol.model import VersionRange
from kdissect.protocol.releases import FACTS, ReleaseFacts, parse_facts, release_number

_HEAD = """\
# Which versions of each API a release's brokers and controllers take, drafts left out.
# Written by `python -m tools.release_facts`; what it means is said in `releases.py`.
"""

_PROGRAM = Path(__file__).with_name("Versions.java")


def facts_of_jar(jar: Path, classpath: list[Path]) -> dict[int, tuple[str, VersionRange]]:
    """API key to name and versions, as the code inside a kafka-clients jar says."""
    command = ["java", "-cp", ":".join(map(str, (jar, *classpath))), str(_PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {}
    for line in done.stdout.splitlines():
        key, name, first, last = line.split()
        if int(first) <= int(last):
            found[int(key)] = (name, VersionRange(int(first), int(last)))
    return found


def merge_facts(
    facts: ReleaseFacts, release: str, spoken: dict[int, tuple[str, VersionRange]]
) -> None:
    """Add a release to the facts; the newest name of an API is kept."""
    if release in facts.releases:
        facts.releases.remove(release)
    facts.releases.append(release)
    facts.releases.sort(key=release_number)
    newest = facts.releases[-1] == release
    for key in facts.spoken.keys() | spoken.keys():
        name, versions = spoken.get(key, (facts.names.get(key, ""), None))
        if newest or key not in facts.names:
            facts.names[key] = name
        facts.spoken.setdefault(key, {})[release] = versions


def format_facts(facts: ReleaseFacts) -> str:
    """The text of ``releases.toml``."""
    releases = "".join(f'    "{release}",\n' for release in facts.releases)
    lines = [_HEAD, f"releases = [\n{releases}]\n"]
    for key in sorted(facts.spoken):
        lines.append(f"\n[{facts.names[key]}]\nkey = {key}\n")
        before: VersionRange | None = None
        for release in facts.releases:
            versions = facts.spoken[key].get(release)
            if versions != before:
                lines.append(f'"{release}" = {list(versions or ())}\n')
            before = versions
    return "".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.release_facts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("jars", type=Path, nargs="+", help="kafka-clients-RELEASE.jar")
    parser.add_argument("--classpath", type=Path, nargs="*", default=[], help="slf4j-api.jar")
    parser.add_argument("--out", type=Path, default=FACTS, help="the file of facts")
    options = parser.parse_args(arguments)
    facts = parse_facts(options.out.read_text()) if options.out.exists() else ReleaseFacts()
    for jar in options.jars:
        label = re.search(r"-(\d+(?:\.\d+){2,3})\.jar$", jar.name)
        if label is None:
            parser.error(f"{jar}: its name does not carry a release number")
        merge_facts(facts, label[1], facts_of_jar(jar, options.classpath))
    options.out.write_text(format_facts(facts))
    sys.stdout.write(f"{len(facts.releases)} releases in {options.out}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
