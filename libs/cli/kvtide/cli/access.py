"""How commands that look on find the cluster and ask a conductor."""

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from kvtide.bus import (
    Identity,
    NatsBus,
    NatsPass,
    load_secret,
    transfer_tls,
)
from kvtide.bus.interface import Bus, Incoming
from kvtide.bus.messages import AnyMessage, Beat, Message
from kvtide.bus.subjects import Hop
from kvtide.kv import NodeId, Role
from kvtide.runtime import KvtideError, SystemClock
from kvtide.runtime.settings import RoleSettings, hide_passwords
from kvtide.transfer import Endpoint

CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 3.0
LISTEN_S = 1.5
"""Three beats: whoever is silent so long is not there."""


class NoConductorError(KvtideError):
    """No conductor answers."""


class NoNatsError(KvtideError):
    """No NATS server answers."""


@asynccontextmanager
async def open_bus(settings: RoleSettings) -> AsyncGenerator[NatsBus]:
    """A connection for looking on; nobody hears of it.

    Raises:
        NoNatsError: no server answers within ``CONNECT_TIMEOUT_S``.
        ConfigError: the secret or an address can't be used.
    """
    clock = SystemClock()
    name = NodeId(f"cli-{os.getpid()}-{secrets.token_hex(4)}")
    identity = Identity(name, epoch=int(clock.wall() * 1000))
    secret = load_secret(settings.secret_file or settings.state_dir / "secret")
    endpoint = Endpoint(
        node=name,
        epoch=identity.current.epoch,
        secret=secret,
        clock=clock,
        listen_host=settings.listen,
        advertise_host=settings.advertise or None,
        shm_dir=None,
        tls=transfer_tls(settings),
    )
    async with endpoint:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                bus = await NatsBus.open(
                    settings.nats,
                    identity,
                    cluster=settings.cluster,
                    clock=clock,
                    entry=NatsPass.of(settings),
                    endpoint=endpoint,
                )
        except TimeoutError:
            message = (
                f"no NATS server answers at {hide_passwords(settings.nats)}: "
                "start kvtide, or name the server with --nats"
            )
            raise NoNatsError(message) from None
        async with bus:
            yield bus


async def ask_conductor(bus: Bus, question: Message) -> AnyMessage:
    """The answer of the first conductor that has one.

    Raises:
        NoConductorError: none beats, or none answers.
    """
    conductors = await _conductors(bus)
    for node in conductors:
        answer = await _ask(bus, node, question)
        if answer is not None:
            return answer
    raise _nobody(bus, conductors)


async def ask_conductors(bus: Bus, question: Message) -> dict[NodeId, AnyMessage]:
    """The answers of all conductors that have one, at least one.

    Raises:
        NoConductorError: none beats, or none answers.
    """
    conductors = await _conductors(bus)
    answers: dict[NodeId, AnyMessage] = {}

    async def ask(node: NodeId) -> None:
        answer = await _ask(bus, node, question)
        if answer is not None:
            answers[node] = answer

    async with asyncio.TaskGroup() as asking:
        for node in conductors:
            asking.create_task(ask(node))
    if not answers:
        raise _nobody(bus, conductors)
    return answers


async def _ask(bus: Bus, node: NodeId, question: Message) -> AnyMessage | None:
    try:
        return await bus.request(
            bus.subjects.inbox(Role.CONDUCTOR, node, Hop.QUERY),
            question,
            timeout_s=REQUEST_TIMEOUT_S,
        )
    except (KvtideError, TimeoutError):
        return None


def _nobody(bus: Bus, asked: list[NodeId]) -> NoConductorError:
    heard = f"asked {', '.join(asked)}" if asked else "heard of none"
    return NoConductorError(
        f"no conductor answers in cluster {bus.subjects.cluster!r} ({heard})"
    )


async def _conductors(bus: Bus) -> list[NodeId]:
    """Those that beat within ``LISTEN_S``; returns early at the first one."""
    found: asyncio.Queue[NodeId] = asyncio.Queue(64)

    async def heard(incoming: Incoming) -> None:
        beat = incoming.message
        if isinstance(beat, Beat) and Role.CONDUCTOR in beat.roles and not found.full():
            found.put_nowait(beat.node.node)

    subscription = await bus.subscribe(bus.subjects.beats(), heard)
    names: dict[NodeId, None] = {}
    try:
        async with asyncio.timeout(LISTEN_S):
            names[await found.get()] = None
            await asyncio.sleep(0.6)  # one more beat, for there may be several
    except TimeoutError:
        pass
    finally:
        await subscription.close()
    while not found.empty():
        names[found.get_nowait()] = None
    return list(names)
