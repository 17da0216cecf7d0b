"""Bring the definition files up to a Kafka release.

    python -m tools.update_definitions --jar kafka-clients-4.4.0.jar [kafka-metadata-4.4.0.jar ...]

Reads the message definitions that Kafka ships inside its jars (``common/message/*.json``), merges
them into the files of ``kdissect/protocol/definitions`` (see `merge_definitions`), and prints the
files that changed. Releases already merged (its ``releases.kdef`` lists them) are passed over.
Files in ``embedded/`` are written by hand and left alone.
Several jars count as one release each time their file names carry the same number.
"""

import argparse
import json
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kdissect.errors import DefinitionError
from kdissect.protocol import grammar
from kdissect.protocol.model import (
    ALWAYS,
    NEVER,
    NO_LIMIT,
    Api,
    Definition,
    Field,
    Type,
    VersionRange,
    snake_case,
)
from tools import definition_text
from tools.merge_definitions import clamp, merge, shape

DEFINITIONS = Path(grammar.__file__).parent / "definitions"

# The types of control records; Kafka has them in code (ControlRecordType), not in the definitions.
CONTROL_TYPES = {
    "EndTxnMarker": 0,  # and 1: abort, commit
    "LeaderChangeMessage": 2,
    "SnapshotHeaderRecord": 3,
    "SnapshotFooterRecord": 4,
    "KRaftVersionRecord": 5,
    "VotersRecord": 6,
}
_LOGS = {"ShareSnapshot": "share", "ShareUpdate": "share", "TransactionLog": "transaction"}
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*')
_TYPES = {kind.value: kind for kind in Type if kind is not Type.STRUCT}

Facts = dict[str, Any]


# Facts to definitions


def parse_json(text: str) -> Facts:
    """Kafka's JSON, which has ``//`` comments."""
    facts: Facts = json.loads(_COMMENT.sub(lambda match: match[1] or "", text))
    return facts


def parse_range(text: str | None) -> VersionRange:
    """``0-3``, ``4+``, ``7``, ``none``; nothing said is never."""
    if text is None or text == "none":
        return NEVER
    if text.endswith("+"):
        return VersionRange(int(text[:-1]), NO_LIMIT)
    first, _, last = text.partition("-")
    return VersionRange(int(first), int(last or first))


def definition_of(facts: Facts) -> Definition:
    """One definition as a release's facts say it, field ranges cut to those of their parents."""
    versions = parse_range(facts["validVersions"])
    kind: str = {"request": "message", "response": "message"}.get(facts["type"]) or facts["type"]
    name = facts["name"]
    key, shift = -1, 0
    if kind in ("coordinator-key", "coordinator-value"):
        key = facts["apiKey"]
        kind = coordinator_of(name)
    elif kind == "metadata":
        key = facts["apiKey"]
    elif name in CONTROL_TYPES:
        kind, key = "control", CONTROL_TYPES[name]
    elif kind == "data" and name.endswith("Value"):
        kind = coordinator_of(name)
    elif kind == "data" and name.endswith("Key"):
        # Before 4.1 the type of a coordinator's key stood where its version belongs.
        kind, key = coordinator_of(name), versions.last
        shift, versions = key, VersionRange(0, 0)
    unstable = NEVER
    if facts.get("latestVersionUnstable"):
        unstable = VersionRange(versions.last, versions.last)
    shared = {each["name"]: each for each in facts.get("commonStructs", ())}
    outer = VersionRange(versions.first, NO_LIMIT)
    fields = _fields(facts["fields"], outer, shared, shift)
    return Definition(
        name=name,
        versions=versions,
        flexible=clamp(parse_range(facts.get("flexibleVersions")), outer),
        fields=fields,
        unstable=unstable,
        kind=kind,
        record_key=key,
    )


def coordinator_of(name: str) -> str:
    """Return the log of a coordinator's record."""
    return _LOGS.get(re.sub("(Key|Value)$", "", name), "group")


def _fields(
    facts: Iterable[Facts], outer: VersionRange, shared: dict[str, Facts], shift: int = 0
) -> tuple[Field, ...]:
    made = (_field(each, outer, shared, shift) for each in facts)
    return tuple(each for each in made if each is not None)


