"""A typed face of pyverbs: what the RDMA transport needs of it, and nothing more.

pyverbs comes from the system's packages (Debian: python3-pyverbs) and is imported
only when asked for; this module can always be imported.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeArgument=false

import contextlib
import fcntl
import importlib
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from kvtide.transfer.errors import Refused, TransferError, Unreachable

PORT = 1
QUEUE_DEPTH = 128
"""Work requests that a queue pair holds: the credits of its user."""

_MOST_READS_AT_ONCE = 16
_FD_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class PairAddress:
    """What the other end of a queue pair must know."""

    number: int
    sequence: int
    gid: str


@dataclass(frozen=True, slots=True)
class Work:
    """One RDMA read or write between local and remote memory."""

    work_id: int
    write: bool
    local_address: int
    local_key: int
    length: int
    remote_address: int
    remote_key: int
    signaled: bool


@dataclass(frozen=True, slots=True)
class Completion:
    """How a signaled work request ended; a failed one ends all before it too."""

    work_id: int
    status: str

    @property
    def ok(self) -> bool:
        """Whether the bytes are where they belong."""
        return self.status == "SUCCESS"


def device_names() -> list[str]:
    """The RDMA devices of this machine that pyverbs can open; [] when there are none.

    Raises:
        Refused: pyverbs is not installed, with what to do about it.
    """
    device = _module("device")
    # the call fails on a machine without the kernel's verbs
    with contextlib.suppress(Exception):
        return sorted(each.name.decode() for each in device.get_device_list())
    return []


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"pyverbs.{name}")
    except ImportError as error:
        raise Refused(
            f"RDMA needs pyverbs ({error}): install python3-pyverbs and run `make rdma`",
            path="rdma",
        ) from error


class Device:
    """An opened RDMA device, its protection domain and its RoCE v2 address."""

    def __init__(self, name: str) -> None:
        """Open the device.

        Raises:
            Refused: pyverbs is missing, or the device has no usable address.
            Unreachable: it can't be opened.
        """
        self.name = name
        self._enums = _module("enums")
        with _translated(f"cannot open {name}"):
            self._context = _module("device").Context(name=name)
            self._domain = _module("pd").PD(self._context)
            self.gid_index = self._find_gid()
            self.gid = str(self._context.query_gid(PORT, self.gid_index).gid)

    def _find_gid(self) -> int:
        table = self._context.query_gid_table(64)
        usable = [
            entry.gid_index
            for entry in table
            if entry.port_num == PORT
            and entry.gid_type == self._enums.IBV_GID_TYPE_ROCE_V2
            and ":ffff:" in str(_call(entry.gid_str))
        ]
        if usable:
            return int(usable[0])
        if table:
            return int(table[0].gid_index)
        raise Refused(f"{self.name} has no address", path="rdma")

    def active(self) -> bool:
        """Whether the port is up."""
        with _translated(f"cannot ask {self.name}"):
            state = self._context.query_port(PORT).state
        return bool(state == self._enums.IBV_PORT_ACTIVE)

    def register(
        self, address: int, length: int, *, local_write: bool, remote: str
    ) -> "Memory":
        """Let the device reach memory; ``remote`` is "", "read" or "write".

        Raises:
            Unreachable: the device or the limit on locked memory does not allow it.
        """
        enums = self._enums
        access = enums.IBV_ACCESS_LOCAL_WRITE if local_write else 0
        if remote:
            access |= enums.IBV_ACCESS_REMOTE_READ
        if remote == "write":
            access |= enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_LOCAL_WRITE
        with _translated(f"{self.name} cannot register {length} bytes"):
            region = _module("mr").MR(self._domain, length, access, address=address)
            return Memory(region, int(region.lkey), int(region.rkey))

    def pair(self) -> "Pair":
        """A new queue pair, not connected."""
        with _translated(f"{self.name} cannot make a queue pair"):
            return Pair(self, self._context, self._domain)

    def close(self) -> None:
        """Close the device; its pairs and memories first."""
        with _translated(f"cannot close {self.name}"):
            self._domain.close()
            self._context.close()


@dataclass(frozen=True, slots=True)
class Memory:
    """Registered memory."""

    region: Any
    local_key: int
    remote_key: int

    def close(self) -> None:
        """Take the right back: work that uses the keys from now on fails."""
        with _translated("cannot deregister memory"):
            self.region.close()


class Pair:
    """A reliable-connected queue pair with its own completion queue and channel.

    For one thread. At most ``QUEUE_DEPTH`` work requests may be posted and not yet
    completed (an unsignaled one is completed by the next signaled one).
    """

    def __init__(self, device: Device, context: Any, domain: Any) -> None:
        """Made by ``Device.pair``."""
        self._device = device
        self._enums = _module("enums")
        cq = _module("cq")
        qp = _module("qp")
        with _FD_LOCK:
            # pyverbs keeps the channel's descriptor to itself
            before = _event_descriptors()
            self._channel = cq.CompChannel(context)
            (self._fd,) = _event_descriptors() - before
        fcntl.fcntl(
            self._fd,
            fcntl.F_SETFL,
            fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_NONBLOCK,
        )
        self._queue = cq.CQ(context, 2 * QUEUE_DEPTH, None, self._channel, 0)
        self._queue.req_notify()
        room = qp.QPCap(
            max_send_wr=QUEUE_DEPTH, max_recv_wr=1, max_send_sge=1, max_recv_sge=1
        )
        setup = qp.QPInitAttr(
            qp_type=self._enums.IBV_QPT_RC,
            scq=self._queue,
            rcq=self._queue,
            cap=room,
            sq_sig_all=0,
        )
        self._pair = qp.QP(domain, setup)
        self._connected = False
        self._sequence = secrets.randbits(24)

    @property
    def address(self) -> PairAddress:
        """For the other end; a new one after each ``reset``."""
        return PairAddress(int(self._pair.qp_num), self._sequence, self._device.gid)

    def fileno(self) -> int:
        """Readable when completions may have come."""
        return self._fd

    def reset(self) -> None:
        """Stop all work, in both directions, and forget it; then ``connect`` again.

        Raises:
            Unreachable: the device refuses.
        """
        if not self._connected:
            return
        with _translated(f"{self._device.name} cannot reset a pair"):
            attr = _module("qp").QPAttr(qp_state=self._enums.IBV_QPS_RESET)
            self._pair.modify(attr, self._enums.IBV_QP_STATE)
        self.completions()
        self._connected = False
        # what is still in the network from before fits nothing
        self._sequence = secrets.randbits(24)

    def connect(self, remote: PairAddress) -> None:
        """Connect to the other end; a pair that was connected is to be reset first.

        Raises:
            Unreachable: the device refuses.
        """
        enums, qp, addr = self._enums, _module("qp"), _module("addr")
        access = enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE
        with _translated(f"{self._device.name} cannot connect"):
            self._connected = True
            route = addr.GlobalRoute(
                dgid=addr.GID(remote.gid),
                sgid_index=self._device.gid_index,
                hop_limit=64,
            )
            attr = qp.QPAttr(port_num=PORT)
            attr.qp_access_flags = access | enums.IBV_ACCESS_LOCAL_WRITE
            attr.ah_attr = addr.AHAttr(gr=route, is_global=1, port_num=PORT)
            attr.path_mtu = enums.IBV_MTU_4096
            attr.dest_qp_num = remote.number
            attr.rq_psn, attr.sq_psn = remote.sequence, self._sequence
            attr.max_rd_atomic = attr.max_dest_rd_atomic = _MOST_READS_AT_ONCE
            attr.min_rnr_timer = 12
            # about 17 ms a try (4.096 us << 12): a dead peer is noticed in 0.1 s
            attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 5, 7
            self._pair.to_rts(attr)

    def post(self, works: Sequence[Work]) -> None:
        """Post work requests as one chain, in order.

        Raises:
            Unreachable: the device refuses; none or some of them are posted.
        """
        enums, wr = self._enums, _module("wr")
        chain: list[Any] = []
        following = None
        for work in reversed(works):
            opcode = enums.IBV_WR_RDMA_WRITE if work.write else enums.IBV_WR_RDMA_READ
            following = wr.SendWR(
                wr_id=work.work_id,
                opcode=opcode,
                num_sge=1,
                sg=[wr.SGE(work.local_address, work.length, work.local_key)],
                send_flags=enums.IBV_SEND_SIGNALED if work.signaled else 0,
                next_wr=following,
            )
            following.set_wr_rdma(work.remote_key, work.remote_address)
            # a request does not keep the next one alive
            chain.append(following)
        with _translated(f"{self._device.name} refuses work"):
            self._pair.post_send(following)

    def completions(self) -> list[Completion]:
        """What has completed; arms the channel for what comes later."""
        found: list[Completion] = []
        with _translated(f"{self._device.name} cannot be polled"):
            while True:
                count, entries = self._queue.poll(32)
                found.extend(
                    Completion(int(each.wr_id), self._name(each.status))
                    for each in entries
                )
                if not count:
                    return found

    def acknowledge(self) -> None:
        """Take the channel's event, when ``fileno`` is readable, and arm it anew."""
        with _translated(f"{self._device.name} has no event"):
            self._channel.get_cq_event(self._queue)
            self._queue.ack_events(1)
            self._queue.req_notify()

    def _name(self, status: int) -> str:
        for name, value in vars(self._enums).items():
            if value == status and name.startswith("IBV_WC_"):
                short = name.removeprefix("IBV_WC_")
                if short == "SUCCESS" or short.endswith("_ERR"):
                    return short
        return f"status {status}"

    def close(self) -> None:
        """Give all of it back."""
        with _translated(f"cannot close a pair of {self._device.name}"):
            self._pair.close()
            self._queue.close()
            self._channel.close()


class _Translated(contextlib.AbstractContextManager[None]):
    """Turns pyverbs's errors into ours."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, trace
        if isinstance(error, Exception) and not isinstance(error, TransferError):
            raise Unreachable(f"{self._message}: {error}", path="rdma") from error


_translated = _Translated


def _call(value: Any) -> Any:
    """Pyverbs has made this a method in one version, an attribute in another."""
    return value() if callable(value) else value


def _event_descriptors() -> set[int]:
    found: set[int] = set()
    for path in Path("/proc/self/fd").iterdir():
        # the listing's own descriptor is gone already
        with contextlib.suppress(OSError):
            if "infinibandevent" in str(path.readlink()):
                found.add(int(path.name))
    return found
