"""Values for any definition, as a hypothesis strategy."""

from uuid import UUID

from hypothesis import strategies as st

from kdissect.protocol.model import Type

INTEGERS = {
    Type.INT8: (-(2**7), 2**7 - 1),
    Type.INT16: (-(2**15), 2**15 - 1),
    Type.UINT16: (0, 2**16 - 1),
    Type.INT32: (-(2**31), 2**31 - 1),
    Type.INT64: (-(2**63), 2**63 - 1),
}
TAGS_FREE = 1000  # no definition comes near


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
    present = [field for field in fields if version in field.versions]
    made = {field.name: _field(field, version, flexible) for field in present}
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
