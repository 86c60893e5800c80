"""A weight packed once for the C matrix product, and what can be computed from it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from batchrun_kernels import native

# Outputs of a panel.
PANEL = 16


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A float32 weight [num_outputs, k] as panels of 16 outputs; the rows behind the last output are zero."""

    panels: Tensor  # float32 [ceil(num_outputs / 16), k, 16]
    num_outputs: int

    @classmethod
    def pack(
        cls,
        *weights: Tensor,  # float32 [..., k] each, on the CPU
    ) -> "PackedWeight":
        """A copy of them, their outputs one after another; they may be freed."""
        for weight in weights:
            assert weight.dtype == torch.float32, weight.dtype
            assert weight.device.type == "cpu", weight.device
        num_outputs, k = sum(map(len, weights)), weights[0].shape[1]
        panels = torch.empty(-(-num_outputs // PANEL), k, PANEL)
        # Straight to their places, unless a panel has outputs of two weights.
        if any(len(weight) % PANEL for weight in weights[:-1]):
            weights = (torch.cat(weights),)
        begin = 0
        for weight in weights:
            padded = pad(weight.detach(), (0, 0, 0, -len(weight) % PANEL)) if len(weight) % PANEL else weight.detach()
            own = padded.reshape(-1, PANEL, k).transpose(1, 2)
            panels[begin : begin + len(own)] = own
            begin += len(own)
        return cls(panels, num_outputs)

    @property
    def place(self) -> Tensor:
        """An empty tensor of the weight's dtype on its device."""
        return self.panels.new_empty(0)

    @property
    def k(self) -> int:
        return self.panels.shape[1]

    def unpack(self) -> Tensor:
        """float32 [num_outputs, k], the bits that were packed."""
        return self.panels.transpose(1, 2).reshape(-1, self.k)[: self.num_outputs].contiguous()

    def rows(
        self,
        ids: Tensor,  # int64 [...], below num_outputs
    ) -> Tensor:
        """float32 [..., k]: the weight's rows, as an embedding looks them up."""
        rows: Tensor = self.panels[ids // PANEL, :, ids % PANEL]
        return rows

    def linear(
        self,
        x: Tensor,  # float32 [..., k]
        bias: Tensor | None,  # float32 [num_outputs]
    ) -> Tensor:
        """float32 [..., num_outputs]. A row's bits do not depend on the rows beside it, nor on the threads."""
        assert x.dtype == torch.float32, x.dtype
        *rows, k = x.shape
        assert k == self.k, f"rows of {k} for a weight of {self.k}"
        assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()), "a bias is contiguous float32"
        x = x.contiguous()
        y = torch.empty(*rows, self.num_outputs)
        native.needed().batchrun_gemm(
            x.data_ptr(),
            self.panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            x.numel() // k,
            self.num_outputs,
            k,
        )
        return y

    def largest(
        self,
        x: Tensor,  # float32 [num, k]
    ) -> tuple[Tensor, Tensor]:
        """Of each row the largest of what `linear` without a bias gives, float32 [num], and its place, int64 [num].

        Of several the first; NaN where any output is. The outputs themselves are not kept.
        """
        assert x.dtype == torch.float32, x.dtype
        num, k = x.shape
        assert k == self.k, f"rows of {k} for a weight of {self.k}"
        x, library = x.contiguous(), native.needed()
        values, places = torch.empty(num), torch.empty(num, dtype=torch.int64)
        scratch = torch.empty(library.batchrun_best_scratch(num))
        addresses = (tensor.data_ptr() for tensor in (x, self.panels, values, places))
        library.batchrun_gemm_best(*addresses, num, self.num_outputs, k, scratch.data_ptr())
        return values, places


def reference_linear(
    x: Tensor,  # [..., k]
    weight: Tensor,  # [num_outputs, k]
    bias: Tensor | None,  # [num_outputs]
) -> Tensor:
    """The oracle of the tests: float64 [..., num_outputs]."""
    return linear(x.double(), weight.double(), None if bias is None else bias.double())
