"""What a GPU's loop does beside computing: overlap, padding, replay, lack of memory. The same tokens, without a GPU."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from batchrun.engine.engine import Engine
from batchrun.engine.graphs import StepGraphs
from batchrun.engine.kv_cache import KVCache
from batchrun.engine.model import Model
from batchrun.engine.policies import Schedule
from batchrun.engine.queues import AtOnce, Queues
from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.runner import TorchRunner
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.shard import Shard
from batchrun.engine.swap import HostPool
from batchrun.engine.workspace import measure_workspace
from batchrun.errors import EngineFailed
from batchrun_kernels import Mask, Work
from batchrun_kernels.cpu import GatherAttention, GatherPlan
from tests.device.tiny_families import VOCAB, make_model

BLOCK = 4
EOS = 7


@dataclass
class ReplayablePlan:
    inner: GatherPlan

    @property
    def shape(self) -> int:
        """Steps are alike by the power of two above their longest context, as a work list's buckets would be."""
        return max(item.kv_len for item in self.inner.items).bit_length()

    def refill(self, other: "ReplayablePlan") -> None:
        assert self.shape == other.shape
        self.inner = other.inner


class ReplayableAttention(GatherAttention):
    """Torch's attention, with plans that can be refilled."""

    supports_graphs = True

    def plan(self, work: Work) -> Any:
        return ReplayablePlan(super().plan(work))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, plan: Any, mask: Mask) -> Tensor:
        return super().attend(q, keys, values, plan.inner, mask)