def _field(facts: Facts, outer: VersionRange, shared: dict[str, Facts], shift: int) -> Field | None:
    tagged = parse_range(facts.get("taggedVersions"))
    versions = parse_range(facts["versions"]) if "versions" in facts else tagged
    if shift:
        versions = VersionRange(versions.first - shift, versions.last - shift)
    versions = clamp(versions, outer)
    if versions.is_empty:
        return None
    type_name: str = facts["type"]
    is_array = type_name.startswith("[]")
    type_name = type_name.removeprefix("[]")
    kind = _TYPES.get(type_name, Type.STRUCT)
    fields: tuple[Field, ...] = ()
    if kind is Type.STRUCT:
        if "fields" in facts:
            fields = _fields(facts["fields"], versions, shared, shift)
        else:  # declared once for several fields: as wide as declared, so that all uses are equal
            fields = _fields(shared[type_name]["fields"], ALWAYS, shared, shift)
    nullable = clamp(parse_range(facts.get("nullableVersions")), versions)
    return Field(
        name=snake_case(facts["name"]),
        type=kind,
        versions=versions,
        is_array=is_array,
        nullable=nullable,
        tagged=clamp(tagged, versions),
        tag=int(facts["tag"]) if "tag" in facts else -1,
        default=_default(facts, kind, is_array, nullable),
        never_flexible=facts.get("flexibleVersions") == "none",
        entity=facts.get("entityType", ""),
        map_key=facts.get("mapKey", False),
        fields=fields,
        struct_name=type_name if kind is Type.STRUCT else "",
    )


def _default(facts: Facts, kind: Type, is_array: bool, nullable: VersionRange) -> Any:
    if facts.get("default") is None:  # Kafka's generator reads JSON's null as nothing said
        return grammar.implied_default(kind, is_array)
    value = facts["default"]
    if value == "null" and not nullable.is_empty:
        return None
    if kind is Type.BOOL:
        return value in (True, "true")
    if kind is Type.STRING:
        return value
    if kind is Type.FLOAT64:
        return float(value)
    if isinstance(value, int):
        return value
    if is_array or kind in (Type.STRUCT, Type.BYTES, Type.RECORDS, Type.UUID):
        raise DefinitionError(f"default {value!r} of {facts['name']} has no notation")
    return int(value, 0)


# Releases to files


@dataclass
class Merged:
    """Definitions of all releases so far: messages by (api key, side), others by name."""

    messages: dict[tuple[int, str], Definition] = field(default_factory=dict)
    others: dict[str, Definition] = field(default_factory=dict)
    last: dict[tuple[int, str] | str, str] = field(default_factory=dict)
    notes: dict[tuple[int, str] | str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, release: str, all_facts: Iterable[Facts]) -> None:
        """Merge one release, newer than all before."""
        for facts in all_facts:
            new = definition_of(facts)
            if new.versions.is_empty:
                continue  # an API that this release has removed keeps its last layout
            if facts["type"] in ("request", "response"):
                place: tuple[int, str] | str = (facts["apiKey"], facts["type"])
                old = self.messages.get(place)  # type: ignore[arg-type]
            else:
                place = new.name
                old = self.others.get(new.name)
            self._note_disagreement(place, old, release, new)
            merged = new if old is None else merge(old, new)
            self.last[place] = release
            if isinstance(place, tuple):
                self.messages[place] = merged
            else:
                self.others[place] = merged

    def _note_disagreement(
        self, place: tuple[int, str] | str, old: Definition | None, release: str, new: Definition
    ) -> None:
        if old is None:
            return
        for version in range(new.versions.first, min(old.versions.last, new.versions.last) + 1):
            if version in old.versions and shape(old, version) != shape(new, version):
                part = f"{place[1].capitalize()} version" if isinstance(place, tuple) else "Version"
                note = (
                    f"{part} {version} had other bytes as drafted up to"
                    f" {self.last.get(place, 'an earlier release')};"
                    " this is the layout of the newest release that has it."
                )
                self.notes[place] = (*self.notes.get(place, ()), note)

    def replaced(self) -> None:
        """Drop records whose number a later release gave to another: no byte tells them apart."""
        owners: dict[tuple[str, int], str] = {}
        for name in sorted(self.others, key=lambda each: _release(self.last.get(each, "0"))):
            record = self.others[name]
            if record.kind == "metadata":
                before = owners.get((record.kind, record.record_key))
                owners[record.kind, record.record_key] = name
                if before is not None and before != name:
                    note = (
                        f"Record {record.record_key} was {before} up to"
                        f" {self.last.get(before, 'an earlier release')}."
                    )
                    self.notes[name] = (*self.notes.get(name, ()), note)
                    del self.others[before]

    def files(self) -> dict[str, str]:
        """Path below ``definitions/`` to text."""
        found = {}
        for key in sorted({key for key, _ in self.messages}):
            sides = [self.messages[key, side] for side in ("request", "response")]
            unstable = sides[0].unstable  # printed on the request only
            notes = self._notes((key, "request"), sides[0]) + self._notes(
                (key, "response"), sides[1]
            )
            request, response = (replace(each, unstable=unstable, notes=()) for each in sides)
            name = request.name.removesuffix("Request")
            api = Api(key, name, request, response, tuple(dict.fromkeys(notes)))
            found[f"{key:02d}_{snake_case(name)}.kdef"] = definition_text.format(api)
        for name, each in sorted(self.others.items()):
            definition = replace(each, notes=self._notes(name, each))
            if definition.kind == "header":
                found[f"headers/{snake_case(name)}.kdef"] = definition_text.format(definition)
            elif definition.kind not in grammar.COORDINATOR_KINDS:
                found[f"records/{snake_case(name)}.kdef"] = definition_text.format(definition)
            elif name.endswith("Key"):
                stem = name.removesuffix("Key")
                value = self.others[stem + "Value"]
                value = replace(value, kind=definition.kind, record_key=definition.record_key)
                notes = definition.notes + self._notes(value.name, value)
                pair = (replace(definition, notes=()), replace(value, notes=()))
                api = Api(definition.record_key, stem, *pair, tuple(dict.fromkeys(notes)))
                found[f"records/{snake_case(stem)}.kdef"] = definition_text.format(api)
        return found

    def _notes(self, place: tuple[int, str] | str, definition: Definition) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*definition.notes, *self.notes.get(place, ()))))


