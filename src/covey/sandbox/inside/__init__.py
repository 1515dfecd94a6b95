"""What runs on the other side of the wall. `bundle.py` compiles these modules and sends them in through a pipe-like
file, so that no folder of ours is visible to the code a model wrote. They import the standard library only.

    start.py     what the first process does: walls, limits, filters, then the program
    walls.py     namespaces and a root folder of their own (the tier `namespaces`), and the way down from root
    kernel.py    the system calls that Python has no names for
    filters.py   Landlock and seccomp
    keeper.py    process 1 of a sandbox: reaps, watches memory, ends everything
    cells.py     the keeper of a session: when a cell is over, and that nothing runs until the next one
    program.py   one program, or a session that keeps its state
    values.py    plain values as text, and back
    solution.py  a solution that answers calls
    tests.py     hidden tests that call it
"""
