"""The threads that kernels run on: TVM's pool, kept to the processors this process may use.

TVM reads ``TVM_NUM_THREADS`` when a thread first runs a parallel kernel; each thread that runs
networks has a pool of that size to itself. How many of its workers are used can be lowered later.
A process that is forked has none of the workers: the thread that it goes on with, if it has a pool,
would wait for them without end, so it runs kernels alone. Threads that it starts have whole pools.
"""

from __future__ import annotations

import contextlib
import os
import threading

from bnncc.errors import UsageError
from bnncc.options import MAX_THREADS

NUMBER = "TVM_NUM_THREADS"

SPINS = 10_000
"""How often an idle worker looks for work before it sleeps: a few milliseconds, more than lie
between two kernels. TVM's own default keeps a processor busy for a fifth of a second."""

_used = threading.local()
_started = False


def usable_cpus() -> int:
    """Return how many CPUs this process may use."""
    with contextlib.suppress(OSError):
        if affinity := getattr(os, "sched_getaffinity", None):
            return len(affinity(0))
    return os.cpu_count() or 1


def prepare(count: int | None = None) -> int:
    """Choose the size of TVM's pools, before the first network is loaded; later, nothing changes.

    Parameters
    ----------
    count : int, optional
        By default ``TVM_NUM_THREADS`` if set, else the CPUs this process may use, which are also
        the most it can be.

    Returns
    -------
    int
        The size of the pools.

    Raises
    ------
    UsageError
        If `count` is not positive, or more than the pools were made for.
    """
    global _started
    said = os.environ.get(NUMBER, "")
    known = int(said) if said.isdigit() and int(said) else usable_cpus()
    if count is not None and not 0 < count <= MAX_THREADS:
        raise UsageError(f"threads is {count}, outside 1 .. {MAX_THREADS}")
    if _started:
        if count is not None and min(count, usable_cpus()) > known:
            raise UsageError(
                f"TVM already runs with {known} threads, not {count}",
                hint="choose the number before the first network is loaded",
            )
        return known
    _started = True
    size = min(known if count is None else count, usable_cpus())
    os.environ[NUMBER] = str(size)
    # TVM would pin its workers to the fastest cores of the machine, allowed to this process or not.
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", str(SPINS))
    return size


def use(count: int | None) -> int:
    """Have kernels that the calling thread runs from now on use at most `count` threads.

    Parameters
    ----------
    count : int or None
        None for all of the pool.

    Returns
    -------
    int
        How many they use.

    Raises
    ------
    UsageError
        As for `prepare`.
    """
    size = prepare(count)
    wanted = size if count is None else min(count, size)
    if getattr(_used, "forked", False):
        wanted = 1
    if getattr(_used, "count", size) != wanted:
        import tvm

        tvm.get_global_func("runtime.config_threadpool")(1, wanted)
    _used.count = wanted
    return wanted


def _after_fork() -> None:
    if hasattr(_used, "count"):
        _used.forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
