"""The prefill line: its order, the sizes of chunks, loads that pay, waiting for others."""

import threading

import pytest
from msgspec import structs
from tests.unit.prefill_world import BLOCK, LIMITS, Shell, ref, slot, work

from kvtide.bus.messages import (
    Cancel,
    HandoverPlan,
    LoadSample,
    PrefillDone,
    RefuseCode,
    WorkAccepted,
    WorkRefused,
)
from kvtide.kv import BlockKey, Located, RequestId
from kvtide.prefill import events
from kvtide.prefill.errors import LoadFellShort
from kvtide.prefill.gate import LoadGate
from kvtide.prefill.limits import PrefillLimits, QueueOrder
from kvtide.prefill.loads import LoadRates, Rest, worth_loading
from kvtide.worker.steps import StepCost


def done_of(shell: Shell, name: str) -> PrefillDone:
    return next(
        one
        for one in shell.of(PrefillDone)
        if isinstance(one, PrefillDone) and one.request == name
    )


def order_of(shell: Shell) -> list[str]:
    """The requests in the order in which they were done."""
    shell.run()
    return [
        one.request for one in shell.of(PrefillDone) if isinstance(one, PrefillDone)
    ]


@pytest.mark.parametrize(
    ("order", "expected"),
    [(QueueOrder.FIRST_COME, "abcd"), (QueueOrder.SLACK, "acbd")],
)
def test_the_order_is_a_policy(order: QueueOrder, expected: str) -> None:
    shell = Shell(PrefillLimits(order=order, batch_tokens=0))
    targets = {"a": 9000.0, "b": 8000.0, "c": 2000.0, "d": None}
    for number, (name, target) in enumerate(targets.items()):
        asked = structs.replace(work(name, 50, prefix=20 * number), ttft_ms=target)
        shell.tell(events.WorkArrived(asked))
        if name == "a":
            shell.finish(ref("a"))  # its step is under way when the others come
    assert "".join(order_of(shell)) == expected


def test_what_cannot_be_done_in_time_is_refused_with_its_own_time() -> None:
    shell = Shell(PrefillLimits(initial_tokens_per_s=100))
    hurried = structs.replace(work("a", 301), deadline_ms=2000)
    shell.tell(events.WorkArrived(hurried))
    refusal = shell.replies[-1]
    assert isinstance(refusal, WorkRefused)
    assert refusal.code is RefuseCode.BUSY
    shell.tell(events.WorkArrived(structs.replace(hurried, deadline_ms=4000)))
    assert isinstance(shell.replies[-1], WorkAccepted)
    assert shell.machine.load().queue_ms == pytest.approx(3000)
    shell.tell(events.WorkArrived(work("b", 51, prefix=30)))
    accepted = shell.replies[-1]
    assert isinstance(accepted, WorkAccepted)
    assert accepted.start_ms == pytest.approx(3000)


def test_what_two_prompts_share_counts_once_in_the_queue() -> None:
    shell = Shell(PrefillLimits(initial_tokens_per_s=100, prepare_ahead=1))
    shell.tell(events.WorkArrived(work("a", 4 * BLOCK + 1)))
    first_ms = shell.machine.load().queue_ms
    shell.tell(events.WorkArrived(work("b", 5 * BLOCK + 1)))
    added_ms = shell.machine.load().queue_ms - first_ms
    assert added_ms == pytest.approx(BLOCK * 10)


def test_chunks_shrink_to_the_target_as_steps_are_measured() -> None:
    shell = Shell(PrefillLimits(step_ms=100, initial_tokens_per_s=1000))
    shell.tell(events.WorkArrived(work("a", 801)))
    shell.finish(ref("a"))
    sizes: list[int] = []
    while shell.step is not None:
        (chunk,) = shell.step.chunks
        size = chunk.end - chunk.start
        sizes.append(size)
        for under_way in list(shell.under_way):
            shell.finish(under_way)
        shell.run_step(ms=2.0 * size)
    assert sum(sizes) == 800
    assert sizes[0] <= 100 + BLOCK
    assert max(sizes[2:]) <= 64, "at 2 ms a token, 50 fit into 100 ms"


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 64, 200])
def test_any_chunk_size_computes_every_token_once(chunk: int) -> None:
    shell = Shell(PrefillLimits(step_tokens=chunk, batch_tokens=0))
    shell.tell(events.WorkArrived(work("a", 101)))
    shell.run()
    assert done_of(shell, "a").computed_tokens == 100


