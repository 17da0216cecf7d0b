"""Writes `docs/replay-rules.md` from the table of fields: python -m tools.replay_rules"""

from pathlib import Path

from kdissect.replay.comparison.kinds import Cause, causes, changes
from kdissect.replay.fields import FieldRule, built_in_fields

OUT = Path(__file__).parent.parent / "docs" / "replay-rules.md"

HEAD = """# Rules of the comparison

`kdissect replay` brings each response of the target, and the captured one, into the same words:
names instead of IDs, positions instead of offsets, sets instead of lists in any order. Then
every value has to be equal, but for the fields of this page. The first rule that fits a field
says what it is. Rules of `--rules FILE` come before the built-in ones. `--strict` uses only the
built-in rules about IDs and order.

The first rule of kind *tolerance* or *equal-modulo*, or of yours, that permits a difference
makes the verdict *tolerated*. The other kinds leave the verdict *same*. Records are compared
apart from these rules, and so are answers that contradict each other: no rule permits those
differences.

## A file of your own

```toml
format_version = 1

[[rule]]
name = "ours"                     # shown beside each difference that it permits
kind = "tolerance"
path = "api_keys[].max_version"   # a name alone: any depth; []: any element; *: any part of a name
# path = ["host", "port"]         # several
apis = ["ApiVersions"]            # without it: all APIs
absolute = 2                      # or relative = 0.1
why = "An upgrade by two versions is fine."
```

`"absent"` is an element that one side lacks, `"[]"` an empty array. If a rule of yours
permits nothing in a run, or fits no field of its answers, a note says so. The kinds that such
files need:

| kind | meaning |
|---|---|
| ignore | permits any difference there or below; for `topics[]`: one side lacks the element |
| tolerance | numbers may differ by `absolute`, or the share `relative` of the captured one |
| equal-modulo | a value of `captured` may become one of `answered`; without either, any value |
| text, time, counter | only whether the value is set is compared |
| server | compared only with the answers of another target (`--against`), by its other rules |
| unordered | elements are matched by `key`, in any order; `a\\|b`: the first that has a value |
| exact | compared, although a later rule would not |

Each rule can also have these conditions:

- `where = { field = "regular expression" }`: fields of the same struct match.
- `several_brokers = true`: the capture or the target has more than one broker.
- `racing = true`: another request was changing the data during this read.
- `early = true`: so it was, or topics or partitions were made up to two seconds before.

## The built-in rules

| rule | kind | fields | why |
|---|---|---|---|
"""

MEANING = """
## Words beside findings

A difference that no rule permits counts. If kdissect knows more about it, every output says so:
the name of an error code, the broker's own words, the
releases that support a version, and a likely cause of this table with the settings of the target
behind it. *follows*: if an earlier answer about the same
topic, partition, group or transaction differs, the difference is counted there.

| difference | words | settings | |
|---|---|---|---|
"""

CHANGES = """
## Changes of a release

Differences that a Kafka release makes by design are listed in a section of their own, and fail no
run. They follow from the releases that the captured
broker and the target offer versions of.

| since | where | what |
|---|---|---|
"""


def page() -> str:
    lines = [HEAD]
    for rule in built_in_fields().rules:
        lines.append(f"| {rule.name} | {rule.kind} | {_what(rule)} | {rule.why} |\n")
    lines.append(MEANING)
    for one in causes():
        settings = ", ".join(f"`{each}`" for each in one.settings)
        follows = "follows" if one.follows else ""
        if one.text or one.follows:
            lines.append(f"| {_place(one)} | {one.text} | {settings} | {follows} |\n")
    lines.append(CHANGES)
    for change in changes():
        lines.append(_change(change))
    return "".join(lines).rstrip() + "\n"


def _what(rule: FieldRule) -> str:
    paths = [f"`{path}`" for path in rule.path] if rule.path != ("*",) else ["any field"]
    if rule.entity:
        paths.append(f"what Kafka marks as `{rule.entity}`")
    parts = [", ".join(paths)]
    if rule.apis:
        parts.append("of " + ", ".join(sorted(rule.apis)))
    if rule.kind == "unordered":
        parts = ["arrays of structs, by their name, ID or number"]
    for name, values in (("captured", rule.captured), ("answered", rule.answered)):
        if values:
            shown = ", ".join(f"`{each}`" for each in sorted(values, key=_number))
            parts.append(f"{name} {shown}")
    if rule.absolute or rule.relative:
        parts.append(f"by {rule.absolute:g} or {rule.relative:.0%}")
    parts += [
        f"where `{name}` is like `{pattern.pattern}`".replace("|", "\\|")
        for name, pattern in rule.where
    ]
    if rule.several_brokers:
        parts.append("with several brokers")
    if rule.racing:
        parts.append("read while another request changed it, or sent again")
    if rule.early:
        parts.append("read while it was being made, or moments after")
    return "; ".join(parts)


def _place(one: Cause) -> str:
    parts = [", ".join(f"`{path}`" for path in one.path)]
    if one.apis:
        parts.append("of " + ", ".join(sorted(one.apis)))
    if one.keys:
        parts.append("for " + ", ".join(sorted(one.keys)))
    for name, values in (("captured", one.captured), ("answered", one.answered)):
        if values:
            parts.append(f"{name} {', '.join(sorted(values, key=_number))}")
    if one.releases:
        parts.append("of another release")
    return " ".join(parts)


def _change(change: Cause) -> str:
    names = ", ".join(f"`{each}`" for each in sorted(change.keys))
    where = names or ", ".join(f"`{each}`" for each in change.path)
    if change.apis:
        where += " of " + ", ".join(sorted(change.apis))
    minor = ", ".join(".".join(map(str, each[:2])) for each in change.since) or "KRaft"
    kip = f" ({change.kip})" if change.kip else ""
    return f"| {minor} | {where} | {change.text}{kip} |\n"


def _number(text: str) -> tuple[int, str]:
    return (int(text) if text.lstrip("-").isdigit() else 0, text)


if __name__ == "__main__":
    OUT.write_text(page(), "utf-8")
