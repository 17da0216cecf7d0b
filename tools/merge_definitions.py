"""Two releases' views of one definition, made one. Used by `update_definitions` only.

A release describes the versions it still speaks. For those the newest release is right, in bytes
and in names; the versions it has dropped keep the layout of the last release that had them. A field
of the result exists in the versions in which its release says so, and is written once:
equal name and type mean the same field. Open ranges (``4+``) stay open, so that a new version of an
API changes only the lines of the fields it touches.
"""

from dataclasses import replace

from kdissect.errors import DefinitionError
from kdissect.protocol.model import NEVER, NO_LIMIT, Definition, Field, Type, VersionRange


def clamp(inner: VersionRange, outer: VersionRange) -> VersionRange:
    """Return the intersection of two ranges; it is open if both are."""
    both = VersionRange(max(inner.first, outer.first), min(inner.last, outer.last))
    return NEVER if both.is_empty else both


def join(
    old: VersionRange, old_only: range, new: VersionRange, new_versions: VersionRange
) -> VersionRange:
    """The versions of `old` among those only the old release has, and those of `new`."""
    kept = [version for version in old_only if version in old]
    new = clamp(new, VersionRange(new_versions.first, NO_LIMIT))
    if not kept:
        return new
    if new.is_empty:
        if kept != list(range(kept[0], kept[-1] + 1)):
            raise DefinitionError(f"versions {kept} are no range")
        if old.last == NO_LIMIT and kept[-1] == old_only[-1] and kept[-1] > new_versions.last:
            return VersionRange(kept[0], NO_LIMIT)
        return VersionRange(kept[0], kept[-1])
    if kept != list(range(kept[0], new.first)):
        raise DefinitionError(f"versions {kept} and {tuple(new)} are no range")
    return VersionRange(kept[0], new.last)


def merge(old: Definition, new: Definition) -> Definition:
    """`new`, with the versions that only `old` has.

    Raises DefinitionError where no one text can say both.
    """
    if old.versions.is_empty:
        return new
    if new.versions.is_empty:
        return old
    old_only = range(old.versions.first, min(old.versions.last, new.versions.first - 1) + 1)
    if old.versions.last > new.versions.last:
        raise DefinitionError(f"{new.name}: the newer release lacks version {old.versions.last}")
    first = min(old.versions.first, new.versions.first)
    unstable = join(old.unstable, old_only, new.unstable, new.versions)
    return replace(
        new,
        versions=VersionRange(first, new.versions.last),
        flexible=join(old.flexible, old_only, new.flexible, new.versions),
        unstable=unstable,
        fields=_merge_fields(old.fields, old_only, new.fields, new.versions),
        notes=tuple(dict.fromkeys((*old.notes, *new.notes))),
    )


def _same(one: Field, other: Field) -> bool:
    return (one.name, one.type, one.is_array) == (other.name, other.type, other.is_array)


def _merge_fields(
    old: tuple[Field, ...], old_only: range, new: tuple[Field, ...], new_versions: VersionRange
) -> tuple[Field, ...]:
    merged: list[Field] = []
    waiting = list(new)
    for field in old:
        twin = next((each for each in waiting if _same(field, each)), None)
        if twin is None:
            kept = _only_old(field, old_only, new_versions)
            if kept is not None:
                merged.append(kept)
            continue
        at = waiting.index(twin)
        merged += [_only_new(each, new_versions) for each in waiting[:at]]
        del waiting[: at + 1]
        merged.append(_merge_field(field, old_only, twin, new_versions))
    merged += [_only_new(each, new_versions) for each in waiting]
    return tuple(merged)


def _only_old(field: Field, old_only: range, new_versions: VersionRange) -> Field | None:
    versions = join(field.versions, old_only, NEVER, new_versions)
    if versions.is_empty:
        return None
    kept = (_only_old(each, old_only, new_versions) for each in field.fields)
    return replace(
        field,
        versions=versions,
        nullable=join(field.nullable, old_only, NEVER, new_versions),
        tagged=join(field.tagged, old_only, NEVER, new_versions),
        fields=tuple(each for each in kept if each is not None),
    )


def _only_new(field: Field, new_versions: VersionRange) -> Field:
    known = VersionRange(new_versions.first, NO_LIMIT)
    return replace(
        field,
        versions=clamp(field.versions, known),
        nullable=clamp(field.nullable, known),
        tagged=clamp(field.tagged, known),
        fields=tuple(_only_new(each, new_versions) for each in field.fields),
    )


def _merge_field(old: Field, old_only: range, new: Field, new_versions: VersionRange) -> Field:
    return replace(
        new,
        versions=join(old.versions, old_only, new.versions, new_versions),
        nullable=join(old.nullable, old_only, new.nullable, new_versions),
        tagged=join(old.tagged, old_only, new.tagged, new_versions),
        entity=new.entity or old.entity,
        fields=_merge_fields(old.fields, old_only, new.fields, new_versions),
    )


# The bytes of one version, to see where releases disagree

Shape = tuple[object, ...]


def shape(definition: Definition, version: int) -> Shape:
    """Return the layout of `version` without names: equal shapes are equal layouts."""
    return (version in definition.flexible, *_shapes(definition.fields, version))


def _shapes(fields: tuple[Field, ...], version: int) -> Shape:
    plain: list[object] = []
    for field in fields:
        if version not in field.versions or version in field.tagged:
            continue  # a reader that does not know a tag skips it: no disagreement
        kind = "bytes" if field.type is Type.RECORDS else field.type.value
        presence = field.type is Type.STRUCT and not field.is_array and version in field.nullable
        inner = _shapes(field.fields, version)
        plain.append((kind, field.is_array, presence, field.never_flexible, inner))
    return tuple(plain)
