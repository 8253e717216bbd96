"""What an op is: the signature that every variant of it (reference, CPU, GPU) must fit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arg:
    """One argument or result. `shape` names its dimensions: ("rows", "width")."""

    name: str
    shape: tuple[str, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Tolerance:
    """How far a float32 variant may be from the reference: |a - b| <= absolute + relative * |b|."""

    absolute: float
    relative: float


@dataclass(frozen=True)
class Op:
    """A named operation on matrices of float32 rows.

    `arguments` come in the order of a plan's inputs and weights; `parameters` are plain numbers.
    A row of the result depends on the same row of the arguments alone (attention: and on the
    keys and values of its own sequence).
    """

    name: str
    arguments: tuple[Arg, ...]
    result: Arg
    tolerance: Tolerance
    parameters: tuple[str, ...] = ()
