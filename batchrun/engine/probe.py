"""What a module computes, found out by feeding it random numbers and comparing; its class and name say nothing.

Every answer is None or () where the module did anything else: raised, had hooks, returned something unequal.
"""

from dataclasses import dataclass
from inspect import signature
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from batchrun_kernels.elementwise import Activation, activated, reference_rms_norm

_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")
# Of the largest value: what sums of another order differ by at most, and a different formula does not.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.004}


@dataclass(frozen=True, slots=True)
class Linear:
    """The module computes x @ weight.T + bias, with the parameter or, where `is_transposed`, its transpose."""

    parameter: nn.Parameter
    bias: nn.Parameter | None
    is_transposed: bool

    @property
    def weight(self) -> Tensor:
        """[num_outputs, k], a view of the parameter."""
        return self.parameter.detach().T if self.is_transposed else self.parameter.detach()


@dataclass(frozen=True, slots=True)
class Norm:
    """The module computes x / sqrt(mean of squares + eps) * weight."""

    weight: Tensor  # float32 [n]
    eps: float


@dataclass(frozen=True, slots=True)
class Glu:
    """The module computes down(activation(gates(x)) * ups(x)); `inner` are its linear children, by their names.

    `inner` is (gate, up, down), or (gate_up, down) when one module gives the gates before the ups.
    """

    inner: tuple[str, ...]
    activation: Activation


def probe_linear(module: nn.Module) -> Linear | None:
    parameters = _own_parameters(module)
    weight, bias = parameters.pop("weight", None), parameters.pop("bias", None)
    if weight is None or parameters or weight.dim() != 2:
        return None
    for found in (Linear(weight, bias, is_transposed=False), Linear(weight, bias, is_transposed=True)):
        if bias is not None and bias.shape != found.weight.shape[:1]:
            continue
        x = _inputs(weight, found.weight.shape[1])
        if _all_equal(_output(module, x), linear(x, found.weight, bias)):
            return found
    return None


def probe_embedding(module: nn.Module) -> float | None:
    """The factor by which the module multiplies the rows of its `weight` that it looks up."""
    parameters = _own_parameters(module)
    weight = parameters.pop("weight", None)
    if weight is None or parameters or weight.dim() != 2:
        return None
    ids = torch.tensor([[0, len(weight) // 2, len(weight) - 1]], device=weight.device)
    found, rows = _output(module, ids), weight.detach()[ids]
    if found is None or found.shape != rows.shape:
        return None
    largest = rows.abs().argmax()
    factor = float(found.flatten()[largest] / rows.flatten()[largest])
    for rounded in (factor, float(round(factor))):
        if torch.equal(found, rows * rounded):
            return rounded
    return None


def probe_norm(module: nn.Module) -> Norm | None:
    parameters = _own_parameters(module)
    if len(signature(module.forward).parameters) > 1:  # a gate, for one
        return None
    if len(parameters) != 1 or (weight := next(iter(parameters.values())).detach()).dim() != 1:
        return None
    # Small inputs, where eps shows, and large ones with a mean, which a norm of another kind would subtract.
    x = torch.cat([_inputs(weight, len(weight)) * scale + scale for scale in (1e-3, 1.0)])
    for eps in [value for value in vars(module).values() if isinstance(value, float)]:
        for scaled in (weight.float(), weight.float() + 1):
            if _all_equal(_output(module, x), reference_rms_norm(x, scaled, eps)):
                return Norm(scaled, eps)
    return None


def probe_glu(module: nn.Module, linears: dict[str, Linear]) -> Glu | None:
    """`linears`: the children that are linear, by name; all children with parameters must be among them."""
    with_parameters = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    if with_parameters != set(linears) or any(True for _ in module.parameters(recurse=False)) or has_hooks(module):
        return None
    for order in permutations(linears):
        weights = [linears[name].weight for name in order]
        if len(order) == 3:
            fits = weights[0].shape == weights[1].shape and weights[2].shape[1] == weights[0].shape[0]
        else:
            fits = len(order) == 2 and weights[0].shape[0] == 2 * weights[1].shape[1]
        if not fits:
            continue
        x = _inputs(weights[0], weights[0].shape[1])
        for candidate in [Glu(order, activation) for activation in _ACTIVATIONS]:
            if _all_equal(_output(module, x), _glu(candidate, linears, x)):
                return candidate
    return None


def _glu(glu: Glu, linears: dict[str, Linear], x: Tensor) -> Tensor:
    *gates_and_ups, down = [linears[name] for name in glu.inner]
    both = torch.cat([linear(x, one.weight, one.bias) for one in gates_and_ups], dim=-1)
    gate, up = both.chunk(2, dim=-1)
    return linear(activated(gate, glu.activation) * up, down.weight, down.bias)


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A leaf's parameters; none of a module that is not one, or whose calls others listen to."""
    parameters = dict(module.named_parameters(recurse=False))
    plain = all(one.dtype in _TOLERANCES for one in parameters.values())
    return parameters if plain and not any(True for _ in module.children()) and not has_hooks(module) else {}


def has_hooks(module: Any) -> bool:
    """Whether others listen to calls of the module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _inputs(like: Tensor, width: int) -> Tensor:
    """[2, 3, width] as `like`: numbers of the usual size, and of a size at which a clamp would act."""
    x = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(width)).to(like)
    return torch.cat((x, x * 50))


def _output(module: nn.Module, x: Tensor) -> Tensor | None:
    try:
        with torch.no_grad():
            out: Any = module(x)
    except Exception:
        # Whatever a module of an unknown kind raises for a plain tensor: it is not of the kind in question.
        return None
    if not isinstance(out, Tensor) or (x.is_floating_point() and out.dtype != x.dtype):
        return None
    return out


def _all_equal(found: Tensor | None, expected: Tensor) -> bool:
    """Whether what was found for each of several inputs `equals` what is expected for it."""
    return found is not None and found.shape == expected.shape and all(map(equals, found, expected))


def equals(found: Tensor | None, expected: Tensor) -> bool:
    """Whether the two differ by no more than sums of another order do."""
    if found is None or found.shape != expected.shape:
        return False
    error, largest = (found.double() - expected.double()).abs().max(), expected.double().abs().max()
    return bool(error <= _TOLERANCES[found.dtype] * largest)
