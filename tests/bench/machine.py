"""The description of a made machine, for pages of made results."""

MACHINE = {
    "date": "2026-01-02", "commit": "abc1234",
    "load": 0.5, "processor": "a processor", "core_count": 2,
    "memory_gb": 8,
    "system": "Linux 6", "python": "3.11", "java": "17", "tshark": None, "pyspark": "4",
    "pyarrow": "22", "numpy": "2", "numba": "0", "cramjam": "2", "crc32c": "2",
}  # fmt: skip
