"""A whole decoder layer in one call of the C library: Python between the kernels would cost a third of a small step.

What it computes, and in which order, is what the kernels called one by one compute, bit by bit.
"""

import ctypes
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor

from batchrun_kernels import native
from batchrun_kernels.contract import KVPool, Mask
from batchrun_kernels.elementwise import Activation
from batchrun_kernels.native_attention import Narrowed, NativePlan, is_half
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


class SharedPass:
    """What the layers of a step are called with alike, and memory for their intermediate results, used by one after
    another; it only grows."""

    def __init__(self) -> None:
        self._arguments = _Pass()
        self._given: tuple[object, ...] = ()
        self._read: tuple[Tensor, ...] = ()  # what the arguments point to
        self._memory = torch.empty(0)

    def of(
        self,
        cos: Tensor,  # float32 [1, num_tokens, turned]
        sin: Tensor,  # float32 [1, num_tokens, turned]
        slots: Tensor,  # int64 [num_tokens]
        copies: tuple[Tensor, Tensor],  # int64 [num_copies], sources and targets
        plan: NativePlan,
    ) -> _Pass:
        """Filled in but for what is a layer's own; the same as last time where the very same things are given."""
        given = (cos, sin, slots, *copies, plan)
        if len(self._given) != len(given) or not all(map(is_, given, self._given)):
            self._fill(cos, sin, slots, copies, plan)
            self._given = given
        return self._arguments

    def scratch(self, num_floats: int) -> Tensor:
        """float32 [at least num_floats], not initialised."""
        if self._memory.numel() < num_floats:
            self._memory = torch.empty(num_floats)
        return self._memory

    def _fill(self, cos: Tensor, sin: Tensor, slots: Tensor, copies: tuple[Tensor, Tensor], plan: NativePlan) -> None:
        _, num_tokens, turned = cos.shape
        assert cos.dtype == sin.dtype == torch.float32, f"{cos.dtype}, {sin.dtype}"
        assert sin.shape == cos.shape, f"{tuple(sin.shape)}, {tuple(cos.shape)}"
        assert turned % 2 == 0, f"{turned} numbers of a head have no halves"
        assert len(slots) == plan.num_tokens == num_tokens, f"{len(slots)} slots, {plan.num_tokens}, {num_tokens}"
        self._read = cos, sin, slots, sources, targets = tuple(one.contiguous() for one in (cos, sin, slots, *copies))
        self._arguments = _Pass(
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=slots.data_ptr(),
            sources=sources.data_ptr(),
            targets=targets.data_ptr(),
            q_lens=plan.q_lens.data_ptr(),
            kv_lens=plan.kv_lens.data_ptr(),
            table=plan.block_table.data_ptr(),
            tokens=num_tokens,
            num_wanted=num_tokens,
            turned=turned,
            copies=len(sources),
            items=len(plan.q_lens),
            table_width=plan.block_table.shape[1],
            block_size=plan.block_size,
        )


class NativeLayer:
    """A layer with its weights, ready to be called."""

    def __init__(self, spec: LayerSpec, shared: SharedPass) -> None:
        mask = spec.mask
        self.spec = spec
        self._shared = shared
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
        x: Tensor,  # float32 [1, num_tokens, width]
        cos: Tensor,  # float32 [1, num_tokens, turned]
        sin: Tensor,  # float32 [1, num_tokens, turned]
        pool: KVPool,  # as `ColumnKeys` makes it
        slots: Tensor,  # int64 [num_tokens]
        copies: tuple[Tensor, Tensor],  # int64 [num_copies], sources and targets
        plan: NativePlan,
        wanted: Tensor | None = None,  # int64 [num_wanted], tokens; None: all
    ) -> Tensor:
        """float32 [1, num_tokens, width]; the step's keys and values are in their slots, and slots are copied.

        Before the first wanted token of an item the result is zero, and behind it right: behind their keys and values
        nothing more is computed of the other tokens.
        """
        spec, library, (_, num_tokens, turned) = self.spec, native.needed(), cos.shape
        assert x.shape == (1, num_tokens, spec.out.weight.num_outputs), f"{tuple(x.shape)}, {tuple(cos.shape)}"
        assert x.dtype == torch.float32, x.dtype
        assert turned <= spec.key_dim, f"angles {tuple(cos.shape)} for heads of {spec.key_dim}"
        value_shape = (spec.num_kv_heads, plan.block_size, spec.value_dim)
        assert pool.values.shape[1:] == value_shape, pool.values.shape
        assert pool.keys.shape[1:] == (spec.num_kv_heads, spec.key_dim, plan.block_size), pool.keys.shape
        x, y = x.contiguous(), torch.empty_like(x)
        arguments = self._shared.of(cos, sin, slots, copies, plan)
        # Queries are apart from keys and values where those begin with a panel.
        if wanted is not None and self._num_queries % PANEL == 0:
            narrow = plan.narrowed(wanted)
            arguments = _narrowed(arguments, narrow)
        arguments.x, arguments.y = x.data_ptr(), y.data_ptr()
        arguments.keys, arguments.values = pool.keys.data_ptr(), pool.values.data_ptr()
        arguments.half = is_half(pool.keys, pool.values)
        num_floats = library.batchrun_layer_scratch(self._address, num_tokens)
        arguments.scratch = self._shared.scratch(num_floats).data_ptr()
        library.batchrun_layer(self._address, ctypes.byref(arguments))
        return y


def _narrowed(arguments: _Pass, narrow: Narrowed) -> _Pass:
    """A copy for some of the tokens; it points to what `narrow` holds."""
    copy = _Pass.from_buffer_copy(arguments)
    copy.wanted, copy.num_wanted = narrow.tokens.data_ptr(), len(narrow.tokens)
    copy.q_lens, copy.kv_lens = narrow.plan.q_lens.data_ptr(), narrow.plan.kv_lens.data_ptr()
    copy.table, copy.items = narrow.plan.block_table.data_ptr(), len(narrow.plan.q_lens)
    return copy


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
