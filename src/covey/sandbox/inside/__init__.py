"""The code that runs inside a sandbox. `tiers.py` compiles these modules and passes them in a sealed file in memory, so
no folder of Covey is visible to the code a model wrote. They import the standard library only.

    isolation.py  the first process: sets up namespaces, limits and filters, then runs the program
    kernel.py     system calls that Python does not wrap; Landlock and seccomp
    keeper.py     process 1 of a sandbox: reaps children, limits memory, kills all processes; starts and ends cells
    program.py    runs one program, or a session that keeps its state
    calls.py      hidden tests: the process of the tests, and that of the solution, which answers its calls
    values.py     serializes plain values
"""
