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


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of queries by tokens of keys, and how a program runs them."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


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
    ("sm_90", 64, 2, "wide"): Tile(128, 64, 4, 3),
    ("sm_90", 64, 2, "narrow"): Tile(16, 64, 4, 3),
    ("sm_90", 128, 2, "wide"): Tile(64, 64, 4, 3),
    ("sm_90", 128, 2, "narrow"): Tile(16, 64, 4, 3),
    ("sm_90", 256, 2, "wide"): Tile(32, 64, 4, 2),
    ("sm_90", 256, 2, "narrow"): Tile(16, 64, 4, 2),
    ("sm_90", 128, 1, "wide"): Tile(64, 64, 4, 3),
    ("sm_90", 128, 1, "narrow"): Tile(16, 64, 4, 3),
    ("sm_100", 64, 2, "wide"): Tile(128, 64, 4, 3),
    ("sm_100", 64, 2, "narrow"): Tile(16, 64, 4, 3),
    ("sm_100", 128, 2, "wide"): Tile(64, 64, 4, 3),
    ("sm_100", 128, 2, "narrow"): Tile(16, 64, 4, 3),
    ("sm_100", 256, 2, "wide"): Tile(32, 64, 4, 2),
    ("sm_100", 256, 2, "narrow"): Tile(16, 64, 4, 2),
    ("sm_100", 128, 1, "wide"): Tile(64, 64, 4, 3),
    ("sm_100", 128, 1, "narrow"): Tile(16, 64, 4, 3),
    ("gfx942", 64, 2, "wide"): Tile(64, 64, 4, 2),
    ("gfx942", 64, 2, "narrow"): Tile(16, 64, 4, 2),
    ("gfx942", 128, 2, "wide"): Tile(64, 64, 4, 2),
    ("gfx942", 128, 2, "narrow"): Tile(16, 64, 4, 2),
    ("gfx942", 256, 2, "wide"): Tile(32, 32, 4, 2),
    ("gfx942", 256, 2, "narrow"): Tile(16, 32, 4, 2),
    ("gfx942", 128, 1, "wide"): Tile(64, 32, 4, 2),
    ("gfx942", 128, 1, "narrow"): Tile(16, 64, 4, 2),
}

_INTERPRETED = {"wide": Tile(32, 16, 4, 2), "narrow": Tile(16, 16, 4, 2)}


def tile(architecture: Architecture, head_dim: int, dtype: torch.dtype, kind: Kind) -> Tile:
    """The entry for keys and values of `dtype`, of the smallest head_dim listed that holds `head_dim`.

    float32 is for checks: it takes the tiles of two bytes, whatever they cost.
    """
    if architecture == "interpreter":
        return _INTERPRETED[kind]
    size = min(dtype.itemsize, 2)
    fitting = [dim for arch, dim, itemsize, _ in TILES if (arch, itemsize) == (architecture, size) and dim >= head_dim]
    if not fitting:
        raise UnsupportedError(f"no attention tile on {architecture} for head_dim {head_dim} in {dtype}")
    return TILES[architecture, min(fitting), size, kind]


def architecture(device: torch.device) -> Architecture:
    """The column of the table for a device; raises UnsupportedError for one the table has not."""
    if device.type == "cpu":
        return "interpreter"
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
