"""Plan order against obvious code: sort, count equal leading tokens, group equal rows."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchrun.plan import order as order_module
from batchrun.plan.order import Order, OrderedRows, shared_lengths
from batchrun.plan.runs import ExternalSort

Row = tuple[list[int], str | None]
tokens = st.lists(st.integers(0, 3) | st.sampled_from([255, 256, 65535, 2**31 - 2]), min_size=1, max_size=60)
params = st.sampled_from([None, '{"a":1}', '{"a":12}', "é"])
# Rows that extend one another, so that long prefixes and duplicates are common.
rows = st.lists(tokens, min_size=1, max_size=4).flatmap(
    lambda roots: st.lists(
        st.tuples(st.builds(lambda root, end: root + end, st.sampled_from(roots), st.just([]) | tokens), params),
        max_size=40,
    )
)


def common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def obvious(given_rows: list[Row], foldable: set[str | None]) -> list[tuple[object, ...]]:
    """(row_idx, tokens, keep_len, params, duplicates) of each row in plan order."""
    order = sorted(range(len(given_rows)), key=lambda row: (given_rows[row][0], given_rows[row][1] or "", row))
    groups: list[list[int]] = []
    for row in order:
        if groups and given_rows[row] == given_rows[groups[-1][0]] and given_rows[row][1] in foldable:
            groups[-1].append(row)
        else:
            groups.append([row])
    following = [*(given_rows[group[0]][0] for group in groups[1:]), []][: len(groups)]
    return [
        (group[0], given_rows[group[0]][0], common(given_rows[group[0]][0], after), given_rows[group[0]][1], group[1:])
        for group, after in zip(groups, following, strict=True)
    ]


def listed(batches: list[OrderedRows]) -> list[tuple[object, ...]]:
    return [
        (
            int(batch.row_idx[i]),
            batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].tolist(),
            int(batch.keep_len[i]),
            batch.params[i],
            batch.duplicates[i].tolist(),
        )
        for batch in batches
        for i in range(len(batch.row_idx))
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows, st.sampled_from([200, 3000, 1 << 20]), st.sampled_from([3, 500]), st.sampled_from([{None, "é"}, set()]))
def test_order_sharing_and_folding_are_those_of_the_obvious_code(
    tmp_path: Path, given_rows: list[Row], memory_bytes: int, batch_words: int, foldable: set[str | None]
) -> None:
    """However little memory there is, so that runs spill and groups cross batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "_BATCH_WORDS", batch_words)
        order = Order(tmp_path, memory_bytes, slice_bytes=memory_bytes // 8)
        for start in range(0, len(given_rows), 7):
            part = given_rows[start : start + 7]
            ids = [np.array(ids, dtype=np.int32) for ids, _ in part]
            order.add(np.arange(start, start + len(part)), ids, [params for _, params in part])
        assert listed(list(order.sorted(lambda each: each in foldable))) == obvious(given_rows, foldable)


@given(st.lists(tokens, min_size=1, max_size=20))
def test_shared_lengths_are_those_counted_one_by_one(lists: list[list[int]]) -> None:
    flat = np.array([token for ids in lists for token in ids], dtype=np.int32)
    offsets = np.cumsum([0, *map(len, lists)])
    expected = [common(a, b) for a, b in itertools.pairwise(lists)]
    assert shared_lengths(flat, offsets).tolist() == expected


@pytest.mark.parametrize("shared", [0, 1, 15, 16, 17, 47, 48, 49, 4999, 5000])
def test_long_rows_share_exactly_what_is_equal(shared: int) -> None:
    """Around the borders of the windows that are compared, and beside short rows."""
    first = np.arange(5000)
    second = np.where(np.arange(5001) < shared, np.arange(5001), 9999)
    lists = [np.array([7]), first, second, np.array([0, 1])]
    offsets = np.cumsum([0, *map(len, lists)])
    got = shared_lengths(np.concatenate(lists).astype(np.int32), offsets).tolist()
    assert got == [0, shared, 0 if shared == 0 else min(shared, 2)]


def test_skewed_lengths_do_not_take_rows_times_longest(tmp_path: Path) -> None:
    """One row of 2 million tokens among 2,000 of three: a padded comparison would take 16 GB."""
    lists = [np.array([1, 2, row], dtype=np.int32) for row in range(2000)]
    long = np.concatenate([[1, 2], np.arange(2_000_000)]).astype(np.int32)
    order = Order(tmp_path)
    order.add(np.arange(2001), [*lists, long], [None] * 2001)
    rows = listed(list(order.sorted(lambda _: True)))
    assert [row[0] for row in rows] == [0, 2000, *range(1, 2000)]
    assert [row[2] for row in rows] == [3, *[2] * 1999, 0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=50), max_size=100), st.integers(1, 4000))
def test_external_sort_is_a_sort(tmp_path: Path, records: list[bytes], memory_bytes: int) -> None:
    sorter = ExternalSort(tmp_path, memory_bytes, slice_bytes=memory_bytes // 8)
    for start in range(0, len(records), 13):
        sorter.add(records[start : start + 13])
    assert [record for part in sorter.drain() for record in part] == sorted(records)


def test_runs_are_merged_a_slice_at_a_time(tmp_path: Path) -> None:
    """What the merge holds does not grow with what there is to sort."""
    sorter = ExternalSort(tmp_path, memory_bytes=64 << 10, slice_bytes=128)
    records = [number.to_bytes(64, "big") for number in np.random.default_rng(7).permutation(20_000).tolist()]
    for start in range(0, len(records), 100):
        sorter.add(records[start : start + 100])
    parts = list(sorter.drain())
    assert len(list(tmp_path.iterdir())) > 20
    assert [record for part in parts for record in part] == sorted(records)
    assert max(map(len, parts)) < 200