def definition_files(folder: Path) -> list[Path]:
    """The files that this command keeps."""
    found = (path for name in ("", "headers", "records") for path in (folder / name).glob("*.kdef"))
    return sorted(found)


def read_folder(folder: Path) -> tuple[Merged, list[str]]:
    """The definition files as they are, and the releases they came from."""
    merged = Merged()
    releases: list[str] = []
    for path in definition_files(folder):
        text = path.read_text(encoding="utf-8")
        if path.name == "releases.kdef":
            releases = [line.split()[1] for line in text.splitlines() if line.startswith("release")]
            continue
        for parsed in grammar.parse(text, path.name):
            if isinstance(parsed, Definition):
                merged.others[parsed.name] = parsed
                continue
            sides = {"request": parsed.request, "response": parsed.response}
            for side, definition in sides.items():
                noted = replace(definition, notes=parsed.notes if side == "request" else ())
                if definition.kind == "message":
                    merged.messages[parsed.key, side] = noted
                else:
                    merged.others[definition.name] = noted
    if releases:
        merged.last = dict.fromkeys((*merged.messages, *merged.others), releases[-1])
    return merged, releases


def facts_of_jar(jar: Path) -> list[Facts]:
    """The definitions inside a Kafka jar."""
    with zipfile.ZipFile(jar) as archive:
        names = [name for name in archive.namelist() if re.search(r"message/\w+\.json$", name)]
        return [parse_json(archive.read(name).decode("utf-8")) for name in sorted(names)]


def _release(label: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", label))


def update(sources: dict[str, list[Facts]], out: Path) -> list[str]:
    """Merge releases (label to facts) into the files of `out`; returns the files that changed."""
    merged, done = read_folder(out)
    newest = max(map(_release, done), default=())
    added = [label for label in sorted(sources, key=_release) if _release(label) > newest]
    for label in added:
        merged.add(label, sources[label])
    merged.replaced()
    wanted = merged.files()
    wanted["releases.kdef"] = (
        "# The releases whose definitions are merged here, oldest first.\n"
        + ("".join(f"release {label}\n" for label in (*done, *added)))
    )
    changed = []
    for path in definition_files(out):
        name = path.relative_to(out).as_posix()
        if name not in wanted:
            path.unlink()
            changed.append(f"{name} (removed)")
    for name, text in wanted.items():
        path = out / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(name)
    return changed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.update_definitions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--jar", type=Path, nargs="+", required=True, help="jars of a Kafka release"
    )
    parser.add_argument("--out", type=Path, default=DEFINITIONS, help="the definition files")
    options = parser.parse_args(arguments)
    sources: dict[str, list[Facts]] = {}
    for jar in options.jar:
        label = re.search(r"(\d+(?:\.\d+)+)[^/]*\.jar$", jar.name)
        if label is None:
            parser.error(f"{jar}: its name does not carry a release number")
        sources.setdefault(label[1], []).extend(facts_of_jar(jar))
    changed = update(sources, options.out)
    for name in changed:
        print(name)
    print(f"{len(changed)} files changed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
