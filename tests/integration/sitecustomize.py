"""For `make vllm`, which copies it into its environment: lets torchvision be imported beside a CPU build of torch.

The package index has torchvision for CUDA only. Its operators, for boxes in pictures, cannot be loaded then, and
without them it cannot be imported. The image processors that vLLM uses need its other functions. So the operators are
declared here, without a kernel.
"""

import importlib.abc
import sys
from typing import Any

OF_BOXES = ("nms", "qnms")
OTHERS = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
KEPT: list[Any] = []  # a library withdraws its operators when it is deleted


class DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for operator in OF_BOXES:
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for operator in OTHERS:
            library.define(f"{operator}(Tensor x) -> Tensor")
            library.define(f"_{operator}_backward(Tensor x) -> Tensor")
        KEPT.append(library)


sys.meta_path.insert(0, DeclareOperators())
