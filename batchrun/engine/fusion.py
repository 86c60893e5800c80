"""Puts a device's kernels into a transformers model: what computes a known formula is replaced, nothing else.

A packed weight takes the place of the parameters it was made from: no weight is held twice. `Fusion.undo` gives the
model back as it was, to the bit.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from batchrun.engine.fused import FusedEmbedding, FusedGlu, FusedLinear, FusedNorm, joined_bias
from batchrun.engine.fused_layer import FusedLayer, LayerParts
from batchrun.engine.fused_rotary import fuse_rotary
from batchrun.engine.mapped_weights import MappedWeights
from batchrun.engine.probe import Linear, probe_embedding, probe_glu, probe_linear, probe_norm
from batchrun.engine.probe_layer import Known, probe_layer
from batchrun_kernels.layers import LayerKernels, Weight


@dataclass(frozen=True, slots=True)
class _Packed:
    """The linear's parameter was emptied: it is the outputs `begin ... end` of `weight`."""

    linear: Linear
    weight: Weight
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Replaced:
    parent: nn.Module
    name: str
    original: nn.Module


class Fusion:
    """The model's modules that gave way to fused ones; see `fuse`."""

    def __init__(self, model: nn.Module, kernels: LayerKernels) -> None:
        self._model = model
        self._kernels = kernels
        self._mapped = MappedWeights.find()
        self._packed: list[_Packed] = []
        self._replaced: list[_Replaced] = []
        self._rotary: list[nn.Module] = []

    @property
    def num_replaced(self) -> int:
        return len(self._replaced) + len(self._rotary)

    def undo(self) -> None:
        """The model's own modules are in their places again, with their own weights."""
        for replaced in self._replaced:
            setattr(replaced.parent, replaced.name, replaced.original)
        for packed in self._packed:
            weight = packed.weight.unpack()[packed.begin : packed.end]
            packed.linear.parameter.data = (weight.T if packed.linear.is_transposed else weight).contiguous()
        for module in self._rotary:
            del module.forward
        self._replaced.clear()
        self._packed.clear()
        self._rotary.clear()

    def pack(self, linears: list[Linear]) -> FusedLinear:
        """One module for the outputs of all `linears`, one after another; their parameters are emptied."""
        sizes = [len(linear.weight) for linear in linears]
        weight = self._kernels.pack(*(linear.weight for linear in linears))
        end = 0
        for linear, size in zip(linears, sizes, strict=True):
            begin, end = end, end + size
            self._packed.append(_Packed(linear, weight, begin, end))
            self._mapped.forget(linear.parameter)
            linear.parameter.data = linear.parameter.new_empty(0)
        return FusedLinear(weight, joined_bias([linear.bias for linear in linears], sizes))

    def turn(self) -> None:
        """Rotary positions by the kernel, wherever a module's code is known to use the same."""
        self._rotary += [module for module in self._model.modules() if fuse_rotary(module, self._kernels.rope)]

    def put(self, places: dict[int, nn.Module]) -> None:
        """Every module whose id is in `places` gives way to the one there, wherever it stands in the model."""
        for parent in list(self._model.modules()):
            for name, child in list(parent._modules.items()):
                if child is not None and id(child) in places:
                    self._replaced.append(_Replaced(parent, name, child))
                    setattr(parent, name, places[id(child)])


@dataclass(frozen=True, slots=True)
class _Found:
    """What a model's modules were found to compute, by their ids."""

    modules: tuple[nn.Module, ...]
    linears: dict[int, Linear]  # those whose weights can be packed
    factors: dict[int, float]  # of embeddings
    owners: dict[int, list[nn.Module]]  # by a parameter's id

    @classmethod
    def of(cls, model: nn.Module) -> "_Found":
        modules = tuple(model.modules())
        linears = {id(module): linear for module in modules if (linear := probe_linear(module)) is not None}
        factors = {id(module): factor for module in modules if (factor := probe_embedding(module)) is not None}
        owners = _owners(modules)
        packable = {name: one for name, one in linears.items() if _can_be_packed(one, owners, linears, factors)}
        return cls(modules, packable, factors, owners)

    @property
    def alone(self) -> dict[int, Linear]:
        """The linears whose weights nobody else has."""
        return {name: one for name, one in self.linears.items() if len(self.owners[id(one.parameter)]) == 1}


