"""llama.cpp with prefixes shared by hand: what all prompts begin with once, then some rows' own prompts in a batch,
then the choices of these rows in another, each in a sequence that goes on from a copy of what it begins with.

The model is a GGUF file, which the option `gguf` names; whether its values are those of the others is a matter of its
type.
"""

import time
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchrun_jobs.bench_score.contract import GivenChoices, Scored


def run(given: "GivenChoices") -> "Scored":
    import llama_cpp

    llama_cpp.llama_backend_init()
    options = given["options"]
    model = llama_cpp.llama_model_load_from_file(options["gguf"].encode(), llama_cpp.llama_model_default_params())
    assert model, f"{options['gguf']!r} is no GGUF file: llama.cpp:gguf=FILE"
    tree = _Tree(llama_cpp, model, given, options["rows_at_once"], options["max_num_batched_tokens"])
    began = time.monotonic()
    logprobs = tree.score()
    return {"began": began, "ended": time.monotonic(), "logprobs": logprobs, "computed_tokens": tree.num_computed}


class _Tree:
    """Sequence 0 has the common beginning, the next ones a row each, the others a choice each."""

    def __init__(self, llama: Any, model: Any, given: "GivenChoices", rows_at_once: int, budget: int) -> None:
        self._llama = llama
        self._prompts, self._choices = given["prompt_ids"], given["choice_ids"]
        self._rows_at_once = rows_at_once
        pairs = zip(min(self._prompts)[:-1], max(self._prompts)[:-1], strict=False)
        self._common = [token for token, other in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        num_choices = max(map(len, self._choices))
        params = llama.llama_context_default_params()
        params.n_seq_max = 1 + rows_at_once * (1 + num_choices)
        longest = max(map(len, self._prompts)) + sum(map(len, max(self._choices, key=lambda own: sum(map(len, own)))))
        params.n_ctx = -(-(len(self._common) + rows_at_once * longest) // 256) * 256
        params.n_batch = params.n_ubatch = max(budget, rows_at_once * longest)
        params.n_threads = params.n_threads_batch = given["threads"]
        params.kv_unified = True
        self._context = llama.llama_init_from_model(model, params)
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(params.n_batch, 0, 1)
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._budget = budget
        self.num_computed = 0

    def score(self) -> list[list[float]]:
        for first in range(0, len(self._common), self._budget):
            for at, token in enumerate(self._common[first : first + self._budget], first):
                self._add(token, at, 0, is_read=False)
            self._compute()
        found: list[list[float]] = []
        for first in range(0, len(self._prompts), self._rows_at_once):
            found += self._some(range(first, min(first + self._rows_at_once, len(self._prompts))))
        return found

    def _some(self, rows: range) -> list[list[float]]:
        ends = []
        for sequence, row in enumerate(rows, 1):
            self._copy(0, sequence, len(self._common))
            prompt = self._prompts[row]
            for at in range(len(self._common), len(prompt)):
                place = self._add(prompt[at], at, sequence, is_read=at == len(prompt) - 1)
            ends.append(place)
        self._compute()
        sums = []
        for row, place in zip(rows, ends, strict=True):
            logprobs = self._logprobs(place)
            sums.append([float(logprobs[choice[0]]) for choice in self._choices[row]])
        asked, sequence = [], len(rows)
        for at, row in enumerate(rows):
            length = len(self._prompts[row])
            for which, choice in enumerate(self._choices[row]):
                sequence += 1
                self._copy(1 + at, sequence, length)
                for offset, (token, following) in enumerate(pairwise(choice)):
                    place = self._add(token, length + offset, sequence, is_read=True)
                    asked.append((at, which, place, following))
        self._compute()
        for at, which, place, following in asked:
            sums[at][which] += float(self._logprobs(place)[following])
        for used in range(1, sequence + 1):
            self._llama.llama_memory_seq_rm(self._memory, used, -1, -1)
        return sums

    def _add(self, token: int, position: int, sequence: int, *, is_read: bool) -> int:
        batch = self._batch
        place: int = batch.n_tokens
        batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, position, 1
        batch.seq_id[place][0], batch.logits[place] = sequence, is_read
        batch.n_tokens += 1
        return place

    def _compute(self) -> None:
        if self._batch.n_tokens and (code := self._llama.llama_decode(self._context, self._batch)):
            raise RuntimeError(f"llama_decode: {code}")
        self.num_computed += self._batch.n_tokens
        self._batch.n_tokens = 0

    def _copy(self, source: int, target: int, length: int) -> None:
        self._llama.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def _logprobs(self, place: int) -> Any:
        import numpy as np

        logits = self._llama.llama_get_logits_ith(self._context, place)
        values = np.ctypeslib.as_array(logits, shape=(self._vocab,)).astype(np.float64)
        values -= values.max()
        return values - np.log(np.exp(values).sum())