def test_blocks_go_to_the_pool_while_later_chunks_are_computed() -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", 129)))
    shell.finish(ref("a"))
    shell.run_step()
    assert isinstance(shell.under_way[ref("a")], events.Commit)
    assert shell.step is not None, "the next chunk does not wait for it"
    # a prompt that shares only what is committed need not wait for the rest
    shell.finish(ref("a"))
    short = work("b", 4 * BLOCK + 1)
    shell.tell(events.WorkArrived(short))
    assert isinstance(shell.under_way[ref("b")], events.Begin)
    shell.finish(ref("b"), there=4)
    shell.run()
    assert done_of(shell, "b").reused_tokens == 4 * BLOCK


def test_a_late_miss_is_computed_again_from_there() -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", 60, reuse=3)))
    shell.check()
    shell.finish(ref("a"))  # slots come while the bytes are on their way
    assert shell.step is not None
    assert [(one.start, one.end) for one in shell.step.chunks] == [(48, 59)]
    shell.end_load(short=2)
    assert shell.run_step().chunks[0].start == 48  # in vain
    shell.run()
    assert (done_of(shell, "a").reused_tokens, done_of(shell, "a").computed_tokens) == (
        16,
        43,
    )
    (plan,) = shell.of(HandoverPlan)
    assert isinstance(plan, HandoverPlan)
    assert [one.block for one in plan.slots] == [3]


def test_nobody_else_waits_for_a_load() -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", 60, reuse=3)))
    shell.check()
    shell.tell(events.WorkArrived(work("b", 40, prefix=30)))
    shell.finish(ref("b"))
    assert shell.step is not None
    assert [one.ref for one in shell.step.chunks] == [ref("b")]
    shell.finish(ref("a"))
    shell.end_load()
    shell.run_step()
    shell.run()
    assert done_of(shell, "a").reused_tokens == 48


def test_beside_decode_a_load_is_waited_for_without_the_engine() -> None:
    shell = Shell()
    shell.tell(events.EngineShared(shared=True))
    shell.tell(events.WorkArrived(work("a", 60, reuse=3)))
    shell.check()
    shell.finish(ref("a"))
    assert shell.step is None
    shell.end_load()
    assert shell.step is not None
    shell.run()


def test_a_store_that_lets_a_worker_wait_in_vain_counts_as_slow() -> None:
    rates, cost, there = LoadRates(30.0), StepCost(0.0, 1.0), copies(8)
    rest = Rest(0, 8 * BLOCK, BLOCK)
    rates.add((), 0, 0, 1.0, 0.0, short=there[0])  # a miss that was soon known
    assert worth_loading(there, rest, rates, cost, now_s=1.0, overlap=False) == 8
    rates.add((), 0, 0, 10_000.0, 0.0, short=there[0])
    assert worth_loading(there, rest, rates, cost, now_s=1.0, overlap=False) == 0
    assert rates.last is None
    assert rates.tokens.per_s == 0


def test_a_load_in_vain_is_measured() -> None:
    shell = Shell()
    shell.tell(events.WorkArrived(work("a", 60, reuse=3)))
    shell.end_load(short=3, ms=10_000)
    shell.run()
    shell.tell(events.WorkArrived(work("b", 60, reuse=3)))
    assert not any(one.ref == ref("b") for one in shell.loads)  # computed at once
    shell.run()
    assert done_of(shell, "b").reused_tokens == 0


def copies(count: int) -> tuple[Located, ...]:
    keys = work("a", count * BLOCK).keys
    return tuple(Located(key, slot(i), i) for i, key in enumerate(keys))


@pytest.mark.parametrize(
    ("ms_a_block", "overlap", "expected"),
    [
        (0.0, False, 8),  # nothing measured: a load is tried
        (1.0, False, 8),
        (1.0, True, 8),
        (40.0, False, 0),  # a block is computed in 16 ms
        (40.0, True, 3),  # load of 3 beside compute of 7: 120 and 112
    ],
)
def test_what_pays_is_measured(
    ms_a_block: float, expected: int, *, overlap: bool
) -> None:
    rates, cost, there = LoadRates(30.0), StepCost(0.0, 1.0), copies(8)
    if ms_a_block:
        size = sum(copy.slot.length for copy in there)
        rates.add(there, 8 * BLOCK, size, 8 * ms_a_block, 0.0)
    rest = Rest(0, 10 * BLOCK, BLOCK)
    count = worth_loading(there, rest, rates, cost, now_s=1.0, overlap=overlap)
    assert count == expected
    # what is old is not believed any more
    assert worth_loading(there, rest, rates, cost, now_s=99.0, overlap=overlap) == 8


