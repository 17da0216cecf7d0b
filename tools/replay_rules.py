"""Writes `docs/replay-rules.md` from the built-in rules: python -m tools.replay_rules"""

from __future__ import annotations

from pathlib import Path

from kdissect.replay.comparison.explain import Explanation, explanations
from kdissect.replay.comparison.rules import Rule, built_in_rules

OUT = Path(__file__).parent.parent / "docs" / "replay-rules.md"

HEAD = """# Rules of the comparison

`kdissect replay` compares each response of the target with the captured one. These rules permit
certain differences. The first rule that matches a field and permits its difference wins; rules of
`--rules FILE` come before the built-in ones.

- A difference that a rule permits makes the verdict *tolerated*.
- A translated ID (rules of the kind *translated*) leaves the verdict *same*.
- `--strict` uses only the translated rules and those of `--rules`.

## A file of your own

```toml
format_version = 1

[[rule]]
name = "ours"                     # shown beside each difference that it permits
kind = "tolerance"                # ignore, tolerance, unordered, translated, equal-modulo
path = "api_keys[].max_version"   # a name alone: at any depth; []: any index; *: any part of a name
apis = ["ApiVersions"]            # without it: all APIs
absolute = 2                      # or relative = 0.1
why = "An upgrade by two versions is fine."
```

The kinds and their fields:

- **ignore**: permits any difference at the path or below it. For `topics[]`, it permits that one
  side lacks the element.
- **tolerance**: permits numbers that differ by at most `absolute`, or by the share `relative` of
  the captured number.
- **unordered**: permits another order of the elements. `key` names the fields that identify an
  element; `a|b` uses the first of them that has a value.
- **translated**: permits the target's ID in place of the captured one. `as` is one of
  {translations}.
- **equal-modulo**: permits values with the same meaning. `modulo = "presence"`: both sides are
  set, or both are null, empty or -1. `modulo = "text"`: equal after removing a `pattern`.
  `classes`: lists of equal values. `captured` and `answered`: a captured value and its permitted
  responses. `whole = true`: the rest of the struct is not compared either.

Each rule can also have these conditions:

- `where = {{ field = "regular expression" }}`: fields of the same struct match.
- `foreign = "topic" | "group" | "transactional_id"`: the captured requests do not name the
  element.
- `several_brokers = true`: the capture or the target has more than one broker.
- `racing = true`: another request was changing the data during this read.
- `unacknowledged = true`: records of Produce requests with acks 0 that only changed their places.

## The built-in rules

"""


MEANING = """## Notes on other differences

A difference that no rule permits counts. If kdissect knows more about it, every output has a note
beside it:

- the name of an error code;
- the releases that support a version that the target lacks;
- a text of the table below. `{then}` and `{now}` are the releases of the captured broker and of
  the target, from the versions that they offer;
- *may follow from exchange N*: an earlier request changed the same topic, partition, group,
  transaction or producer, and the target refused it or the replay did not send it.

| difference | note |
|---|---|
"""


def page() -> str:
    from kdissect.replay.comparison.rules import TRANSLATIONS

    lines = [HEAD.format(translations=", ".join(f"`{each}`" for each in TRANSLATIONS))]
    for rule in built_in_rules():
        lines.append(f"### {rule.name}\n\n{_what(rule)}\n\n{rule.why}\n\n")
    lines.append(MEANING)
    for one in explanations():
        lines.append(f"| {_place(one)} | {one.text} |\n")
    return "".join(lines).rstrip() + "\n"


def _place(one: Explanation) -> str:
    parts = [f"`{one.path}`"]
    if one.apis:
        parts.append("of " + ", ".join(sorted(one.apis)))
    for name, values in (("then", one.captured), ("now", one.answered)):
        if values:
            parts.append(
                ", ".join(f"`{each}`" for each in sorted(values, key=_number)) + f" {name}"
            )
    if one.needs_releases:
        parts.append("of another release")
    return " ".join(parts)


def _what(rule: Rule) -> str:
    where = f"`{rule.path}`" if rule.path != "*" else "any such field"
    if rule.apis:
        where += " of " + ", ".join(sorted(rule.apis))
    parts = [f"*{rule.kind}*: {where}"]
    if rule.translated_as:
        parts.append(f"as `{rule.translated_as}`")
    if rule.key:
        parts.append("by " + ", ".join(f"`{each}`" for each in rule.key))
    if rule.modulo:
        parts.append(f"modulo {rule.modulo}")
    if rule.classes:
        parts.append("; ".join(" = ".join(sorted(each)) for each in rule.classes))
    if rule.captured:
        then = ", ".join(sorted(rule.captured, key=_number))
        now = ", ".join(sorted(rule.answered, key=_number)) or "anything"
        parts.append(f"{then} then, {now} now")
    if rule.is_whole:
        parts.append("with the rest of the struct")
    parts += [f"where `{name}` is like `{pattern.pattern}`" for name, pattern in rule.where]
    if rule.foreign:
        parts.append(f"of a {rule.foreign} that the capture's requests do not name")
    if rule.needs_brokers:
        parts.append("with several brokers")
    if rule.needs_race:
        parts.append("read while another request changed it")
    return ", ".join(parts)


def _number(text: str) -> tuple[int, str]:
    return (int(text) if text.lstrip("-").isdigit() else 0, text)


if __name__ == "__main__":
    OUT.write_text(page(), "utf-8")
