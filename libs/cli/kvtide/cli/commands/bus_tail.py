"""``kvtide bus tail``: live messages, decoded with plain MessagePack.

Knows no types, so it shows messages of newer and older versions, too.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import cast

from rich.console import Console

from kvtide.bus import BusLimits, Subjects, WireError, decode_plain
from kvtide.bus.delivery import Delivery
from kvtide.bus.nats_client import NatsConnection, NatsPass
from kvtide.runtime.settings import RoleSettings

_QUEUE = 4096
_LONGEST = 200
_ENVELOPE_FIELDS = 5


def tail(settings: RoleSettings, subject: str, limit: int, console: Console) -> None:
    """Print until interrupted, or until ``limit`` messages (0: no limit).

    Raises:
        Disconnected: no NATS server answers, or it went away.
    """
    asyncio.run(_tail(settings, subject, limit, console))


async def _tail(
    settings: RoleSettings, subject: str, limit: int, console: Console
) -> None:
    waiting: asyncio.Queue[Delivery] = asyncio.Queue(_QUEUE)
    lost = 0

    def dropped(count: int) -> None:
        nonlocal lost
        lost += count

    def deliver(delivery: Delivery) -> None:
        if waiting.full():
            dropped(1)
        else:
            waiting.put_nowait(delivery)

    url = settings.nats.split(",")[0]
    entry = NatsPass.of(settings)
    connection = await NatsConnection.dial(url, "kvtide-tail", BusLimits(), entry)
    wanted = subject or Subjects(settings.cluster).everything()
    printed = 0
    try:
        await connection.subscribe(wanted, deliver, dropped)
        while connection.connected and (limit == 0 or printed < limit):
            try:
                async with asyncio.timeout(1.0):
                    delivery = await waiting.get()
            except TimeoutError:
                continue
            if lost:
                console.print(f"({lost} messages were not shown)", style="yellow")
                lost = 0
            console.print(
                line_of(delivery), markup=False, highlight=False, soft_wrap=True
            )
            printed += 1
    finally:
        await connection.close()


def line_of(delivery: Delivery) -> str:
    """Subject, sender and body of a message in one line."""
    try:
        plain: object = decode_plain(delivery.data)
    except WireError as error:
        return f"{delivery.subject} {error}"
    fields = _items(plain)
    if len(fields) < _ENVELOPE_FIELDS:
        return f"{delivery.subject} {_compact(plain)}"
    _, node, epoch, trace, body = fields[:_ENVELOPE_FIELDS]
    where = f" trace={trace}" if trace else ""
    return f"{delivery.subject} {node}@{epoch}{where} {_body(body)}"


def _items(plain: object) -> list[object]:
    return cast("list[object]", plain) if isinstance(plain, list) else []


def _body(body: object) -> str:
    if not isinstance(body, dict):
        return _compact(body)
    fields = dict(cast("Mapping[str, object]", body))
    kind = fields.pop("t", "?")
    words = [f"{key}={_compact(_hidden(key, value))}" for key, value in fields.items()]
    return " ".join([str(kind), *words])


def _compact(value: object) -> str:
    """Short JSON; bytes as hex. Prompts are not printed: lists show their length."""
    text = json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        fields = cast("dict[object, object]", value)
        return {str(key): _hidden(str(key), item) for key, item in fields.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("list[object]", value)]
    return value


def _hidden(key: str, value: object) -> object:
    if key in ("tokens", "ids") and isinstance(value, (list, tuple)):
        return f"<{len(cast('list[object]', value))}>"
    return _plain(value)
