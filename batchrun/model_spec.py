"""What the planner and the engine need to know of a model before any weight is loaded."""

from dataclasses import dataclass

# Kinds of layers that keep a state of a sequence, and no keys and values: short convolutions and recurrences.
STATE_LAYERS = frozenset({"conv", "linear_attention"})


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts read from a model's configuration.

    `digest` identifies weights and tokenizer in a job's fingerprint. `kv_layers` counts the layers that
    store keys and values, each `num_kv_heads` x `head_dim`. `has_states`: others keep a state of the sequence.
    """

    name: str
    architecture: str
    kv_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    digest: str
    hidden_size: int = 0
    has_states: bool = False

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values one token occupies: 2 x layers x kv_heads x head_dim x element_bytes."""
        return 2 * self.kv_layers * self.num_kv_heads * self.head_dim * element_bytes
