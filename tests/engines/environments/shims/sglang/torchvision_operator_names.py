"""Declares two operators of torchvision, without kernels. torchvision's own are built for CUDA and
do not load beside a CPU build of torch, and its import needs their names.
"""

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")
LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
