"""What must hold after a simulation, whatever went wrong in it."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvtide.gateway.life import Finish
from kvtide.kv import BlockKey, Located, Role
from kvtide.sim.clients import Answer
from kvtide.sim.cluster import Process, SimCluster
from kvtide.sim.engine import undisturbed

_WORKERS = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must never be; ``about`` is a request or a node."""

    about: str
    what: str


def answer_violations(answers: list[Answer]) -> Iterator[Violation]:
    """Each request is answered exactly once, with the tokens of an undisturbed run."""
    for answer in answers:
        request = answer.question.request
        for fault in answer.faults:
            yield Violation(request, fault)
        if not answer.settled:
            yield Violation(request, "it was never answered")
        if len(answer.ends) > 1:
            yield Violation(request, f"it was answered {len(answer.ends)} times")
        yield from _token_violations(answer)


def _token_violations(answer: Answer) -> Iterator[Violation]:
    question = answer.question
    truth = undisturbed(question.prompt, question.sampling, question.max_new_tokens)
    got = tuple(answer.ids)
    if got != truth[: len(got)]:
        first = next(i for i, id_ in enumerate(got) if truth[i : i + 1] != (id_,))
        yield Violation(question.request, f"token {first} is wrong")
    finished = any(isinstance(end, Finish) for end in answer.ends)
    if finished and len(got) != len(truth):
        what = f"it finished with {len(got)} of {len(truth)} tokens"
        yield Violation(question.request, what)


def held(cluster: SimCluster) -> list[Violation]:
    """What is still held, when all is answered and quiet: nothing should be."""
    return [
        Violation(process.name, f"{count} {what}")
        for process in cluster.processes.values()
        for what, count in _holdings(process)
        if count
    ]


def unfinished(cluster: SimCluster, tasks: dict[Role, int]) -> list[Violation]:
    """What has not healed when all is quiet: false indexes, and waits without an end.

    ``tasks`` is how many coroutines a process of each role runs when nobody asks.
    """
    return [*_index_violations(cluster), *_waiting(cluster, tasks)]


def _index_violations(cluster: SimCluster) -> Iterator[Violation]:
    """Every conductor knows exactly the copies that there are."""
    truth: dict[BlockKey, set[Located]] = {}
    for process in cluster.of(Role.STORE):
        if process.store is not None:
            for located in process.store.copies():
                truth.setdefault(located.key, set()).add(located)
    copies = sum(len(found) for found in truth.values())
    for process in cluster.of(Role.CONDUCTOR):
        if process.conductor is None:
            continue
        index = process.conductor.index
        if index.copies != copies:
            what = f"knows {index.copies} copies of the {copies} that there are"
            yield Violation(process.name, what)
        for key, there in truth.items():
            known = {copy for block in index.prefix([key]) for copy in block}
            if known != there:
                yield Violation(process.name, f"believes that {key.hex()} is elsewhere")


def _waiting(cluster: SimCluster, tasks: dict[Role, int]) -> Iterator[Violation]:
    for process in cluster.processes.values():
        more = process.life.tasks - tasks[process.role]
        if process.running and more > 0:
            yield Violation(process.name, f"{more} tasks that never end")


def held_by_workers(cluster: SimCluster) -> list[Violation]:
    """What prefill and decode workers still hold: owner lists free that soon."""
    workers = {one.name for one in cluster.processes.values() if one.role in _WORKERS}
    return [one for one in held(cluster) if one.about in workers]


def _holdings(process: Process) -> Iterator[tuple[str, int]]:
    if process.gateway is not None:
        yield "open requests", process.gateway.open_requests
    if process.conductor is not None:
        yield "bookings", process.conductor.load().bookings
    if process.store is not None:
        load = process.store.machine.load()
        yield "leases", load.leases
        yield "pins", load.pins
        yield "reserved slots", load.reserved_slots
        yield "quarantined slots", load.quarantined_slots
        slots = load.free_slots + load.used_slots
        yield "slots unaccounted for", load.total_slots - slots
        blocks = len(process.store.machine.inventory.index)
        yield "slots with blocks that nobody can find", load.used_slots - blocks
    if process.pool is not None:
        yield "open puts", process.pool.open_puts
    if process.prefill is not None:
        yield "prefill jobs", process.prefill.machine.jobs
        yield "prefill runs", process.prefill.runs
    if process.decode is not None:
        yield "sequences", process.decode.machine.requests
        yield "decode runs", process.decode.runs
        yield "pages", process.decode.machine.pages.used
