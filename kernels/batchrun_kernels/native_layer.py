"""A whole decoder layer in one call of the C library: Python between the kernels would cost a third of a small step.

What it computes, and in which order, is what the kernels called one by one compute, bit by bit.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from batchrun_kernels import native
from batchrun_kernels.contract import KVPool, Mask
from batchrun_kernels.elementwise import Activation
from batchrun_kernels.native_attention import NativePlan, is_half
from batchrun_kernels.packed import PANEL, PackedWeight
from batchrun_kernels.packed_int8 import Int8Weight


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """x / sqrt(mean of squares + eps) * weight."""

    weight: Tensor  # float32 [n]
    eps: float


@dataclass(frozen=True, slots=True)
class LayerLinear:
    """x @ weight.T + bias."""

    weight: PackedWeight | Int8Weight
    bias: Tensor | None  # float32 [num_outputs]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """h = x + after_attention(out(attention(qkv(norm(x))))), and h + after_mlp(down(glu(gate_up(before_mlp(h))))).

    `qkv` gives all queries, all keys and all values of a token. Heads of queries and keys are normalised where there
    are norms for it and then turned.
    """

    norm: LayerNorm
    qkv: LayerLinear
    q_norm: LayerNorm | None
    k_norm: LayerNorm | None
    out: LayerLinear
    after_attention: LayerNorm | None
    before_mlp: LayerNorm
    gate_up: LayerLinear
    down: LayerLinear
    activation: Activation
    after_mlp: LayerNorm | None
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    mask: Mask


class _Weight(ctypes.Structure):
    """struct weight in c/native.c."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_long),
        ("k", ctypes.c_long),
    )


