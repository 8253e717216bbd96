"""What a worker does for the machine's sake before it touches a model. Linux only; elsewhere it does nothing.

End of file on the socket ends a worker too; this covers one that cannot read it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
OOM_SCORE = "500"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    To be called after exec; `parent` is the process id of who started it. ChildProcessError if it is gone.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        raise ChildProcessError("the daemon is gone")


def offer_to_oom_killer() -> None:
    """When memory runs out, this process is to go before the daemon and the user's other programs."""
    try:
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE, "ascii")
    except OSError:
        return
