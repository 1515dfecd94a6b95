"""Calls of user functions that may hang or crash, in processes that can be killed.

A template process is forked before the model is loaded; workers are forked from it on demand, so any function that
exists by then can be called, including closures and functions of a notebook or a file. Arguments and results are
pickled.

    pool = WorkerPool({"score": score})
    value = await pool.call("score", answer, seconds=5)
    async with await pool.session() as session:  # one worker for the whole session
        await session.make("browser", url, seconds=30)  # an object that stays in the worker
        page = await session.method("open", "/", seconds=10)
    pool.close()

    pool.py      assigns workers to calls and sessions
    handle.py    one worker as the pool sees it
    template.py  forks, reaps and kills workers, and keeps the end of their output
    worker.py    the worker process

Why not concurrent.futures: its pools fork from (or import into) a process that has threads and a GPU by then, pickle
the functions, and cannot kill one call at its deadline together with the processes it started.

Code that a model wrote never runs here but in `covey.sandbox`.
"""

from covey.workers.handle import RemoteError, WorkerDied, WorkerError, WorkersGone, WorkerTimeout
from covey.workers.pool import WorkerPool, WorkerSession

__all__ = ["RemoteError", "WorkerDied", "WorkerError", "WorkerPool", "WorkerSession", "WorkerTimeout", "WorkersGone"]
