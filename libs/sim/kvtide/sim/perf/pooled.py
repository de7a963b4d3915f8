"""Prefill and decode apart, over one pool, placed by the production conductor."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtide.bus.messages import (
    Admit,
    Outcome,
    Placed,
    Rejected,
    Replicate,
    RequestEnded,
)
from kvtide.conductor.commands import Command, Reply, TellStore
from kvtide.conductor.events import (
    AdmitAsked,
    EndHeard,
    MemberSeen,
    ReplyTo,
    StoreExact,
    Tick,
)
from kvtide.kv import Located, NodeId, NodeRef, RequestId, Role, TenantId, Tier
from kvtide.sim.kernel import Kernel
from kvtide.sim.perf.decoding import DecodeWorker
from kvtide.sim.perf.hosts import Host, asking, block_of, key_of
from kvtide.sim.perf.links import Network
from kvtide.sim.perf.outcomes import Outcomes, Sample, Spent
from kvtide.sim.perf.pool import Change, Store
from kvtide.sim.perf.prefilling import Job, PrefillWorker
from kvtide.sim.perf.rules import Rules, mind_of
from kvtide.sim.perf.shapes import ClusterShape
from kvtide.sim.perf.steps import Row
from kvtide.sim.perf.workload import SimRequest

_BEAT_S = 0.5
_HOT_BLOCKS = 100
_GATEWAY = NodeRef(NodeId("gateway"), 1)
ME = NodeRef(NodeId("conductor"), 1)
_TENANT = TenantId("simulated")


@dataclass(slots=True, eq=False)
class _Open:
    """A request under way."""

    request: SimRequest
    prefill: int
    decode: int
    reuse: tuple[Located, ...]
    predicted_ms: float
    row: Row | None = None
    room: bool = False
    computing: bool = False
    parts: int = 0
    ttft_ms: float = 0.0
    hit_tokens: int = 0


class PooledCluster:
    """One simulation: ``run`` once."""

    def __init__(
        self, shape: ClusterShape, rules: Rules, requests: Iterable[SimRequest]
    ) -> None:
        """Everybody is ready, and all stores are empty.

        ``requests`` are in order of arrival, and read as they arrive.
        """
        self._shape, self._rules = shape, rules
        self._coming = iter(requests)
        self._all_here = False
        self._hot = _hottest(requests) if rules.sample_s else ()
        self.found = Outcomes()
        self._kernel = Kernel()
        self._start_s = self._kernel.now_s
        self._network = Network(self._kernel, shape.text.node.network_bytes_per_s)
        self._mind = mind_of(shape, rules, ME)
        self._open: dict[int, _Open] = {}
        self._hosts: list[Host] = []
        self._prefills: list[PrefillWorker] = []
        self._decodes: list[DecodeWorker] = []
        self._by_node: dict[NodeId, Host] = {}
        self._build()

    def run(self) -> Spent:
        """Until every request is served or rejected."""
        kernel = self._kernel
        self._mind.handle(MemberSeen(asking(_GATEWAY)), kernel.now_s)
        for place, host in enumerate(self._hosts):
            offset_s = _BEAT_S * place / len(self._hosts)
            kernel.at(offset_s, lambda host=host: self._beat(host))
        for host in self._hosts:
            self._say(host)
            if host.store is not None:
                self._mind.handle(StoreExact(host.ref.node, exact=True), kernel.now_s)
        kernel.at(_BEAT_S, self._tick)
        if self._rules.sample_s:
            kernel.at(self._rules.sample_s, self._sample)
        self._next()
        while not self._done:
            kernel.run(60.0)
        return Spent(
            prefill_gpu_s=sum(each.busy_s for each in self._prefills),
            decode_gpu_s=sum(each.busy_s for each in self._decodes),
            network_bytes=self._network.bytes_sent,
            ssd_written_bytes=float(
                sum(h.store.ssd_written for h in self._hosts if h.store is not None)
                * self._shape.block_bytes
            ),
            virtual_s=kernel.now_s - self._start_s,
        )

    @property
    def _done(self) -> bool:
        return self._all_here and self.found.ended >= self.found.requests

    # ---- building

    def _build(self) -> None:
        shape, text = self._shape, self._shape.text
        tokens = text.model.block_tokens
        for number in range(text.prefills):
            store = Store(
                text.node.pool_tokens // tokens,
                text.node.ssd_tokens // tokens,
                self._rules.eviction,
            )
            self._hosts.append(Host(number, Role.PREFILL, shape, store))
            self._prefills.append(
                PrefillWorker(
                    self._kernel,
                    shape.prefill,
                    layers=text.model.layers,
                    prepare_ahead=text.engine.prepare_ahead,
                    block_tokens=tokens,
                    there=store.holds,
                )
            )
        for number in range(text.decodes):
            self._hosts.append(Host(text.prefills + number, Role.DECODE, shape, None))
            self._decodes.append(
                DecodeWorker(
                    self._kernel,
                    shape.step,
                    batch=text.engine.batch,
                    capacity_tokens=shape.kv_capacity_tokens,
                    first=self._first,
                    told=self._rules.told,
                )
            )
        self._by_node = {host.ref.node: host for host in self._hosts}

    # ---- what repeats

    def _beat(self, host: Host) -> None:
        if self._done:
            return
        self._say(host)
        self._kernel.at(_BEAT_S, lambda: self._beat(host))

    def _say(self, host: Host) -> None:
        prefills = len(self._prefills)
        if host.number < prefills:
            load = self._prefills[host.number].load()
        else:
            load = self._decodes[host.number - prefills].load()
        beat = host.beat(load)
        if beat is not None:
            self._do(self._mind.handle(MemberSeen(beat), self._kernel.now_s))

    def _tick(self) -> None:
        if self._done:
            return
        self._do(self._mind.handle(Tick(), self._kernel.now_s))
        self._kernel.at(_BEAT_S, self._tick)

    def _sample(self) -> None:
        if self._done:
            return
        stores = [host.store for host in self._hosts if host.store is not None]
        copies = sum(store.holds(block) for store in stores for block in self._hot)
        waits = [each.load().queue_ms for each in self._prefills]
        paces = [each.load().step_ms for each in self._decodes]
        self.found.samples.append(
            Sample(
                self._kernel.now_s - self._start_s,
                copies / max(1, len(self._hot)),
                sum(waits) / len(waits) / self._rules.ttft_ms,
                sum(paces) / len(paces) / self._rules.tbt_ms,
                sum(len(store.dram) for store in stores),
            )
        )
        self._kernel.at(self._rules.sample_s, self._sample)

    # ---- the life of a request

    def _next(self) -> None:
        request = next(self._coming, None)
        if request is None:
            self._all_here = True
            return
        delay_s = self._start_s + request.at_s - self._kernel.now_s
        self._kernel.at(delay_s, lambda: self._arrive(request))

    def _arrive(self, request: SimRequest) -> None:
        self.found.requests += 1
        self.found.prompt_tokens += request.prompt_tokens
        rules = self._rules
        admit = Admit(
            request=RequestId(str(request.number)),
            attempt=1,
            gateway=_GATEWAY,
            tenant=_TENANT,
            model=self._shape.text.model.name,
            keys=tuple(map(key_of, request.blocks)),
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=request.output_tokens,
            ttft_ms=rules.ttft_ms if rules.reject else None,
            tbt_ms=rules.tbt_ms if rules.reject else None,
        )
        asked = AdmitAsked(admit, ReplyTo(request.number))
        commands = self._mind.handle(asked, self._kernel.now_s)
        self._do(commands)
        answer = next(each.message for each in commands if isinstance(each, Reply))
        if isinstance(answer, Placed):
            self._placed(request, answer)
        elif isinstance(answer, Rejected):
            self.found.rejected_early += 1
        self._next()

    def _placed(self, request: SimRequest, answer: Placed) -> None:
        assert answer.prefill is not None  # noqa: S101 - direct_blocks is 0
        prefill = self._by_node[answer.prefill.node].number
        decode = self._by_node[answer.decode.node].number - len(self._prefills)
        one = self._open[request.number] = _Open(
            request, prefill, decode, answer.reuse, answer.chosen.ttft_ms
        )
        tokens = request.prompt_tokens + request.output_tokens
        self._decodes[decode].promise(request.number, tokens, lambda: self._room(one))
        computed = max(1, request.prompt_tokens - 1)
        full = computed // self._shape.text.model.block_tokens
        self._prefills[prefill].take(
            Job(
                request.number,
                computed,
                request.blocks[:full],
                len(answer.reuse),
                load=self._load,
                computing=self._computing,
                done=self._made,
            )
        )

    def _load(self, job: Job) -> None:
        """Read what is still there of the copies chosen; then what this host has."""
        one, size = self._open[job.number], self._shape.text.model.block_tokens
        host = self._hosts[one.prefill]
        far: dict[int, int] = {}
        near = ssd = blocks = 0
        for located in one.reuse:
            holder = self._by_node[located.slot.node]
            if not _there(holder, located):
                break
            blocks += 1
            ssd += located.slot.tier is Tier.SSD
            if holder.number == one.prefill:
                near += 1
            else:
                far[holder.number] = far.get(holder.number, 0) + 1
        full = job.tokens // size
        while blocks < min(full, len(one.request.blocks)):
            if host.store is None or not host.store.use(one.request.blocks[blocks]):
                break
            blocks += 1
            near += 1
        job.reused_tokens = one.hit_tokens = blocks * size
        self.found.hit_ssd += ssd * size
        self.found.hit_remote += sum(far.values()) * size
        self.found.hit_local += (blocks - sum(far.values())) * size
        self._read(job, one, near, ssd, far)

    def _read(
        self, job: Job, one: _Open, near: int, ssd: int, far: dict[int, int]
    ) -> None:
        left = 1 + len(far)
        worker, block = self._prefills[one.prefill], self._shape.block_bytes
        node = self._shape.text.node

        def arrived() -> None:
            nonlocal left
            left -= 1
            if not left:
                worker.loaded(job)

        if not (near or far):
            worker.loaded(job)
            return
        near_s = near * block / node.host_bytes_per_s
        near_s += ssd * block / node.ssd_bytes_per_s
        for source in sorted(far):
            self._network.send(source, one.prefill, far[source] * block, arrived)
        self._kernel.at(near_s, arrived)

    def _room(self, one: _Open) -> None:
        one.room = True
        self._hand_over(one)

    def _computing(self, job: Job) -> None:
        one = self._open[job.number]
        one.computing = True
        self._hand_over(one)

    def _hand_over(self, one: _Open) -> None:
        """Once it has room decode pulls, by layers, what was loaded and what is made."""
        if not (one.room and one.computing):
            return
        size = one.request.prompt_tokens * self._shape.model.kv_bytes
        target = len(self._prefills) + one.decode
        self._network.send(one.prefill, target, size, lambda: self._part(one))

    def _made(self, job: Job) -> None:
        one = self._open[job.number]
        self._put(self._hosts[one.prefill], one.request.blocks)
        self._part(one)

    def _part(self, one: _Open) -> None:
        """Of two: all is computed, all is sent."""
        one.parts += 1
        if one.parts == 2:  # noqa: PLR2004
            delay_s = self._shape.text.engine.handover_ms / 1000
            self._kernel.at(delay_s, lambda: self._join(one))

    def _join(self, one: _Open) -> None:
        request, worker = one.request, self._decodes[one.decode]
        if self._rules.recheck:
            step_ms = worker.next_step_ms(request.prompt_tokens)
            if step_ms > self._rules.tbt_ms:
                worker.forget(request.number)
                self.found.rejected_late += 1
                self._close(one, Outcome.REJECTED, None)
                return
        one.row = Row(
            request.number,
            request.prompt_tokens,
            request.output_tokens,
            lambda tbt_ms: self._served(one, tbt_ms),
        )
        worker.join(one.row)

    def _first(self, number: int, at_s: float) -> None:
        one = self._open[number]
        one.ttft_ms = (at_s - self._start_s - one.request.at_s) * 1000
        self.found.errors.append(abs(one.predicted_ms - one.ttft_ms) / one.ttft_ms)

    def _served(self, one: _Open, tbt_ms: float) -> None:
        self.found.served(one.ttft_ms, tbt_ms)
        self._close(one, Outcome.FINISHED, tbt_ms)

    def _close(self, one: _Open, outcome: Outcome, tbt_ms: float | None) -> None:
        request, now_s = one.request, self._kernel.now_s
        finished = outcome is Outcome.FINISHED
        ended = RequestEnded(
            request=RequestId(str(request.number)),
            attempt=1,
            gateway=_GATEWAY,
            tenant=_TENANT,
            model=self._shape.text.model.name,
            outcome=outcome,
            code="",
            prompt_tokens=request.prompt_tokens,
            cached_tokens=one.hit_tokens,
            output_tokens=request.output_tokens if finished else 0,
            ttft_ms=one.ttft_ms if finished else None,
            total_ms=(now_s - self._start_s - request.at_s) * 1000,
            tbt_ms=tbt_ms,
        )
        del self._open[request.number]
        self._do(self._mind.handle(EndHeard(ended), now_s))

    # ---- stores

    def _put(self, host: Host, blocks: Iterable[int]) -> None:
        if host.store is not None:
            self._tell(host, host.store.put(tuple(blocks)))

    def _tell(self, host: Host, change: Change) -> None:
        if change.added or change.dropped:
            self._mind.handle(host.news(change), self._kernel.now_s)

    def _do(self, commands: Sequence[Command]) -> None:
        """What the conductor wants of stores; everything else is for a catalog."""
        for command in commands:
            if not isinstance(command, TellStore):
                continue
            host, message = self._by_node[command.store], command.message
            if isinstance(message, Replicate):
                self._copy(host, message)
            elif host.store is not None:
                blocks = tuple(map(block_of, message.keys))
                self._tell(host, host.store.drop(blocks))

    def _copy(self, host: Host, order: Replicate) -> None:
        """Read the copies that are still there, then keep them."""
        sources: dict[int, int] = {}
        blocks: dict[int, None] = {}
        for located in order.located:
            block, holder = block_of(located.key), self._by_node[located.slot.node]
            if block in blocks or not _there(holder, located):
                continue
            blocks[block] = None
            sources[holder.number] = sources.get(holder.number, 0) + 1
        left = len(sources)

        def arrived() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._put(host, blocks)

        for source in sorted(sources):
            size = sources[source] * self._shape.block_bytes
            self._network.send(source, host.number, size, arrived)


def _hottest(requests: Iterable[SimRequest]) -> tuple[int, ...]:
    """The hundred blocks used most; of a stream, which can't be read twice, none."""
    if not isinstance(requests, Sequence):
        return ()
    counts = Counter(block for each in requests for block in each.blocks)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(block for block, _ in ranked[:_HOT_BLOCKS])


def _there(holder: Host, located: Located) -> bool:
    """Whether the copy is what it was; then it is used."""
    store = holder.store
    if store is None:
        return False
    tier = store.ssd if located.slot.tier is Tier.SSD else store.dram
    held = tier.held(block_of(located.key))
    if held is None or held.generation != located.slot.generation:
        return False
    return tier.use(held.block)