class Recorder:
    """Replays by calling again what was recorded, into the memory of the first result."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        result = work().clone()

        def replay() -> None:
            self.num_replays += 1
            result.copy_(work())

        return result, replay


class Hungry:
    """A module that has memory for so many tokens at once."""

    def __init__(self, module: Any, at_most: int, error: Exception | None = None) -> None:
        self._module = module
        self._at_most = at_most
        self._error = error or torch.OutOfMemoryError("no memory")

    def __call__(self, **arguments: Any) -> Any:
        if arguments["input_ids"].numel() > self._at_most:
            raise self._error
        return self._module(**arguments)


def altered(model: Model, module: Any) -> Model:
    """The model with another module that computes its logits."""
    other = copy(model)
    other._module, other.greedy_head = module, None
    return other


@pytest.fixture(scope="module")
def model() -> Model:
    adopted = Model.adopt(make_model("llama", seed=5, head_dim=8))
    adopted.attention = ReplayableAttention()
    return adopted


def make_runner(model: Model, num_blocks: int, *, overlaps: bool, record: Recorder | None = None) -> TorchRunner:
    cache = KVCache(num_blocks + 1, BLOCK, model.attention, model.place)
    for index, layer in model.kv_layers.items():
        cache.allocate(index, layer)
        for tensor in (cache.pools[index].keys, cache.pools[index].values):
            tensor.fill_(torch.nan)
    queues, graphs = Queues(AtOnce(), AtOnce()), None
    if record is not None:
        graphs = StepGraphs(lambda *step: model.forward_planned(cache, *step), record, num_blocks * BLOCK)
    host = HostPool(cache, 20, queues)
    shard = Shard(model, cache, host, num_blocks=num_blocks, queues=queues, graphs=graphs)
    runner = TorchRunner(shard, (EOS,))
    runner.overlaps = overlaps
    return runner


def run(runner: TorchRunner, requests: list[Request], **options: Any) -> tuple[dict[int, tuple[int, ...]], Engine]:
    settings: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 16} | options
    config = SchedulerConfig(
        num_blocks=runner.num_blocks,
        num_host_slots=runner.num_host_slots,
        block_size=BLOCK,
        block_bytes=runner.block_bytes,
        eos_token_ids=frozenset({EOS}),
        **settings,
    )
    engine = Engine(config, runner, decode=lambda ids: "".join(chr(97 + token % 26) for token in ids.tolist()))
    for request in requests:
        engine.add(request)
    found = {}
    while engine.has_work:
        found |= {done.row_idx: done.token_ids for done in engine.step()}
        engine.check()
    return found, engine


def make_requests(seed: int) -> list[Request]:
    """Of all kinds: greedy, drawn, with penalties, ending by length, end of text or stop string; prefixes shared."""
    random = np.random.default_rng(seed)
    stem = random.integers(8, VOCAB, 11).tolist()
    requests = []
    for row in range(14):
        own = random.integers(8, VOCAB, int(random.integers(1, 14))).tolist()
        sampling = SamplingParams(
            max_tokens=18 if row == seed else int(random.integers(1, 20)),
            temperature=float(random.choice([0.0, 0.0, 1.5])),
            top_p=float(random.choice([1.0, 0.8])),
            frequency_penalty=1.9 if row == seed else 0.0,
            min_tokens=int(random.integers(0, 3)),
            stop=("a",) if row % 3 == 0 else (),
            seed=3,
        )
        tokens = np.array([*(stem if row < 9 else []), *own], np.int32)
        requests.append(Request(row, tokens, sampling, keep_len=11 if row < 8 else 0))
    return requests


@pytest.mark.parametrize("way", ["overlapped", "replayed", "both"])
@pytest.mark.parametrize("seed", range(4))
def test_the_tokens_are_those_of_the_plain_loop(model: Model, seed: int, way: str) -> None:
    """A small pool, so that rows are preempted while their tokens are pending."""
    requests, record = make_requests(seed), Recorder()
    plain, _ = run(make_runner(model, 60, overlaps=False), requests)
    runner = make_runner(model, 12, overlaps=way != "replayed", record=record if way != "overlapped" else None)
    found, engine = run(runner, requests, preemption="swap" if seed % 2 else "recompute")
    assert found == plain
    assert len(found) == len(requests)
    assert engine.statistics().counters.preemptions > 0
    assert (record.num_replays > 0) == (way != "overlapped")


@pytest.mark.parametrize("schedule", get_args(Schedule))
@pytest.mark.parametrize("seed", range(2))
def test_no_schedule_changes_a_token(model: Model, seed: int, schedule: Schedule) -> None:
    """Nor does where it cuts prompts, in a pool with hardly any room."""
    requests = make_requests(seed)
    plain, _ = run(make_runner(model, 60, overlaps=False), requests, max_num_batched_tokens=500)
    options = {"schedule": schedule, "chunk_alignment_tokens": 3, "max_num_batched_tokens": 7}
    found, _ = run(make_runner(model, 12, overlaps=True), requests, **options)
    assert found == plain


def test_a_model_that_cannot_be_recorded_runs_without(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing")

    requests = make_requests(9)
    plain, _ = run(make_runner(model, 60, overlaps=False), requests)
    found, _ = run(make_runner(model, 60, overlaps=True, record=refuse), requests)  # type: ignore[arg-type]
    assert found == plain
    assert [record.message for record in caplog.records].count(caplog.records[-1].message) == 1
    assert "decoding slower: operation not permitted" in caplog.text


OUT_OF_MEMORY = (
    torch.OutOfMemoryError("no memory"),
    MemoryError("Unable to allocate 8.00 PiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    ),
)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_without_the_memory_is_computed_in_halves_and_the_next_ones_are_smaller(
    model: Model, overlaps: bool, error: Exception
) -> None:
    """On a CPU too, where rows may have drafts."""
    requests = [replace(one, token_ids=np.tile(one.token_ids[:4], 3)) for one in make_requests(9)]
    plain, _ = run(make_runner(model, 60, overlaps=False), requests, max_num_batched_tokens=64)
    runner = make_runner(model, 60, overlaps=overlaps)
    runner._shard.model = altered(model, Hungry(model._module, 9, error))
    found, engine = run(runner, requests, max_num_batched_tokens=64, num_free_tokens=0 if overlaps else 16)
    assert found == plain
    assert engine.scheduler._budget < 64
    assert bool(engine.statistics().counters.drafted_tokens) is not overlaps


def test_not_even_one_token_ends_the_job_with_the_remedy(model: Model) -> None:
    runner = make_runner(model, 60, overlaps=True)
    runner._shard.model = altered(model, Hungry(model._module, 0))
    with pytest.raises(EngineFailed, match="lower --kv-cache-memory"):
        run(runner, make_requests(9))


@pytest.mark.parametrize("overlaps", [False, True])
def test_logits_that_are_not_finite_end_their_row_with_an_error_and_no_other(model: Model, overlaps: bool) -> None:
    """Though the next step of that row is launched already, without a token to look up."""

    class Broken:
        num_calls = 0

        def __call__(self, **arguments: Any) -> Any:
            output = model._module(**arguments)
            self.num_calls += 1
            if self.num_calls == 3:
                output.logits[0, 1] = torch.nan
            return output

    requests = [replace(one, sampling=SamplingParams(max_tokens=9)) for one in make_requests(9)]
    plain, _ = run(make_runner(model, 60, overlaps=False), requests)
    runner = make_runner(model, 60, overlaps=overlaps)
    runner._shard.model = altered(model, Broken())
    found, engine = run(runner, requests)
    assert len(found) == len(requests)
    (bad,) = [row for row, tokens in found.items() if tokens != plain[row]]
    assert found[bad] == plain[bad][: len(found[bad])]
    assert engine.statistics().kv_usage == 0


def test_the_workspace_is_what_the_largest_step_takes(model: Model) -> None:
    class Meter:
        def start(self) -> None:
            self.seen: list[int] = []
            self.hook = model._module.register_forward_pre_hook(
                lambda _, args, kwargs: self.seen.append(kwargs["input_ids"].numel()), with_kwargs=True
            )

        def peak(self) -> int:
            self.hook.remove()
            return 12345

    meter = Meter()
    assert measure_workspace(model, 37, 5, BLOCK, meter) == 12345
    assert meter.seen == [37]
