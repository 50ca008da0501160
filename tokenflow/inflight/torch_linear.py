"""Linear layers with weights laid out once for the CPU's matrix kernels.

Owns the choice between oneDNN's packed layout and torch's plain one. Packing spares the reordering
of a weight matrix at every call, and with it a row of the result does not depend on how many rows
are computed beside it, which is what keeps a sequence's numbers independent of its neighbours.

The packing operators are private to torch. They are therefore probed with a small product; where
they are missing or wrong the plain layout is used, with a warning.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch.nn.functional import linear

logger = logging.getLogger(__name__)

_ROWS_HINT = 8
"""Rows that the packed layout is optimised for: a typical decode batch."""


class PackedLinear(torch.nn.Module):
    """y = x W^T + b with W [out, in] in the packed layout. The plain weight is not kept."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out], in the dtype of the weight."""
        alone = x.numel() == x.shape[-1]
        if alone:
            # A single row takes a matrix-vector kernel, which sums in another order.
            x = x.expand(*x.shape[:-2], 2, x.shape[-1]).contiguous()
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return y[..., :1, :] if alone else y


class PlainLinear(torch.nn.Module):
    """y = x W^T + b with W [out, in] as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self._weight = weight
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        return linear(x, self._weight, self._bias)


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None
) -> PackedLinear | PlainLinear:
    """The fastest layer for this device: packed on a CPU that can, plain elsewhere."""
    if weight.device.type == "cpu" and _packing_works(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def pack_linears(model: torch.nn.Module) -> int:
    """Replace every torch.nn.Linear below `model` in place; returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, make_linear(child.weight, child.bias))
                count += 1
    return count


@functools.cache
def _packing_works(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 64), (96, 64), (96,))
    )
    try:
        with torch.inference_mode():
            result = PackedLinear(weight, bias)(x).double()
    # What torch raises for an operator it has lost, renamed, or built without a CPU kernel.
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.warning("packed %s linears are not available, steps are slower: %s", dtype, error)
        return False
    x, weight, bias = x.double(), weight.double(), bias.double()
    distance = (result - (x @ weight.T + bias)).abs()
    if bool(
        (distance > 4 * torch.finfo(dtype).eps * (x.abs() @ weight.abs().T + bias.abs())).any()
    ):
        logger.warning("packed %s linears are wrong here, steps are slower without", dtype)
        return False
    return True
