"""Which models can be divided among several ranks, as far as a configuration tells. Reads no weights."""

from math import gcd
from pathlib import Path
from typing import Any

from batchrun.errors import ModelUnavailable
from batchrun.model_spec import STATE_LAYERS
from batchrun.quiet import quiet_transformers


def require_divisible(folder: Path, num_ranks: int, *, trust_remote_code: bool) -> None:
    """Raises ModelUnavailable, naming the architecture, when a model cannot be divided among so many ranks."""
    from transformers import AutoConfig

    with quiet_transformers():
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    text = config.get_text_config(decoder=True)
    name = (config.architectures or [type(config).__name__])[0]
    if not getattr(text, "base_model_tp_plan", None):
        raise ModelUnavailable(f"transformers has no plan for dividing {name}; leave out --tensor-parallel")
    if STATE_LAYERS & set(getattr(text, "layer_types", None) or ()):
        raise ModelUnavailable(f"{name} keeps states, which are not divided; leave out --tensor-parallel")
    heads = _heads(text)
    if any(number % num_ranks for number in heads.values()):
        most = gcd(*heads.values())
        possible = [str(number) for number in range(2, most + 1) if most % number == 0]
        remedy = f"--tensor-parallel can be {' or '.join(possible)}" if possible else "leave out --tensor-parallel"
        told = " and ".join(f"{number} {what}" for what, number in heads.items())
        raise ModelUnavailable(f"{name} has {told}, which {num_ranks} ranks cannot share evenly; {remedy}")


def _heads(text: Any) -> dict[str, int]:
    """The numbers of a model's heads, by what they are called."""
    names = {
        "num_attention_heads": "heads of attention",
        "num_key_value_heads": "of keys and values",
        "num_global_key_value_heads": "of keys and values in layers without a window",
    }
    found = {told: getattr(text, name, None) for name, told in names.items()}
    return {told: number for told, number in found.items() if isinstance(number, int)}
