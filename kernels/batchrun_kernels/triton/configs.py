"""How kernels are cut: a table by architecture, head_dim, dtype and kind of tile. Nothing is tuned when it runs.

Every entry is compiled by the tests: no spills, shared memory within the target. None has been timed on a device.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from batchrun_kernels.contract import UnsupportedError

# "interpreter" is no architecture: small tiles for tensors on the CPU, so that short inputs have many of them.
Architecture = Literal["sm_80", "sm_90", "sm_100", "gfx942", "interpreter"]
Kind = Literal["wide", "narrow"]
KINDS: tuple[Kind, Kind] = ("wide", "narrow")


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of queries by tokens of keys, and how a program runs them."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    # A tile of consecutive blocks is fetched at once, by the tensor memory accelerator; others key by key as ever.
    reads_runs: bool = False


# (architecture, head_dim at most, bytes of a key or value, kind of tile).
TILES: dict[tuple[Architecture, int, int, Kind], Tile] = {
    ("sm_80", 64, 2, "wide"): Tile(64, 64, 4, 2),
    ("sm_80", 64, 2, "narrow"): Tile(16, 64, 4, 3),
    ("sm_80", 128, 2, "wide"): Tile(64, 32, 4, 2),
    ("sm_80", 128, 2, "narrow"): Tile(16, 64, 4, 2),
    ("sm_80", 256, 2, "wide"): Tile(32, 32, 4, 2),
    ("sm_80", 256, 2, "narrow"): Tile(16, 32, 4, 2),
    ("sm_80", 128, 1, "wide"): Tile(64, 32, 4, 2),
    ("sm_80", 128, 1, "narrow"): Tile(16, 64, 4, 2),
    ("sm_80", 128, 4, "wide"): Tile(32, 16, 8, 2),
    ("sm_80", 128, 4, "narrow"): Tile(16, 32, 8, 2),
    ("sm_90", 64, 2, "wide"): Tile(128, 64, 4, 3, reads_runs=True),
    ("sm_90", 64, 2, "narrow"): Tile(16, 64, 4, 3, reads_runs=True),
    ("sm_90", 128, 2, "wide"): Tile(64, 64, 4, 3, reads_runs=True),
    ("sm_90", 128, 2, "narrow"): Tile(16, 64, 4, 3, reads_runs=True),
    ("sm_90", 256, 2, "wide"): Tile(32, 64, 4, 2),
    ("sm_90", 256, 2, "narrow"): Tile(16, 64, 4, 2, reads_runs=True),
    ("sm_90", 128, 1, "wide"): Tile(64, 64, 4, 3),
    ("sm_90", 128, 1, "narrow"): Tile(16, 64, 4, 3),
    ("sm_90", 128, 4, "wide"): Tile(32, 16, 8, 2),
    ("sm_90", 128, 4, "narrow"): Tile(16, 32, 8, 2),
    ("sm_100", 64, 2, "wide"): Tile(128, 64, 4, 3, reads_runs=True),
    ("sm_100", 64, 2, "narrow"): Tile(16, 64, 4, 3, reads_runs=True),
    ("sm_100", 128, 2, "wide"): Tile(64, 64, 4, 3, reads_runs=True),
    ("sm_100", 128, 2, "narrow"): Tile(16, 64, 4, 3, reads_runs=True),
    ("sm_100", 256, 2, "wide"): Tile(32, 64, 4, 2),
    ("sm_100", 256, 2, "narrow"): Tile(16, 64, 4, 2, reads_runs=True),
    ("sm_100", 128, 1, "wide"): Tile(64, 64, 4, 3),
    ("sm_100", 128, 1, "narrow"): Tile(16, 64, 4, 3),
    ("sm_100", 128, 4, "wide"): Tile(32, 16, 8, 2),
    ("sm_100", 128, 4, "narrow"): Tile(16, 32, 8, 2),
    ("gfx942", 64, 2, "wide"): Tile(64, 64, 4, 2),
    ("gfx942", 64, 2, "narrow"): Tile(16, 64, 4, 2),
    ("gfx942", 128, 2, "wide"): Tile(64, 64, 4, 2),
    ("gfx942", 128, 2, "narrow"): Tile(16, 64, 4, 2),
    ("gfx942", 256, 2, "wide"): Tile(32, 32, 4, 2),
    ("gfx942", 256, 2, "narrow"): Tile(16, 32, 4, 2),
    ("gfx942", 128, 1, "wide"): Tile(64, 32, 4, 2),
    ("gfx942", 128, 1, "narrow"): Tile(16, 64, 4, 2),
    ("gfx942", 128, 4, "wide"): Tile(32, 16, 8, 2),
    ("gfx942", 128, 4, "narrow"): Tile(16, 32, 8, 2),
}

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of both kinds."""

    wide: Tile
    narrow: Tile

    def of(self, kind: Kind) -> Tile:
        return self.wide if kind == "wide" else self.narrow

    @property
    def run_len(self) -> int:
        """Keys of a tile that may be fetched at once; 0 where no kind's is, or the kinds differ in their keys."""
        reads_runs = self.wide.reads_runs or self.narrow.reads_runs
        return self.wide.tokens if reads_runs and self.wide.tokens == self.narrow.tokens else 0

    def heads_together(self, group: int) -> int:
        """Of the `group` query heads of a kv head, how many a tile holds beside each other: all, or an equal part."""
        return max(num for num in range(1, min(group, self.narrow.rows) + 1) if group % num == 0)


