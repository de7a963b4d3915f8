"""What became of recent requests: the marks of each one's life. Pure.

Fed with what the lives of this gateway's requests were told, and with what other gateways
and conductors say to everyone. Keeps lengths, names and times, never a token or a text.
"""

from collections import OrderedDict
from collections.abc import Callable

from kvtide.bus.messages import (
    DecodeFailed,
    PlacementMade,
    PrefillDone,
    PrefillFailed,
    PrefillTimes,
    Rejected,
    RequestEnded,
    Tokens,
    WorkRefused,
)
from kvtide.gateway.life import (
    Aborted,
    AdmitAnswered,
    ClientGone,
    Event,
    NodeGone,
    RequestSpec,
    WorkAnswered,
    WorkerSaid,
    WorkLost,
)
from kvtide.gateway.ui.request_view import (
    Mark,
    MarkKind,
    Origin,
    RequestDetail,
    RequestView,
    Span,
)
from kvtide.kv import NodeId, RequestId

HostOf = Callable[[NodeId], str]
"""Which host a node is on ("": not known): those with equal names share memory."""

KEPT_REQUESTS = 2000
KEPT_MARKS = 200
KEPT_SPANS = 96


class _Entry:
    """One request while it is kept."""

    __slots__ = ("arrived_mono_s", "detail", "placed_ms")

    def __init__(self, view: RequestView, now_s: float, block_tokens: int) -> None:
        self.arrived_mono_s = now_s
        self.placed_ms = 0.0
        self.detail = RequestDetail(
            view=view,
            marks=[],
            spans=[],
            origins=[],
            block_tokens=block_tokens,
            token_ms=[],
        )

    def ms(self, now_s: float) -> float:
        return max(0.0, (now_s - self.arrived_mono_s) * 1000)

    def mark(self, mark: Mark) -> None:
        if len(self.detail.marks) < KEPT_MARKS:
            self.detail.marks.append(mark)

    def span(self, span: Span) -> None:
        if len(self.detail.spans) < KEPT_SPANS and span.end_ms > span.start_ms:
            self.detail.spans.append(span)


