"""Functions of the user's that may hang or crash, in processes that can be killed.

A template process is forked before the model is loaded; workers are forked from it as they are needed, so any function
that exists by then can be called: closures, a notebook's, those of a file. Arguments and results are pickled.

    pool = WorkerPool({"score": score})
    value = await pool.call("score", answer, seconds=5)
    async with await pool.session() as session:  # one worker for as long as it lasts
        await session.make("browser", url, seconds=30)  # an object that stays there
        page = await session.method("open", "/", seconds=10)
    pool.close()

    pool.py      who gets which worker, and when      template.py  forks, reaps, kills, keeps the last lines printed
    link.py      one worker, seen from here           worker.py    one worker, seen from inside
    frames.py    what travels between them            errors.py    what can go wrong

Code that a model wrote does not belong here: it runs in `covey.sandbox`.
"""

from covey.workers.link import RemoteError, WorkerDied, WorkerError, WorkersGone, WorkerTimeout
from covey.workers.pool import WorkerPool, WorkerSession

__all__ = [
    "RemoteError",
    "WorkerDied",
    "WorkerError",
    "WorkerPool",
    "WorkerSession",
    "WorkerTimeout",
    "WorkersGone",
]
