"""Independent oracles: slow, plain Python that says what the kernels' results must be.

Each is another algorithm over other data structures, not a copy of the kernel's branches.
"""
