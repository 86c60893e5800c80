"""The map of shared prefixes adds up to what the plan saves, and names what is shared."""

import numpy as np
import pytest

from batchrun.plan.prefixes import SharedPrefix, read_prefixes, shared_prefixes


def test_nested_prefixes_are_found_with_their_rows() -> None:
    # Rows 0 to 5 share 4 tokens, of which 0 to 2 share 9 and 4 to 5 share 6; row 6 shares nothing.
    found = shared_prefixes(np.array([9, 9, 4, 4, 6, 0, 0], dtype=np.int32))
    assert found == [
        SharedPrefix(0, 6, 0, 4, 0),
        SharedPrefix(0, 3, 4, 9, 1),
        SharedPrefix(4, 2, 4, 6, 1),
    ]
    assert [prefix.saved_tokens for prefix in found] == [20, 10, 2]


@pytest.mark.parametrize("seed", range(20))
def test_all_prefixes_together_save_what_neighbours_share(seed: int) -> None:
    rng = np.random.default_rng(seed)
    keep_len = rng.integers(0, 7, size=int(rng.integers(1, 63)), dtype=np.int32)
    keep_len[-1] = 0
    found = shared_prefixes(keep_len, most=1000)
    assert sum(prefix.saved_tokens for prefix in found) == keep_len.sum()
    for prefix in found:
        inner = keep_len[prefix.first : prefix.first + prefix.num_rows - 1]
        assert inner.min() == prefix.length > prefix.parent_len


def test_the_ones_that_save_most_are_kept() -> None:
    groups = [np.append(np.full(size, 10 * size), 0) for size in range(1, 12)]
    found = shared_prefixes(np.concatenate(groups).astype(np.int32), most=3)
    assert [prefix.num_rows for prefix in found] == [10, 11, 12]


@pytest.mark.parametrize("keep_len", [[], [0], [0, 0, 0]])
def test_nothing_shared_is_no_prefix(keep_len: list[int]) -> None:
    assert shared_prefixes(np.array(keep_len, dtype=np.int32)) == []


def test_a_plan_without_readable_prefixes_has_none(tmp_path) -> None:
    assert read_prefixes(tmp_path) == []
    (tmp_path / "prefixes.json").write_text('[{"first": 1}]')
    assert read_prefixes(tmp_path) == []
