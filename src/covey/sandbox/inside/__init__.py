"""The code that runs inside a sandbox. `tiers.py` compiles these modules and passes them in a sealed file in memory, so
no folder of Covey is visible to the code a model wrote. They import the standard library only.

    isolation.py  what the first process does: namespaces, limits, filters, then the program
    kernel.py     system calls that Python does not wrap; Landlock and seccomp
    keeper.py     process 1 of a sandbox: reaps, bounds memory, ends everything; starts and ends the cells of a session
    program.py    runs one program, or a session that keeps its state
    calls.py      hidden tests: the process that tests, and the solution's process, which answers its calls
    values.py     plain values to text and back
"""