@torch.inference_mode()
def fuse(model: nn.Module, kernels: LayerKernels) -> Fusion:
    """Replaces in place; a model none of whose modules is known stays as it is."""
    fusion, found = Fusion(model, kernels), _Found.of(model)
    modules, linears, alone = found.modules, dict(found.linears), found.alone
    norms = {
        id(module): FusedNorm(norm.weight, norm.eps, kernels)
        for module in modules
        if id(module) not in linears and (norm := probe_norm(module)) is not None
    }
    layers = _layers(modules, Known(alone, norms), kernels)
    last_layer = _last_of(modules, [layer for layer, _ in layers])
    places: dict[int, nn.Module] = dict(norms)
    for module in modules:
        own = {name: linears[id(child)] for name, child in module.named_children() if id(child) in linears}
        is_alone = all(id(child) in alone for child in module.children() if id(child) in linears)
        if own and is_alone and (glu := probe_glu(module, own)) is not None:
            *gates_and_ups, last = glu.inner
            gate_up = fusion.pack([own[name] for name in gates_and_ups])
            down = fusion.pack([own[last]]) if kernels.packs_all else module.get_submodule(last)
            places[id(module)] = FusedGlu(gate_up, down, glu.activation, kernels)
            for child in module.children():
                linears.pop(id(child), None)
    for layer, parts in layers:
        qkv = fusion.pack([linears.pop(id(module)) for module in parts.qkv])
        out = fusion.pack([linears.pop(id(parts.out))]) if kernels.packs_all else parts.out
        mlp = places.get(id(parts.mlp), parts.mlp)
        parts = replace(parts, qkv=(qkv,), out=out, mlp=mlp, is_last=layer is last_layer)
        places[id(layer)] = FusedLayer(parts, kernels)
    for module in modules:
        if kernels.packs_all and id(module) in linears:
            _pack_with_owners(fusion, linears[id(module)], found, places)
    fusion.put(places)
    fusion.turn()
    return fusion


@torch.inference_mode()
def round_weights(model: nn.Module, kernels: LayerKernels) -> None:
    """Every weight that `fuse` will pack becomes, in place, what it is packed to."""
    mapped = MappedWeights.find()
    for linear in _Found.of(model).linears.values():
        weight = kernels.pack(linear.weight).unpack()
        mapped.forget(linear.parameter)
        linear.parameter.data = (weight.T if linear.is_transposed else weight).contiguous()


@contextmanager
def rounded_rows(model: nn.Module, kernels: LayerKernels) -> Iterator[None]:
    """Meanwhile every weight that `fuse` will pack is multiplied with rows rounded as the kernels round them."""
    linears = _Found.of(model).linears
    hooks = [
        module.register_forward_pre_hook(lambda _, args: (kernels.round_rows(args[0]), *args[1:]))
        for module in model.modules()
        if id(module) in linears
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _layers(modules: tuple[nn.Module, ...], known: Known, kernels: LayerKernels) -> list[tuple[nn.Module, LayerParts]]:
    """What is known to be a decoder layer, and its parts; a layer stands in a list of them."""
    members = [member for module in modules if isinstance(module, nn.ModuleList) for member in module]
    found = [(member, probe_layer(member, known, kernels)) for member in members]
    return [(member, parts) for member, parts in found if parts is not None]


def _last_of(modules: tuple[nn.Module, ...], layers: list[nn.Module]) -> nn.Module | None:
    """The layer that no other comes behind: at the end of the only list that has layers."""
    known = {id(layer) for layer in layers}
    lists = [one for one in modules if isinstance(one, nn.ModuleList) and any(id(member) in known for member in one)]
    last = lists[0][-1] if len(lists) == 1 else None
    return last if id(last) in known else None


def _owners(modules: tuple[nn.Module, ...]) -> dict[int, list[nn.Module]]:
    """The modules that hold each parameter, by the parameter's id: more than one where weights are tied."""
    owners = defaultdict(list)
    for module in modules:
        for parameter in module._parameters.values():
            owners[id(parameter)].append(module)
    return owners


def _can_be_packed(
    linear: Linear, shared: dict[int, list[nn.Module]], found: dict[int, Linear], factors: dict[int, float]
) -> bool:
    """Every module that holds the parameter reads it in the same way, or looks up rows of it."""
    return all(
        found[id(owner)].is_transposed == linear.is_transposed
        if id(owner) in found
        else id(owner) in factors and not linear.is_transposed
        for owner in shared[id(linear.parameter)]
    )


def _pack_with_owners(fusion: Fusion, linear: Linear, found: _Found, places: dict[int, nn.Module]) -> None:
    """The linear's weight, once for all that hold it."""
    owners = found.owners[id(linear.parameter)]
    if id(owners[0]) in places:
        return
    fused = fusion.pack([linear])
    for owner in owners:
        if id(owner) in found.factors:
            places[id(owner)] = FusedEmbedding(fused.packed, found.factors[id(owner)])
        else:
            bias = owner._parameters.get("bias")
            places[id(owner)] = FusedLinear(fused.packed, None if bias is None else bias.detach())
