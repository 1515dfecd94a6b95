"""torch, imported by the first use of one of its names.

The settings of an algorithm are fields of its classes, and many commands read settings without computing anything.
Importing torch takes seconds, so the modules of these classes take it from here:

    from covey.lazy import torch
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


class LazyModule(ModuleType):
    """Looks every name up in the module of its own name, which it imports first."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


if TYPE_CHECKING:
    import torch as torch
else:
    torch = LazyModule("torch")
