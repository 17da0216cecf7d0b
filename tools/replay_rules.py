"""Make `docs/replay-rules.md` from the built-in rules: python -m tools.replay_rules"""

from __future__ import annotations

from pathlib import Path

from kdissect.replay.comparison.explain import Explanation, explanations
from kdissect.replay.comparison.rules import Rule, built_in_rules

OUT = Path(__file__).parent.parent / "docs" / "replay-rules.md"

HEAD = """# Rules of the comparison

What `kdissect replay` lets differ between a captured response and the answer to its replay, one
rule after the other, as they are in `kdissect/replay/comparison/rules.toml`. The first rule that
fits a place and allows the difference wins; rules of `--rules FILE` come before these. A difference
that a rule allows makes a verdict *tolerated*; ids that are only called otherwise at the target
(*translated*) leave it *same*. `--strict` leaves only the translated ones and those of `--rules`.

## A file of your own

```toml
format_version = 1

[[rule]]
name = "ours"                     # shown beside each difference that it allows
kind = "tolerance"                # ignore, tolerance, unordered, translated, equal-modulo
path = "api_keys[].max_version"   # a name alone: at any depth; [] any index; * any part of a name
apis = ["ApiVersions"]            # all, where left out
absolute = 2                      # or relative = 0.1
why = "An upgrade by two versions is fine."
```

The kinds, and the fields that go with them:

- **ignore**: any difference there or below; of `topics[]`, that one side has no such element.
- **tolerance**: numbers that differ by no more than `absolute`, or the share `relative` of the
  captured one.
- **unordered**: elements of an array in another order. `key` names the fields that tell elements
  apart; of `a|b` the first that has a value.
- **translated**: what the target calls the captured thing. `as` is one of {translations}.
- **equal-modulo**: values that mean the same. `modulo = "presence"`: both set, or both null, empty
  or -1; `modulo = "text"` with a `pattern` that is cut out; `classes`, lists of equal values;
  `captured` and `answered`, what may become what; `whole = true`: the rest of the struct goes with
  it, and is not compared.

Any rule may have `where = {{ field = "regular expression" }}`, which looks at fields of the same
struct; `foreign = "topic" | "group" | "transactional_id"`, for elements that the capture's requests
do not name; `several_brokers = true`, for captures or targets with more than one broker;
`racing = true`, for reads of what another request was changing at that moment.

## The built-in rules

"""


MEANING = """## What other differences mean

A difference that no rule allows stays one. Where something is known about it, a note beside it
says so, in every output: the names of error codes; which releases speak a version that the target
does not offer; the texts of this table (`{then}` and `{now}` are the releases of the captured
broker and of the target, told by the versions that they offer); and *may follow from exchange N*,
where an earlier request that changed the same topic, partition, group, transaction or producer was
not taken by the target, or was not sent.

| where | note |
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
    where = f"`{rule.path}`" if rule.path != "*" else "any field of that kind"
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
        parts.append("read while somebody was changing it")
    return ", ".join(parts)


def _number(text: str) -> tuple[int, str]:
    return (int(text) if text.lstrip("-").isdigit() else 0, text)


if __name__ == "__main__":
    OUT.write_text(page(), "utf-8")
