"""Workers and their loads in columns, kept as beats and bookings come.

What a worker reports is not believed below zero: a policy never sees a negative load.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtide.bus.messages import Beat, DecodeLoad, PrefillLoad
from kvtide.conductor.reducers.bookings import Bookings
from kvtide.conductor.reducers.costs import Costs
from kvtide.conductor.reducers.membership import Line
from kvtide.conductor.reducers.pending import Pending
from kvtide.kv import NodeId, NodeRef
from kvtide.policy import DecodeColumns, PrefillColumns
from kvtide.policy.forecast import Coming

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_NO_PREFILL = PrefillLoad()
_NO_DECODE = DecodeLoad()
_NAN = float("nan")

_PREFILL = slice(0, 8)
_DECODE = slice(8, 17)
_BOOKED = slice(17, 21)
_OF_DECODE = slice(8, 21)
_COLUMNS = 21
_FIRST_ROWS = 64


@dataclass(frozen=True, slots=True)
class ModelRows:
    """The rows of one model's workers, by role, and who is in them."""

    line: Line
    prefills: Ints
    decodes: Ints
    prefill_refs: Sequence[NodeRef]
    decode_refs: Sequence[NodeRef]


class FleetTable:
    """One row for each live node; rows of those that are gone are used again."""

    def __init__(self, bookings: Bookings, costs: Costs) -> None:
        """``bookings`` tells of every change of what a node is booked."""
        self._bookings = bookings
        self._costs = costs
        self._rows: dict[NodeId, int] = {}
        self._refs: dict[NodeId, NodeRef] = {}
        self._free: list[int] = []
        self._table = np.zeros((_COLUMNS, _FIRST_ROWS))
        self._host = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self._hosts = _Hosts()
        self._models: dict[str, ModelRows] = {}
        bookings.on_change(self._booked)

    @property
    def hosts(self) -> int:
        """Host numbers are below this."""
        return self._hosts.size

    def row(self, node: NodeId) -> int | None:
        """A live node's row."""
        return self._rows.get(node)

    def host_number(self, host: str) -> int:
        """A live node's host by number; 0 for no name, and for one that isn't known."""
        return self._hosts.get(host)

    def seen(self, beat: Beat) -> int:
        """Take what a node says of itself; returns its row."""
        node = beat.node.node
        row = self._rows.get(node)
        if row is None:
            row = self._open(node, beat.host)
        elif self._hosts.name(int(self._host[row])) != beat.host:
            self._hosts.release(int(self._host[row]))
            self._host[row] = self._hosts.take(beat.host)
        self._refs[node] = beat.node
        self._table[_PREFILL, row] = self._prefill(beat)
        self._table[_DECODE, row] = self._decode(beat)
        return row

    def gone(self, node: NodeId) -> int | None:
        """A node is live no more; returns the row that it had."""
        row = self._rows.pop(node, None)
        if row is None:
            return None
        del self._refs[node]
        self._hosts.release(int(self._host[row]))
        self._table[:, row] = 0.0
        self._host[row] = 0
        self._free.append(row)
        return row

    def rows(self, model: str, line: Line, excluded: Collection[NodeId]) -> ModelRows:
        """The rows of a model's workers, without those that are excluded."""
        known = self._models.get(model)
        if known is None or known.line is not line:
            if len(self._models) >= 256:  # noqa: PLR2004
                self._models.clear()
            known = self._models[model] = self._resolve(line)
        if not excluded:
            return known
        return self._resolve(
            Line(
                line.facts,
                tuple(node for node in line.prefills if node not in excluded),
                tuple(node for node in line.decodes if node not in excluded),
            )
        )

    def only(
        self, rows: ModelRows, prefill: NodeId | None, decode: NodeId
    ) -> ModelRows:
        """Those rows, of these two workers alone."""
        line = rows.line
        return self._resolve(
            Line(
                line.facts,
                tuple(node for node in line.prefills if node == prefill),
                tuple(node for node in line.decodes if node == decode),
            )
        )

    def prefills(
        self,
        rows: ModelRows,
        inflows: Floats,
        pending: Mapping[NodeId, Pending] | None = None,
    ) -> PrefillColumns:
        """The prefill workers as a policy looks at them.

        ``pending`` is what some of them compute of the prompt that is to be placed.
        """
        pending_blocks = np.zeros(len(rows.prefills), dtype=np.int64)
        pending_ms = np.zeros(len(rows.prefills))
        for node, found in (pending or {}).items():
            at = rows.prefills == self._rows.get(node, -1)
            pending_blocks[at], pending_ms[at] = found.blocks, found.ms
        table = self._table[_PREFILL].take(rows.prefills, axis=1, mode="clip")
        booked_ms = self._table[_BOOKED.start].take(rows.prefills)
        return PrefillColumns(
            refs=rows.prefill_refs,
            node=rows.prefills,
            host=self._host.take(rows.prefills),
            waiting_ms=table[0] + booked_ms,
            waiting_tokens=table[1],
            inflows=inflows,
            pending_blocks=pending_blocks,
            pending_ms=pending_ms,
            fixed_ms=table[2],
            token_ms=table[3],
            pair_ms=table[4],
            load_fixed_ms=table[5],
            near_byte_ms=table[6],
            far_byte_ms=table[7],
        )

    def decodes(self, rows: ModelRows, coming: Coming) -> DecodeColumns:
        """The decode workers as a policy looks at them."""
        table = self._table[_OF_DECODE].take(rows.decodes, axis=1, mode="clip")
        return DecodeColumns(
            refs=rows.decode_refs,
            node=rows.decodes,
            host=self._host.take(rows.decodes),
            running=table[0],
            ahead=table[1] + table[11],
            waiting=table[1],
            kv_tokens=table[2] + table[10],
            capacity=table[3],
            step_ms=table[4],
            coming=coming.rows,
            coming_kv_tokens=coming.kv_tokens,
            fixed_ms=table[5],
            row_ms=table[6],
            pair_ms=table[7],
            fill_tokens=table[8] + table[12],
        )

    # ---- inside

    def _prefill(self, beat: Beat) -> tuple[float, ...]:
        loads = (load for load in beat.load if isinstance(load, PrefillLoad))
        load = next(loads, _NO_PREFILL)
        tokens = max(0, load.queued_tokens) + max(0, load.running_tokens_left)
        waiting_ms = max(0.0, load.queue_ms)
        curve, loading = self._costs.of_prefill(beat, load)
        return (
            waiting_ms,
            0 if waiting_ms else tokens,
            curve.fixed_ms,
            curve.token_ms,
            curve.pair_ms,
            loading.fixed_ms,
            loading.near_byte_ms,
            loading.far_byte_ms,
        )

    def _decode(self, beat: Beat) -> tuple[float, ...]:
        loads = (load for load in beat.load if isinstance(load, DecodeLoad))
        load = next(loads, _NO_DECODE)
        curve = self._costs.of_decode(beat)
        fitted = (_NAN, _NAN, _NAN)
        if curve is not None:
            fitted = (curve.fixed_ms, curve.row_ms, curve.pair_ms)
        return (
            max(0, load.running),
            max(0, load.waiting),
            max(0, load.kv_tokens_used) + max(0, load.kv_tokens_promised),
            max(0, load.kv_tokens_capacity),
            max(0.0, load.step_ms),
            *fitted,
            max(0, load.fill_tokens),
        )

    def _booked(self, node: NodeId) -> None:
        row = self._rows.get(node)
        if row is not None:
            booked = self._bookings
            self._table[_BOOKED, row] = (
                booked.prefill_ms(node),
                booked.decode_tokens(node),
                booked.decode_requests(node),
                booked.fill_tokens(node),
            )

    def _open(self, node: NodeId, host: str) -> int:
        row = self._free.pop() if self._free else len(self._rows)
        if row >= self._table.shape[1]:
            more = self._table.shape[1]
            self._table = np.pad(self._table, ((0, 0), (0, more)))
            self._host = np.pad(self._host, (0, more))
        self._rows[node] = row
        self._host[row] = self._hosts.take(host)
        self._booked(node)
        return row

    def _resolve(self, line: Line) -> ModelRows:
        return ModelRows(
            line,
            np.array([self._rows[node] for node in line.prefills], dtype=np.int64),
            np.array([self._rows[node] for node in line.decodes], dtype=np.int64),
            [self._refs[node] for node in line.prefills],
            [self._refs[node] for node in line.decodes],
        )


def start_ms(prefills: PrefillColumns, new_tokens: int) -> float:
    """About when decode will begin, if so many tokens have to be computed."""
    if not len(prefills.refs):
        return 0.0
    tokens = prefills.waiting_tokens + max(0, new_tokens)
    return float((prefills.waiting_ms + tokens * prefills.token_ms).min())


class _Hosts:
    """Numbers for the hosts of live nodes; 0 is that of all without a name."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = [""]
        self._users: list[int] = [0]
        self._free: list[int] = []

    @property
    def size(self) -> int:
        """Numbers are below this."""
        return len(self._names)

    def get(self, host: str) -> int:
        return self._numbers.get(host, 0)

    def name(self, number: int) -> str:
        return self._names[number]

    def take(self, host: str) -> int:
        """One node more is there."""
        if not host:
            return 0
        number = self._numbers.get(host)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._names[number] = host
            else:
                number = len(self._names)
                self._names.append(host)
                self._users.append(0)
            self._numbers[host] = number
        self._users[number] += 1
        return number

    def release(self, number: int) -> None:
        """One node less is there."""
        if number == 0:
            return
        self._users[number] -= 1
        if self._users[number] == 0:
            del self._numbers[self._names[number]]
            self._names[number] = ""
            self._free.append(number)
