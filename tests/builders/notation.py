"""A definition with each word of the notation, as the packaged files are written."""

EXAMPLE = """\
# A note about it.
# And another.
api 99 Invented

request: versions 0-7, flexible 4+, unstable 7
  name: string? 0+ = null @topicName
  legacy: string 0-3 null 2-3
  size_max: int64 3+ = 0x7fffffffffffffff
  on: bool 1+ = true
  label: string 0+ = "some words"
  id: int32 0+ key plain
  epoch: int32 4+ tag 0 = -1 @brokerId
  late: [int32]? 4+ tag 1 5+ = null
  cursor: Cursor? 6+ = null
    at: uuid 6+

response: versions 0-8
  results: [Result] 0+
  others: [Result]? 2+

struct Result
  code: int16 0+
"""
