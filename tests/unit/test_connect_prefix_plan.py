"""Which blocks move: groups, windows, chunks, set-backs."""

from collections.abc import Sequence

from hypothesis import given, strategies as st

from kvtide.connect.prefix_plan import (
    Claim,
    Geometry,
    Group,
    Move,
    PrefixPlan,
    Task,
)

ONE = Geometry((Group(4),), hash_tokens=4, unit_tokens=4)
MIXED = Geometry((Group(8), Group(4, window_tokens=8)), hash_tokens=4, unit_tokens=8)
ME = Claim("t")


def hashes(count: int) -> list[bytes]:
    return [b"h%d" % i for i in range(count)]


class Pool:
    """What each group has in the pool, by name."""

    def __init__(self, *groups: Sequence[bytes]) -> None:
        self.groups = [set(group) for group in groups]

    def hits(self, group: int, names: Sequence[bytes]) -> int:
        for count, name in enumerate(names):
            if name not in self.groups[group]:
                return count
        return len(names)


def test_a_hit_is_a_prefix_of_whole_blocks_after_what_is_there() -> None:
    chain = hashes(5)
    pool = Pool([*chain[:3], chain[4]])
    assert ONE.hit_tokens(chain, 0, 20, pool.hits) == 12
    assert ONE.hit_tokens(chain, 4, 20, pool.hits) == 8
    assert ONE.hit_tokens(chain, 12, 20, pool.hits) == 0
    # the last token is always computed: seven of eight tokens are one block
    assert ONE.hit_tokens(chain, 0, 7, pool.hits) == 4
    assert ONE.hit_tokens(chain[:1], 0, 20, pool.hits) == 4
    assert ONE.hit_tokens([], 0, 20, pool.hits) == 0


def test_a_window_must_be_whole_only_at_the_end_of_the_hit() -> None:
    chain = hashes(8)
    whole = chain[1::2]  # a block of eight tokens is named by its last hash
    assert MIXED.hit_tokens(chain, 0, 32, Pool(whole, chain[6:]).hits) == 32
    assert MIXED.hit_tokens(chain, 0, 32, Pool(whole, chain[7:]).hits) == 0
    # a hole at the end: a shorter hit whose window is whole
    assert MIXED.hit_tokens(chain, 0, 32, Pool(whole, chain[2:7]).hits) == 24
    assert MIXED.hit_tokens(chain, 0, 32, Pool(whole[:2], chain).hits) == 16
    assert MIXED.hit_tokens(chain, 0, 32, Pool([], chain).hits) == 0


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.integers(0, 60))
def test_a_hit_is_aligned_and_within_its_limit(
    whole: int, window: int, computed: int, limit: int
) -> None:
    chain = hashes(12)
    pool = Pool(chain[1::2][:whole], chain[:window])
    start = computed // 2 * 8
    found = MIXED.hit_tokens(chain, start, limit, pool.hits)
    assert found % 8 == 0
    assert found == 0 or start + found <= min(limit, whole * 8, 48)


def test_a_load_names_the_blocks_after_the_local_hit() -> None:
    plan = PrefixPlan(ONE)
    plan.allocated("r", ME, hashes(4), [[11, 12, 13, 14]], (4, 12))
    expected = Task("r", ME, (Move(0, (12, 13), (b"h1", b"h2")),))
    assert plan.take_loads() == (expected,)
    assert plan.take_loads() == ()


def test_a_load_leaves_out_what_its_window_has_left() -> None:
    plan = PrefixPlan(MIXED)
    tables = [[5, 6, 7, 8], [0, 0, 0, 0, 0, 0, 21, 22]]
    plan.allocated("r", ME, hashes(8), tables, (0, 32))
    (task,) = plan.take_loads()
    assert task.moves == (
        Move(0, (5, 6, 7, 8), (b"h1", b"h3", b"h5", b"h7")),
        Move(1, (21, 22), (b"h6", b"h7")),
    )


def test_each_block_is_saved_once_when_it_is_full_and_named() -> None:
    plan = PrefixPlan(ONE)
    names = hashes(2)
    plan.allocated("r", ME, names, [[11, 12]], (0, 0))
    plan.begins("r", [[11, 12]], 0)
    assert plan.computes("r", 0, 6) == Task("r", ME, (Move(0, (11,), (b"h0",)),))
    assert plan.computes("r", 6, 8) == Task("r", ME, (Move(0, (12,), (b"h1",)),))
    plan.grows("r", [[13]])
    assert plan.computes("r", 8, 11) is None
    # full, but the engine has not hashed it yet
    assert plan.computes("r", 11, 12) is None
    names.append(b"h2")
    assert plan.computes("r", 12, 13) == Task("r", ME, (Move(0, (13,), (b"h2",)),))


def test_what_was_loaded_is_not_saved_and_what_was_not_is_saved_again() -> None:
    plan = PrefixPlan(ONE)
    plan.allocated("r", ME, hashes(4), [[11, 12, 13, 14]], (0, 12))
    # block 13 could not be had: vLLM begins after the second one
    plan.begins("r", [[11, 12, 13, 14]], 8)
    assert plan.computes("r", 8, 15) == Task("r", ME, (Move(0, (13,), (b"h2",)),))
    # set back once more, to the first one
    assert plan.computes("r", 4, 8) == Task("r", ME, (Move(0, (12,), (b"h1",)),))


def test_the_finished_move_nothing() -> None:
    plan = PrefixPlan(ONE)
    plan.allocated("r", ME, hashes(4), [[11, 12, 13, 14]], (0, 12))
    plan.finished("r")
    assert plan.take_loads() == ()
    plan.begins("r", [[11]], 0)
    assert plan.computes("r", 0, 4) is None
    assert len(plan) == 0
    only_loads = PrefixPlan(ONE, saves=False)
    only_loads.allocated("r", ME, hashes(1), [[11]], (0, 0))
    only_loads.begins("r", [[11]], 0)
    assert only_loads.computes("r", 0, 4) is None


def test_the_disowned_save_nothing_until_they_begin_anew() -> None:
    plan = PrefixPlan(ONE)
    plan.allocated("r", ME, hashes(4), [[11, 12, 13, 14]], (0, 4))
    plan.begins("r", [[11, 12, 13, 14]], 4)
    plan.disown()
    # what the engine waits for is still loaded
    assert len(plan.take_loads()) == 1
    assert plan.computes("r", 4, 16) is None
    assert plan.handed_over("r") is None
    other = Claim("t", salt="other")
    plan.allocated("r", other, hashes(4), [[11, 12, 13, 14]], (0, 0))
    plan.begins("r", [[11, 12, 13, 14]], 0)
    moves = (Move(0, (11, 12, 13), (b"h0", b"h1", b"h2")),)
    assert plan.computes("r", 0, 12) == Task("r", other, moves)
