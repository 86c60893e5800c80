"""A weight rounded to 8 bits, an output's numbers by one scale, and what can be computed from it in C.

The rows that it is multiplied with are rounded to 8 bits too, every 32 numbers of a row by a scale of their own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from batchrun_kernels import native

_WIDTH = 16
_LARGEST = 127
# As many as GROUP in c/native.c.
_GROUP = 32
# Integers are packed without a sign: as much more than they are.
_ZERO = 128
# Groups of none but smaller numbers are zero.
_SMALLEST = 1e-30


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [num_outputs, k] as panels of 16 outputs and fours of k; numbers behind the last of both are zero."""

    panels: Tensor  # uint8 [ceil(num_outputs / 16), 8 * ceil(k / 32), 16, 4], 128 for zero
    scales: Tensor  # float32 [16 * ceil(num_outputs / 16)], a unit's worth in each output
    num_outputs: int
    k: int

    @classmethod
    def pack(
        cls,
        *weights: Tensor,  # float32 [..., k] each, on the CPU
    ) -> "Int8Weight":
        """Rounds to the nearest of 255 steps between an output's largest number and its negative.

        The weights' outputs are one after another. What `unpack` gives is packed to the same bits again.
        """
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        assert weight.dtype == torch.float32, weight.dtype
        assert weight.device.type == "cpu", weight.device
        num_outputs, k = weight.shape
        weight = pad(weight.detach(), (0, -k % _GROUP, 0, -num_outputs % _WIDTH))
        scales = _short(weight.abs().amax(dim=1) / _LARGEST)
        # An output of zeros has no scale; any will do.
        integers = (weight / torch.where(scales == 0, 1.0, scales)[:, None]).round_().add_(_ZERO).to(torch.uint8)
        panels = integers.view(-1, _WIDTH, weight.shape[1] // 4, 4).transpose(1, 2).contiguous()
        return cls(panels, scales, num_outputs, k)

    @property
    def place(self) -> Tensor:
        """An empty tensor of the dtype of what is multiplied, on the weight's device."""
        return self.scales.new_empty(0)

    def unpack(self) -> Tensor:
        """float32 [num_outputs, k], the rounded weight."""
        return self.rows(torch.arange(self.num_outputs))

    def rows(
        self,
        ids: Tensor,  # int64 [...], below num_outputs
    ) -> Tensor:
        """float32 [..., k]: rows of the rounded weight, as an embedding looks them up."""
        integers = self.panels[ids // _WIDTH, :, ids % _WIDTH].flatten(-2)[..., : self.k]
        rows: Tensor = integers.float().sub_(_ZERO).mul_(self.scales[ids][..., None])
        return rows

    def linear(
        self,
        x: Tensor,  # float32 [..., k]
        bias: Tensor | None,  # float32 [num_outputs]
    ) -> Tensor:
        """float32 [..., num_outputs]: `round_rows(x)` times the rounded weight.

        A row's bits do not depend on the rows beside it, nor on the threads.
        """
        assert x.dtype == torch.float32, x.dtype
        assert x.shape[-1] == self.k, f"rows of {x.shape[-1]} for a weight of {self.k}"
        assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()), "a bias is contiguous float32"
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.num_outputs)
        library, num_rows = native.needed(), x.numel() // self.k
        rounded = x.new_empty(library.batchrun_rounded_size(num_rows, self.k))
        library.batchrun_gemm_int8(
            x.data_ptr(),
            self.panels.data_ptr(),
            self.scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            num_rows,
            self.num_outputs,
            self.k,
            rounded.data_ptr(),
        )
        return y


def round_rows(
    x: Tensor,  # float32 [..., k]
) -> Tensor:
    """float32 [..., k]: what a product with an `Int8Weight` rounds its rows to, in plain torch.

    Every 32 numbers become multiples of a 127th of their largest, the nearest, and halves the even one.
    """
    *rows, k = x.shape
    groups = pad(x, (0, -k % _GROUP)).reshape(*rows, -(-k // _GROUP), _GROUP)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    factors = torch.where(largest < _SMALLEST, 0.0, _LARGEST / largest)
    # In float64, where the product with the factor has all its digits.
    integers = (groups.double() * factors).round().float()
    rounded: Tensor = integers * (largest * (1 / _LARGEST))
    return rounded.flatten(-2)[..., :k]


def _short(
    scales: Tensor,  # float32 [...], not negative
) -> Tensor:
    """Rounded up to 16 bits of mantissa, so that 127 times a scale is exact."""
    return ((scales.view(torch.int32) + 0xFF) & ~0xFF).view(torch.float32)