class Journal:
    """The newest requests, the oldest of which are forgotten first."""

    def __init__(self, *, kept: int = KEPT_REQUESTS) -> None:
        """Nothing is known."""
        self._kept = kept
        self._entries: OrderedDict[RequestId, _Entry] = OrderedDict()

    def arrived(
        self, spec: RequestSpec, block_tokens: int, now_s: float, wall_s: float
    ) -> None:
        """This gateway took a request; a block of its model has ``block_tokens``."""
        view = RequestView(
            request=spec.request,
            tenant=spec.tenant,
            model=spec.model,
            arrived_s=wall_s,
            gateway=spec.gateway.node,
            prompt_tokens=len(spec.prompt),
            ttft_target_ms=spec.ttft_ms,
            tbt_target_ms=spec.tbt_ms,
        )
        entry = self._keep(spec.request, view, now_s, block_tokens)
        entry.mark(Mark(kind=MarkKind.ARRIVED, at_ms=0.0))

    def told(
        self, request: RequestId, event: Event, now_s: float, host_of: HostOf
    ) -> None:
        """A request of this gateway was told ``event``."""
        entry = self._entries.get(request)
        if entry is None:
            return
        at_ms = entry.ms(now_s)
        match event:
            case AdmitAnswered():
                self._admitted(entry, event, at_ms, host_of)
            case WorkerSaid():
                self._worker_said(entry, event, at_ms)
            case WorkAnswered(reply=WorkRefused() as refused, worker=worker):
                text = f"{event.stage.value} refused: {refused.reason}"
                entry.mark(_mark(MarkKind.REFUSED, at_ms, worker.node, text))
            case WorkLost(worker=worker, reason=reason):
                text = f"{event.stage.value} was not reached: {reason}"
                entry.mark(_mark(MarkKind.LOST, at_ms, worker.node, text))
            case NodeGone(node=node) if node.node in (
                entry.detail.view.prefill,
                entry.detail.view.decode,
            ):
                entry.mark(_mark(MarkKind.LOST, at_ms, node.node, "died or was fenced"))
            case ClientGone():
                entry.mark(Mark(kind=MarkKind.CLIENT_GONE, at_ms=at_ms))
            case Aborted(reason=reason):
                entry.mark(Mark(kind=MarkKind.FAILED, at_ms=at_ms, text=reason))
            case _:
                return

    def placed(self, made: PlacementMade, now_s: float, wall_s: float) -> None:
        """A conductor placed a request, of this gateway or of another."""
        view = self._of(made, now_s, wall_s).detail.view
        view.attempt = max(view.attempt, made.attempt)
        view.prefill, view.decode = made.prefill or "", made.decode
        view.predicted_ttft_ms, view.predicted_tbt_ms = made.ttft_ms, made.tbt_ms

    def ended(self, record: RequestEnded, now_s: float, wall_s: float) -> bool:
        """A request has its terminal answer, of this gateway or of another.

        Whether that was news.
        """
        taken_s = record.total_ms / 1000
        entry = self._of(record, now_s - taken_s, wall_s - taken_s)
        view = entry.detail.view
        if view.state != "running":
            return False
        view.state, view.code = record.outcome.value, record.code
        view.attempt = record.attempt
        view.cached_tokens = record.cached_tokens
        view.output_tokens = record.output_tokens
        view.ttft_ms, view.tbt_ms = record.ttft_ms, record.tbt_ms
        view.total_ms = record.total_ms
        text = record.outcome.value + (f": {record.code}" if record.code else "")
        entry.mark(_mark(MarkKind.ENDED, record.total_ms, "", text))
        if record.ttft_ms is not None:
            entry.span(
                Span(
                    name="tokens",
                    start_ms=record.ttft_ms,
                    end_ms=record.total_ms,
                    node=view.decode,
                    attempt=view.attempt,
                )
            )
        return True

    # ---- questions

    def detail(self, request: str) -> RequestDetail | None:
        """All of one request, by its name."""
        entry = self._entries.get(RequestId(request))
        return None if entry is None else entry.detail

    def recent(
        self, *, text: str = "", state: str = "", limit: int = 100
    ) -> list[RequestView]:
        """The newest first; ``text`` is part of a name, tenant, worker or code."""
        found: list[RequestView] = []
        for entry in reversed(self._entries.values()):
            view = entry.detail.view
            if state and view.state != state:
                continue
            if text and not _mentions(view, text):
                continue
            found.append(view)
            if len(found) >= limit:
                break
        return found

    # ---- inside

    def _of(
        self, said: PlacementMade | RequestEnded, now_s: float, wall_s: float
    ) -> _Entry:
        """The entry of a request, made if another gateway took it: it arrived then."""
        known = self._entries.get(said.request)
        if known is not None:
            return known
        view = RequestView(
            request=said.request,
            tenant=said.tenant,
            model=said.model,
            arrived_s=wall_s,
            gateway=said.gateway.node,
            prompt_tokens=said.prompt_tokens,
        )
        return self._keep(said.request, view, now_s)

    def _keep(
        self,
        request: RequestId,
        view: RequestView,
        now_s: float,
        block_tokens: int = 0,
    ) -> _Entry:
        entry = _Entry(view, now_s, block_tokens)
        self._entries[request] = entry
        while len(self._entries) > self._kept:
            self._entries.popitem(last=False)
        return entry

    def _admitted(
        self, entry: _Entry, event: AdmitAnswered, at_ms: float, host_of: HostOf
    ) -> None:
        reply = event.reply
        view = entry.detail.view
        if isinstance(reply, Rejected):
            text = f"{reply.code.value}: {reply.reason}"
            entry.mark(_mark(MarkKind.REJECTED, at_ms, "", text))
            return
        view.attempt = reply.attempt
        view.prefill = reply.prefill.node if reply.prefill is not None else ""
        view.decode = reply.decode.node
        view.predicted_ttft_ms = reply.chosen.ttft_ms
        view.predicted_tbt_ms = reply.chosen.tbt_ms
        last_ms = max((m.at_ms for m in entry.detail.marks), default=0.0)
        name = "placement" if reply.attempt == 1 else "fail-over"
        entry.span(
            Span(name=name, start_ms=last_ms, end_ms=at_ms, attempt=reply.attempt)
        )
        entry.placed_ms = at_ms
        entry.mark(
            Mark(
                kind=MarkKind.PLACED,
                at_ms=at_ms,
                attempt=reply.attempt,
                node=view.prefill or view.decode,
                text=reply.reason,
            )
        )
        reader = reply.prefill or reply.decode
        here = host_of(reader.node)
        ends = [
            ("ssd" if copy.slot.tier.value == "ssd" else _near(copy.slot.node, here, host_of),
             copy.slot.node)
            for copy in reply.reuse
        ]  # fmt: skip
        entry.detail.origins = _origins(
            ends, entry.detail.block_tokens, view.prompt_tokens
        )

    def _worker_said(self, entry: _Entry, event: WorkerSaid, at_ms: float) -> None:
        view = entry.detail.view
        match event.message:
            case PrefillDone() as done:
                self._prefilled(entry, done, at_ms)
            case PrefillFailed(code=code, reason=reason, attempt=attempt):
                text = f"prefill: {code}: {reason}"
                entry.mark(
                    Mark(kind=MarkKind.FAILED, at_ms=at_ms, attempt=attempt,
                         node=event.sender.node, text=text)
                )  # fmt: skip
            case DecodeFailed(code=code, reason=reason, attempt=attempt):
                text = f"decode: {code}: {reason}"
                entry.mark(
                    Mark(kind=MarkKind.FAILED, at_ms=at_ms, attempt=attempt,
                         node=event.sender.node, text=text)
                )  # fmt: skip
            case Tokens() as tokens:
                if view.output_tokens == 0 and tokens.ids:
                    self._first_token(entry, tokens, at_ms)
                view.output_tokens = max(
                    view.output_tokens, tokens.index + len(tokens.ids)
                )
                if len(entry.detail.token_ms) < KEPT_SPANS * 16:
                    entry.detail.token_ms.extend([round(at_ms, 1)] * len(tokens.ids))

    def _prefilled(self, entry: _Entry, done: PrefillDone, at_ms: float) -> None:
        view = entry.detail.view
        view.cached_tokens = done.reused_tokens
        for name, begin_ms, end_ms in prefill_spans(done.times, entry.placed_ms):
            entry.span(
                Span(
                    name=name,
                    start_ms=min(begin_ms, at_ms),
                    end_ms=min(end_ms, at_ms),
                    node=done.prefill.node,
                    attempt=done.attempt,
                )
            )
        text = f"{done.reused_tokens} tokens reused, {done.computed_tokens} computed"
        entry.mark(
            Mark(
                kind=MarkKind.PREFILLED,
                at_ms=at_ms,
                attempt=done.attempt,
                node=done.prefill.node,
                text=text,
            )
        )

    def _first_token(self, entry: _Entry, tokens: Tokens, at_ms: float) -> None:
        entry.detail.view.ttft_ms = at_ms
        times = tokens.times
        if times is not None:
            step_ms, pull_ms = times.first_step_ms, times.pull_ms
            start_ms = max(0.0, at_ms - step_ms - pull_ms)
            pull = "hand-over" if entry.detail.view.prefill else "load"
            for name, begin_ms, end_ms in (
                (pull, start_ms, at_ms - step_ms),
                ("first step", at_ms - step_ms, at_ms),
            ):
                entry.span(
                    Span(
                        name=name,
                        start_ms=max(0.0, begin_ms),
                        end_ms=end_ms,
                        node=tokens.decode.node,
                        attempt=tokens.attempt,
                    )
                )
        entry.mark(
            Mark(
                kind=MarkKind.FIRST_TOKEN,
                at_ms=at_ms,
                attempt=tokens.attempt,
                node=tokens.decode.node,
            )
        )


