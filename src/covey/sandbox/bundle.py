"""The modules of `inside/`, compiled, with a request: one sealed file in memory that a sandbox starts from.

The sandbox needs no folder of ours, and pays for no compilation. The bytes are marshalled by this interpreter for the
same interpreter, and only ever travel inwards.
"""

from __future__ import annotations

import fcntl
import functools
import marshal
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODULES = ("kernel", "filters", "walls", "keeper", "cells", "program", "values", "solution", "tests", "start")

# Reads the file, makes modules of it and goes to work. It is called again by bubblewrap, hence from the beginning.
BOOT = """
import marshal, os, sys, types
file, stage = int(sys.argv[1]), sys.argv[2]
modules, request = marshal.loads(os.pread(file, os.fstat(file).st_size, 0))
if stage != "down": os.close(file)
for name in ("covey", "covey.sandbox", "covey.sandbox.inside"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, code in modules:
    module = types.ModuleType("covey.sandbox.inside." + name)
    sys.modules[module.__name__] = module
    setattr(sys.modules["covey.sandbox.inside"], name, module)
    exec(code, module.__dict__)
del file, name, code
module.start(stage, request)
"""

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@functools.cache
def _modules() -> tuple[tuple[str, Any], ...]:
    folder = Path(__file__).parent / "inside"
    return tuple(
        (name, compile((folder / f"{name}.py").read_bytes(), f"<sandbox>/{name}.py", "exec", dont_inherit=True))
        for name in MODULES
    )


def packed(request: Mapping[str, Any]) -> int:
    """A descriptor of the sealed file; the caller closes it."""
    needed = {
        "session": {"cells", "program"},
        "solution": {"values", "solution", "program"},
        "tests": {"values", "tests", "program"},
    }
    wanted = needed.get(request["role"], {"program"}) | {"kernel", "filters", "walls", "keeper", "start"}
    chosen = tuple((name, code) for name, code in _modules() if name in wanted)
    return sealed(marshal.dumps((chosen, dict(request))))


def sealed(content: bytes) -> int:
    """A file in memory that nobody can change any more, to be read from its beginning."""
    file = os.memfd_create("covey", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as writer:
        writer.write(content)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
    os.lseek(file, 0, os.SEEK_SET)
    return file
