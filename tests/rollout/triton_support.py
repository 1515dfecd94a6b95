"""Whether Triton kernels can run here, and on which device."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
CAN_RUN_TRITON = importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or INTERPRETED)

needs_triton = pytest.mark.skipif(not CAN_RUN_TRITON, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