def test_a_load_is_reported_by_where_it_came_from() -> None:
    shell = Shell()
    shell.tell(events.StoreAttached(attached=True, node=slot(0).node))
    assert shell.machine.load().load is None
    shell.tell(events.WorkArrived(work("a", 60, reuse=3)))
    shell.run()
    report = shell.machine.load()
    assert report.loads == 1
    assert report.load == LoadSample(near_bytes=300, far_bytes=0, flows=0, ms=2.0)
    assert report.reused_tokens_per_s == pytest.approx(48 / 0.002)


def test_a_slow_link_makes_the_worker_compute() -> None:
    shell = Shell(PrefillLimits(initial_tokens_per_s=10_000))
    for name in ("a", "b"):
        asked = work(name, 60, reuse=3, prefix=0 if name == "a" else 30)
        shell.tell(events.WorkArrived(asked))
        if name == "a":
            load = shell.loads.pop()
            shell.kv[ref("a")].update(range(48))
            shell.tell(events.Loaded(load.ref, 3, 300, 9000.0))
            shell.run()
    assert shell.loads == []
    shell.run()
    assert done_of(shell, "b").reused_tokens == 0


def test_another_that_makes_nothing_is_not_waited_for_for_ever() -> None:
    shell = Shell(PrefillLimits(initial_tokens_per_s=1000))
    shell.tell(events.WorkArrived(work("a", 65)))  # its slots never come
    shell.tell(events.WorkArrived(work("b", 65)))
    shell.now_s += 0.05
    shell.tell(events.Tick())
    assert ref("b") not in shell.opened
    shell.now_s += 0.05  # computing what they share takes 64 ms
    shell.tell(events.Tick())
    assert ref("b") in shell.opened
    shell.run()
    assert len(order_of(shell)) == 2


def test_the_first_that_waits_inherits_what_a_cancelled_one_made() -> None:
    shell = Shell()
    for name in ("a", "b", "c"):
        shell.tell(events.WorkArrived(work(name, 65)))
    assert set(shell.under_way) == {ref("a")}
    shell.tell(
        events.CancelArrived(Cancel(request=RequestId("a"), attempt=1, reason=""))
    )
    assert isinstance(shell.under_way[ref("b")], events.Begin)
    assert ref("c") not in shell.opened
    shell.run()
    assert len(shell.of(PrefillDone)) == 2


def test_a_gate_opens_layer_by_layer_and_tells_what_fell_short() -> None:
    gate = LoadGate(limit_s=20.0)
    gate.reached(2)
    gate.wait(1, lambda: False)
    with pytest.raises(LoadFellShort):
        gate.wait(5, lambda: True)  # an aborted step does not wait
    opener = threading.Timer(0.01, gate.reached, [6])
    opener.start()
    gate.wait(5, lambda: False)
    opener.join()
    gate.ended(whole=True)
    gate.ended(whole=False)
    gate.wait(29, lambda: False)
    short = LoadGate(limit_s=20.0)
    short.ended(whole=False)
    with pytest.raises(LoadFellShort):
        short.wait(0, lambda: False)
    with pytest.raises(LoadFellShort):
        LoadGate(limit_s=0.0).wait(3, lambda: False)


def test_limits_keep_what_waits_bounded() -> None:
    shell = Shell(LIMITS)
    for i in range(9):
        shell.tell(events.WorkArrived(work(f"r{i}", 40, prefix=10 * i)))
    assert isinstance(shell.replies[-1], WorkRefused)
    assert len(shell.opened) == LIMITS.prepare_ahead
    shell.run()


def test_a_third_turn_in_the_queue_leaves_the_seconds_blocks_to_it() -> None:
    """What the first has put into the pool is nothing that the third waits for."""
    shell, pool = Shell(PrefillLimits(step_tokens=500)), dict[BlockKey, Located]()
    turns = {"a": work("a", 65), "b": work("b", 129), "c": work("c", 193)}
    for turn in turns.values():
        shell.tell(events.WorkArrived(turn))
    computed: list[tuple[str, int, int]] = []
    while shell.loads or shell.under_way or shell.step is not None:
        if shell.loads:
            shell.end_load()
        elif shell.under_way:
            one, command = next(iter(shell.under_way.items()))
            if isinstance(command, events.Begin):
                there = sum(block.key in pool for block in command.blocks)
                shell.finish(one, there=there)
                continue
            turn = turns[one.request]
            new = {key: Located(key, slot(90), 1) for key in turn.keys} | pool
            shell.commit(one, tuple(new[key] for key in new if key not in pool))
            pool = new
        else:
            chunks = shell.run_step().chunks
            computed += [(one.ref.request, one.start, one.end) for one in chunks]
    assert computed == [("a", 0, 64), ("b", 64, 128), ("c", 128, 192)]