def prefill_spans(
    times: PrefillTimes, sent_ms: float
) -> list[tuple[str, float, float]]:
    """Name, start and end of each part of a prefill whose work was sent at ``sent_ms``.

    The first chunk overlaps the load, layer by layer.
    """
    queued_ms = sent_ms + times.queue_ms
    found = [
        ("queue", sent_ms, queued_ms),
        ("load", queued_ms, queued_ms + times.load_ms),
    ]
    if len(times.chunks) < 2:  # noqa: PLR2004 - one chunk is the whole computation
        loaded_ms = queued_ms + times.load_ms
        return [*found, ("compute", loaded_ms, loaded_ms + times.compute_ms)]
    for number, chunk in enumerate(times.chunks, 1):
        end_ms = sent_ms + chunk.end_ms
        name = f"chunk {number}: {chunk.tokens} tokens"
        found.append((name, end_ms - chunk.took_ms, end_ms))
    return found


def _near(node: NodeId, here: str, host_of: HostOf) -> str:
    return "host" if here and host_of(node) == here else "remote"


def _mark(kind: MarkKind, at_ms: float, node: str, text: str) -> Mark:
    return Mark(kind=kind, at_ms=at_ms, node=node, text=text)


def _mentions(view: RequestView, text: str) -> bool:
    fields = (view.request, view.tenant, view.prefill, view.decode, view.code)
    return any(text in field for field in fields)


def _origins(
    ends: list[tuple[str, NodeId]], block_tokens: int, prompt_tokens: int
) -> list[Origin]:
    """Runs of blocks of one source, then what is computed."""
    found: list[Origin] = []
    for index, (source, node) in enumerate(ends):
        start, end = (
            index * block_tokens,
            min((index + 1) * block_tokens, prompt_tokens),
        )
        if found and (found[-1].source, found[-1].node) == (source, node):
            found[-1] = Origin(start=found[-1].start, end=end, source=source, node=node)
        else:
            found.append(Origin(start=start, end=end, source=source, node=node))
    reused = min(len(ends) * block_tokens, prompt_tokens)
    if reused < prompt_tokens:
        found.append(Origin(start=reused, end=prompt_tokens, source="computed"))
    return found
