"""LLVM building blocks for the numba variants: vectors, raw memory, atomics, system calls.

Kernels work on raw addresses (int64): no bounds checks, no wraparound tests, no reference counts.
External symbols are called by name through an intrinsic, so that compiled code can be cached.
"""
