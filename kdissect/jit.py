"""Compiles kernels: the decorators, their options, and loads of big-endian integers.

``KDISSECT_NO_JIT=1`` runs every kernel as plain Python (slow; for debugging and coverage).
``KDISSECT_BOUNDSCHECK=1`` compiles with checks of array bounds (for fuzzing). Kernels take 1-D
arrays of exact dtypes, so that each compiles once; `kernel_cache` keeps the machine code on disk.

The ``load_*`` functions read unaligned big-endian integers from an address, and ``read_*`` from an
array at a position. ``store_*`` write an integer to an address in the machine's byte order, and
``copy_bytes`` copies between addresses. None checks bounds: the caller must compare lengths first.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from llvmlite.ir import IntType, IRBuilder, Value
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import infer_global
from numba.extending import intrinsic
from numba.types import Type

from .kernel_cache import KernelCache

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing import Signature

JIT_ENABLED = os.environ.get("KDISSECT_NO_JIT", "") not in ("1", "true")
BOUNDSCHECK = os.environ.get("KDISSECT_BOUNDSCHECK", "") in ("1", "true")

Function = TypeVar("Function", bound=Callable[..., Any])
int64: Any = np.int64  # for kernels: mypy distinguishes it from int, Numba does not
Args = Sequence[Value]
Typed = tuple["Signature", Callable[..., Value]]  # of an intrinsic
Load = Callable[[int | np.uint64], int]
Read = Callable[[npt.NDArray[np.uint8], int], int]
Store = Callable[[int, int], None]


def kernel(function: Function) -> Function:
    """Compile an entry point: cached on disk, without the GIL, integers signed or unsigned as
    written.

    It uses its caller's arrays only: it cannot create arrays (that does not compile) or return
    them. So references to arrays are not counted. Numba would count them atomically in every
    helper, which takes longer than the work in a loop over packets or frames.
    """
    return _compiled(function, counts=False)


def making_kernel(function: Function) -> Function:
    """Compile a `kernel` that may create arrays and return them."""
    return _compiled(function, counts=True)


def _compiled(function: Function, counts: bool) -> Function:
    if not JIT_ENABLED:
        return function
    compiled = _dispatcher(function, _nrt=counts)
    if function.__closure__ is None:  # a closure depends on more than its modules' sources
        compiled._cache = KernelCache(compiled.py_func, f"boundscheck={BOUNDSCHECK} nrt={counts}")
    cached: Function = compiled
    return cached


_helpers: list[object] = []  # keeps them alive, because types.Dispatcher does not


def inlined(function: Function) -> Function:
    """Mark a small helper of kernels: LLVM may inline it into its callers.

    Like a `kernel`, it cannot create or return arrays.
    """
    return _helper(function, forceinline=False, _nrt=False)


def part(function: Function) -> Function:
    """Mark a named part of one kernel: LLVM always inlines it, whatever its length.

    A call would pass arrays and results through memory, which takes longer than the few
    instructions of a part that run. A helper with several callers is `inlined` or a `kernel`.
    """
    return _helper(function, forceinline=True, _nrt=False)


def making_part(function: Function) -> Function:
    """Mark a `part` of a `making_kernel` that may create arrays and return them."""
    return _helper(function, forceinline=True, _nrt=True)


def _helper(function: Function, **options: bool) -> Function:
    if JIT_ENABLED:
        # Kernels call the compiled helper; Python calls the function itself. Numba's
        # `register_jitable` would search its templates for the helper in each caller.
        compiled = _dispatcher(function, no_cpython_wrapper=True, **options)
        infer_global(function, types.Dispatcher(compiled))
        _helpers.append(compiled)
    return function


def _dispatcher(function: Function, **options: bool) -> Any:
    """Return Numba's dispatcher of a function, for arguments without literal types."""
    compiled = numba.njit(
        nogil=True, error_model="numpy", boundscheck=BOUNDSCHECK, no_cfunc_wrapper=True, **options
    )(function)
    call_template = compiled.get_call_template

    def plain_call_template(args: tuple[Type, ...], kws: object) -> object:
        return call_template(tuple(types.unliteral(kind) for kind in args), kws)

    # otherwise Numba compiles a function again for each constant that a kernel passes to it
    compiled.get_call_template = plain_call_template
    return compiled


