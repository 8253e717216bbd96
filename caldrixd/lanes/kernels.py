"""The compiled code of the CPU lane, from whichever compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The daemon looks at lanes too and starts sooner without it.
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class Kernels:
    """One variant of everything compiled. Every function takes and gives int64 and holds no lock.

    `table` holds kernel addresses in the order of step.layout. `pack_panels` is that of
    linear, `publish_and_run` and `pool_thread` those of the schedule. `bf16_dot` says whether TILE_DOT
    is there; `name` is for people.
    """

    name: str
    table: npt.NDArray[np.int64]
    pack_panels: Callable[..., None]
    publish_and_run: Callable[..., None]
    pool_thread: Callable[..., None]
    bf16_dot: bool