def tiles(architecture: Architecture, head_dim: int, dtype: torch.dtype) -> Tiles:
    """The entries for keys and values of `dtype`, of the smallest head_dim listed that holds `head_dim`.

    Raises UnsupportedError for what the architecture lacks or the table does not list.
    """
    if dtype not in _DTYPES:
        raise UnsupportedError(f"no attention tile for keys and values in {_name(dtype)}")
    if dtype == torch.float8_e4m3fn and not has_float8(architecture):
        raise UnsupportedError(f"{architecture} has no float8_e4m3fn for keys and values; use int8 or bfloat16")
    if architecture == "interpreter":
        return _INTERPRETED
    size = dtype.itemsize
    fitting = [dim for arch, dim, itemsize, _ in TILES if (arch, itemsize) == (architecture, size) and dim >= head_dim]
    if not fitting:
        raise UnsupportedError(f"no attention tile on {architecture} for head_dim {head_dim} in {_name(dtype)}")
    return Tiles(*(TILES[architecture, min(fitting), size, kind] for kind in KINDS))


_INTERPRETED = Tiles(wide=Tile(32, 16, 4, 2, reads_runs=True), narrow=Tile(16, 16, 4, 2, reads_runs=True))


def has_float8(architecture: Architecture) -> bool:
    """Of the kind e4m3fn; gfx942 has another, and sm_80's tiles serve GPUs that have none."""
    return architecture in ("sm_90", "sm_100", "interpreter")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def architecture(device: torch.device) -> Architecture:
    """The column of the table for a device; raises UnsupportedError for one the table has not."""
    if device.type == "cpu":
        return "interpreter"
    if not torch.cuda.is_available():
        raise UnsupportedError(f"no usable GPU for device {device}")
    if device.type == "cuda" and torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        if name == "gfx942":
            return "gfx942"
        raise UnsupportedError(f"no Triton tiles for {name}; there are sm_80, sm_90, sm_100 and gfx942")
    if device.type == "cuda":
        major = torch.cuda.get_device_capability(device)[0]
        if major in (8, 9, 10):
            return {8: "sm_80", 9: "sm_90", 10: "sm_100"}[major]  # type: ignore[return-value]
        raise UnsupportedError(f"no Triton tiles for sm_{major}x; there are sm_80, sm_90, sm_100 and gfx942")
    raise UnsupportedError(f"no Triton kernels for device {device}")