class _Norm(ctypes.Structure):
    """struct norm in c/native.c."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))


class _Layer(ctypes.Structure):
    """struct layer in c/native.c."""

    _fields_ = (
        ("norm", _Norm),
        ("q_norm", _Norm),
        ("k_norm", _Norm),
        ("after_attention", _Norm),
        ("before_mlp", _Norm),
        ("after_mlp", _Norm),
        ("qkv", _Weight),
        ("out", _Weight),
        ("gate_up", _Weight),
        ("down", _Weight),
        ("sinks", ctypes.c_void_p),
        ("heads", ctypes.c_long),
        ("kv_heads", ctypes.c_long),
        ("key_dim", ctypes.c_long),
        ("value_dim", ctypes.c_long),
        ("window", ctypes.c_long),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("is_gelu", ctypes.c_int),
    )


class _Pass(ctypes.Structure):
    """struct pass in c/native.c."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("sources", ctypes.c_void_p),
        ("targets", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("q_lens", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("tokens", ctypes.c_long),
        ("num_wanted", ctypes.c_long),
        ("turned", ctypes.c_long),
        ("copies", ctypes.c_long),
        ("items", ctypes.c_long),
        ("table_width", ctypes.c_long),
        ("block_size", ctypes.c_long),
        ("half", ctypes.c_int),
    )


class Scratch:
    """Memory for intermediate results, which the layers of a model use one after another; it only grows."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def of(self, num_floats: int) -> Tensor:
        """float32 [at least num_floats], not initialised."""
        if self._memory.numel() < num_floats:
            self._memory = torch.empty(num_floats)
        return self._memory


class NativeLayer:
    """A layer with its weights, ready to be called."""

    def __init__(self, spec: LayerSpec, scratch: Scratch) -> None:
        mask = spec.mask
        self.spec = spec
        self._scratch = scratch
        self._sinks = None if mask.sinks is None else mask.sinks.float().contiguous()
        self._layer = _Layer(
            norm=_norm(spec.norm),
            q_norm=_norm(spec.q_norm),
            k_norm=_norm(spec.k_norm),
            after_attention=_norm(spec.after_attention),
            before_mlp=_norm(spec.before_mlp),
            after_mlp=_norm(spec.after_mlp),
            qkv=_weight(spec.qkv),
            out=_weight(spec.out),
            gate_up=_weight(spec.gate_up),
            down=_weight(spec.down),
            sinks=None if self._sinks is None else self._sinks.data_ptr(),
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            window=mask.window or 0,
            scale=mask.scale,
            softcap=mask.softcap or 0.0,
            is_gelu=spec.activation == "gelu_tanh",
        )
        self._address = ctypes.byref(self._layer)

    @property
    def _num_queries(self) -> int:
        return self.spec.num_heads * self.spec.key_dim

    @property
    def mask(self) -> Mask:
        return self.spec.mask

    def __call__(
        self,
        x: Tensor,  # float32 [num_tokens, width]
        cos: Tensor,  # float32 [num_tokens, turned]
        sin: Tensor,  # float32 [num_tokens, turned]
        pool: KVPool,  # as `ColumnKeys` makes it
        slots: Tensor,  # int64 [num_tokens]
        copies: tuple[Tensor, Tensor],  # int64 [num_copies], sources and targets
        plan: NativePlan,
        wanted: Tensor | None = None,  # int64 [num_wanted], tokens; None: all
    ) -> Tensor:
        """float32 [num_tokens, width]; the step's keys and values are in their slots, and slots are copied.

        Before the first wanted token of an item the result is zero, and behind it right: behind their keys and values
        nothing more is computed of the other tokens.
        """
        spec, library = self.spec, native.needed()
        num_tokens, turned = cos.shape
        assert x.shape == (num_tokens, spec.out.weight.num_outputs), f"{tuple(x.shape)}, {tuple(cos.shape)}"
        assert x.dtype == cos.dtype == sin.dtype == torch.float32, f"{x.dtype}, {cos.dtype}, {sin.dtype}"
        assert sin.shape == cos.shape, f"{tuple(sin.shape)}, {tuple(cos.shape)}"
        assert turned <= spec.key_dim, f"angles {tuple(cos.shape)} for heads of {spec.key_dim}"
        assert turned % 2 == 0, f"{turned} numbers of a head have no halves"
        assert len(slots) == plan.num_tokens == num_tokens, f"{len(slots)} slots, {plan.num_tokens}, {num_tokens}"
        _, kv_heads, block_size, value_dim = pool.values.shape
        shape = (spec.num_kv_heads, plan.block_size, spec.value_dim)
        assert (kv_heads, block_size, value_dim) == shape, pool.values.shape
        assert pool.keys.shape[1:] == (kv_heads, spec.key_dim, block_size), pool.keys.shape
        x, cos, sin, slots = x.contiguous(), cos.contiguous(), sin.contiguous(), slots.contiguous()
        sources, targets = copies[0].contiguous(), copies[1].contiguous()
        # Queries are apart from keys and values where those begin with a panel.
        narrow = plan.narrowed(wanted) if wanted is not None and self._num_queries % PANEL == 0 else None
        plan = plan if narrow is None else narrow.plan
        y = torch.empty_like(x)
        scratch = self._scratch.of(library.batchrun_layer_scratch(self._address, num_tokens))
        arguments = _Pass(
            x=x.data_ptr(),
            y=y.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=slots.data_ptr(),
            wanted=None if narrow is None else narrow.tokens.data_ptr(),
            sources=sources.data_ptr(),
            targets=targets.data_ptr(),
            keys=pool.keys.data_ptr(),
            values=pool.values.data_ptr(),
            q_lens=plan.q_lens.data_ptr(),
            kv_lens=plan.kv_lens.data_ptr(),
            table=plan.block_table.data_ptr(),
            scratch=scratch.data_ptr(),
            tokens=num_tokens,
            num_wanted=0 if narrow is None else len(narrow.tokens),
            turned=turned,
            copies=len(sources),
            items=len(plan.q_lens),
            table_width=plan.block_table.shape[1],
            block_size=block_size,
            half=is_half(pool.keys, pool.values),
        )
        library.batchrun_layer(self._address, ctypes.byref(arguments))
        return y


def _norm(norm: LayerNorm | None) -> _Norm:
    if norm is None:
        return _Norm()
    assert norm.weight.dtype == torch.float32, norm.weight.dtype
    assert norm.weight.is_contiguous(), "a weight is contiguous"
    return _Norm(norm.weight.data_ptr(), norm.eps)


def _weight(linear: LayerLinear) -> _Weight:
    weight, bias = linear.weight, linear.bias
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()), "a bias is contiguous float32"
    scales = weight.scales.data_ptr() if isinstance(weight, Int8Weight) else None
    where = weight.panels.data_ptr(), scales, None if bias is None else bias.data_ptr()
    return _Weight(*where, weight.num_outputs, weight.k)
