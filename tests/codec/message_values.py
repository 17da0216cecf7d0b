"""Values for any definition: as a hypothesis strategy, and by a seeded generator."""

import random
from uuid import UUID

from hypothesis import strategies as st

from kdissect.protocol.model import Type

INTEGERS = {
    Type.INT8: (-(2**7), 2**7 - 1),
    Type.INT16: (-(2**15), 2**15 - 1),
    Type.UINT16: (0, 2**16 - 1),
    Type.INT32: (-(2**31), 2**31 - 1),
    Type.UINT32: (0, 2**32 - 1),
    Type.INT64: (-(2**63), 2**63 - 1),
}
WORDS = ("orders", "", "клиент", "payments-🚀", "group-1", "a.b\\c", "\u0000é", "member-3f")
TAGS_FREE = 1000  # no definition comes near


def fields_of(fields, version):
    return [field for field in fields if version in field.versions]


# As a strategy

_SCALARS = {
    Type.BOOL: st.booleans(),
    Type.FLOAT64: st.floats(allow_nan=False),
    Type.UUID: st.uuids() | st.just(UUID(int=0)),
    Type.STRING: st.binary(max_size=9).map(lambda data: data.decode("utf-8", "surrogateescape")),
    Type.BYTES: st.binary(max_size=9),
    Type.RECORDS: st.binary(max_size=9),
    **{kind: st.integers(*limits) for kind, limits in INTEGERS.items()},
}


def values(definition, version):
    """A strategy of complete dicts of `definition` in `version`."""
    return _struct(definition.fields, version, version in definition.flexible)


def _struct(fields, version, flexible):
    made = {field.name: _field(field, version, flexible) for field in fields_of(fields, version)}
    if not flexible:
        return st.fixed_dictionaries(made)
    unknown = st.dictionaries(
        st.integers(TAGS_FREE, 2**32 - 1), st.binary(max_size=4), min_size=1, max_size=2
    )
    return st.fixed_dictionaries(made, optional={"_unknown_tags": unknown})


def _field(field, version, flexible):
    if field.type is Type.STRUCT:
        value = _struct(field.fields, version, flexible)
    else:
        value = _SCALARS[field.type]
    if field.is_array:
        value = st.lists(value, max_size=2)
    return st.none() | value if version in field.nullable else value


# By a generator: the same values on every machine


def sample(definition, version, seed):
    """A complete dict of `definition` in `version`; equal seeds give equal values."""
    generator = random.Random(f"{definition.name} {version} {seed}")
    return _sample_struct(definition.fields, version, version in definition.flexible, generator)


def _sample_struct(fields, version, flexible, generator):
    made = {}
    for field in fields_of(fields, version):
        if version in field.nullable and generator.random() < 0.2:
            made[field.name] = None
        elif field.is_array:
            count = generator.choice((0, 1, 2, 2))
            made[field.name] = [
                _sample_value(field, version, flexible, generator) for _ in range(count)
            ]
        else:
            made[field.name] = _sample_value(field, version, flexible, generator)
    if flexible and generator.random() < 0.15:
        made["_unknown_tags"] = {TAGS_FREE + generator.randrange(9): generator.randbytes(3)}
    return made


def _sample_value(field, version, flexible, generator):
    if field.type is Type.STRUCT:
        return _sample_struct(field.fields, version, flexible, generator)
    if field.type in INTEGERS:
        low, high = INTEGERS[field.type]
        return generator.choice((generator.randint(low, high), low, high, generator.randrange(100)))
    if field.type is Type.BOOL:
        return generator.random() < 0.5
    if field.type is Type.FLOAT64:
        return generator.uniform(-1e6, 1e6)
    if field.type is Type.UUID:
        return UUID(bytes=generator.randbytes(16))
    if field.type is Type.STRING:
        return generator.choice(WORDS)
    return generator.randbytes(generator.randrange(12))
