"""Asks another conductor what has to be known before a question can be answered."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import structlog

from kvtide.bus import BusError, Hop, Node, NoResponder
from kvtide.bus.messages import GrantDenied, Granted, TenantUse, UseQuery
from kvtide.conductor.commands import Command, Consult
from kvtide.conductor.events import AdmitAsked, GrantWanted, Unanswered, Word
from kvtide.kv import NodeId, RequestId, Role
from kvtide.runtime import LimitError

USE_LIMIT_S = 1.0
MARGIN_S = 0.2
ROUNDS = 3
MOST = 4096

Asking: TypeAlias = AdmitAsked | GrantWanted

_log = structlog.get_logger("kvtide.conductor")


class Consulting:
    """Questions that wait for another conductor's word. Bounded in number and time.

    A home is waited for until it would be known as dead: then the tenant's home is
    another, perhaps this one.
    """

    def __init__(self, node: Node, handle: Callable[[Asking], list[Command]]) -> None:
        """``handle`` is given the question again, with the word."""
        self._node = node
        self._handle = handle
        self._open: set[tuple[type[Asking], RequestId]] = set()

    def is_open(self, question: Asking) -> bool:
        """Whether this very question waits already: its answer will do."""
        return _name(question) in self._open

    async def answered(self, question: Asking, consult: Consult) -> list[Command]:
        """The commands that answer it, a ``Reply`` among them."""
        if len(self._open) >= MOST:
            return self._without(question, consult.conductor)
        name = _name(question)
        self._open.add(name)
        try:
            for _ in range(ROUNDS):
                word = await self._word(consult)
                commands = self._handle(replace(question, word=word))
                again = next(
                    (each for each in commands if isinstance(each, Consult)), None
                )
                if again is None:
                    return commands
                consult = again
        finally:
            self._open.discard(name)
        return self._without(question, consult.conductor)

    def _without(self, question: Asking, conductor: NodeId) -> list[Command]:
        """Without anybody's word; never a ``Consult`` again."""
        word = self._unanswered(conductor, gone=False)
        return self._handle(replace(question, word=word))

    async def _word(self, consult: Consult) -> Word:
        message, conductor = consult.message, consult.conductor
        inbox = self._node.subjects.inbox(Role.CONDUCTOR, conductor, Hop.ADMIT)
        limit_s = self._node.roster.times.dead_after_s + MARGIN_S
        if isinstance(message, UseQuery):
            limit_s = USE_LIMIT_S
        try:
            answer = await self._node.bus.request(inbox, message, timeout_s=limit_s)
        except (BusError, LimitError) as error:
            gone = isinstance(error, NoResponder)
            why = str(error)
        else:
            if isinstance(answer, Granted | GrantDenied | TenantUse):
                return answer
            gone, why = False, type(answer).__name__
        _log.info("conductor_not_consulted", conductor=conductor, gone=gone, why=why)
        return self._unanswered(conductor, gone=gone)

    def _unanswered(self, conductor: NodeId, *, gone: bool) -> Unanswered:
        node = self._node
        member = node.roster.get(conductor)
        left_s = 0.0
        if member is not None:
            silent_s = node.clock.monotonic() - member.heard_s
            left_s = max(0.0, node.roster.times.dead_after_s - silent_s)
        return Unanswered(conductor, gone, retry_after_ms=left_s * 1000)


def _name(question: Asking) -> tuple[type[Asking], RequestId]:
    asked = question.admit if isinstance(question, AdmitAsked) else question.asked
    return type(question), asked.request