def _loaded(builder: IRBuilder, pointer: Value, bits: int) -> Value:
    kind = IntType(bits)
    value = builder.load(builder.bitcast(pointer, kind.as_pointer()))
    value.align = 1
    return builder.bswap(value) if bits > 8 else value


def _address_load(bits: int, result: Type) -> Load:
    def typed(typingctx: object, address: Type) -> Typed:
        def codegen(context: BaseContext, builder: IRBuilder, of: Signature, args: Args) -> Value:
            pointer = builder.inttoptr(args[0], IntType(8).as_pointer())
            value = _loaded(builder, pointer, bits)
            wide = IntType(64)
            return builder.zext(value, wide) if bits < 64 else value

        return result(types.uint64), codegen

    return intrinsic(typed)


def _address_store(bits: int) -> Store:
    def typed(typingctx: object, address: Type, value: Type) -> Typed:
        def codegen(context: BaseContext, builder: IRBuilder, of: Signature, args: Args) -> Value:
            kind = IntType(bits)
            pointer = builder.inttoptr(args[0], kind.as_pointer())
            value = builder.trunc(args[1], kind) if bits < 64 else args[1]
            builder.store(value, pointer).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return intrinsic(typed)


def _copy_bytes(typingctx: object, target: Type, source: Type, size: Type) -> Typed:
    def codegen(context: BaseContext, builder: IRBuilder, of: Signature, args: Args) -> Value:
        byte = IntType(8).as_pointer()
        target, source = (builder.inttoptr(place, byte) for place in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _array_load(bits: int, signed: bool) -> Read:
    def typed(typingctx: object, buf: types.Array, pos: Type) -> Typed:
        assert (buf.dtype, buf.ndim, buf.layout) == (types.uint8, 1, "C"), buf

        def codegen(context: BaseContext, builder: IRBuilder, of: Signature, args: Args) -> Value:
            array = context.make_array(of.args[0])(context, builder, args[0])
            pointer = builder.gep(builder.bitcast(array.data, IntType(8).as_pointer()), [args[1]])
            value = _loaded(builder, pointer, bits)
            wide = IntType(64)
            if bits == 64:
                return value
            return builder.sext(value, wide) if signed else builder.zext(value, wide)

        return types.int64(buf, types.int64), codegen

    return intrinsic(typed)


if JIT_ENABLED:
    load_u8 = _address_load(8, types.int64)
    load_u16 = _address_load(16, types.int64)
    load_u32 = _address_load(32, types.int64)
    store_8 = _address_store(8)
    store_16 = _address_store(16)
    store_32 = _address_store(32)
    store_64 = _address_store(64)
    copy_bytes = intrinsic(_copy_bytes)
    read_i8 = _array_load(8, True)
    read_u8 = _array_load(8, False)
    read_i16 = _array_load(16, True)
    read_u16 = _array_load(16, False)
    read_i32 = _array_load(32, True)
    read_u32 = _array_load(32, False)
    read_i64 = _array_load(64, True)
else:

    def _plain_load(size: int) -> Load:
        return lambda address: int.from_bytes(ctypes.string_at(int(address), size), "big")

    def _plain_store(size: int) -> Store:
        def store(address: int, value: int) -> None:
            data = (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, sys.byteorder)
            ctypes.memmove(int(address), data, size)

        return store

    def _plain_read(size: int, signed: bool) -> Read:
        return lambda buf, pos: int.from_bytes(bytes(buf[pos : pos + size]), "big", signed=signed)

    load_u8, load_u16, load_u32 = (_plain_load(size) for size in (1, 2, 4))
    store_8, store_16, store_32, store_64 = (_plain_store(size) for size in (1, 2, 4, 8))
    read_i8, read_i16, read_i32, read_i64 = (_plain_read(size, True) for size in (1, 2, 4, 8))
    read_u8, read_u16, read_u32 = (_plain_read(size, False) for size in (1, 2, 4))

    def copy_bytes(target: int, source: int, size: int) -> None:
        ctypes.memmove(int(target), int(source), int(size))
