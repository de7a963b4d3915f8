"""Limits of time: none at all, and one for all that a call does."""

import threading
import time
from dataclasses import replace

import pytest
from tests.integration.transfer_proxy import CLOCK, MIB, make

from kvtide.runtime import Clock
from kvtide.transfer import (
    Operation,
    Priority,
    ReadSlice,
    Transfer,
    Unreachable,
)
from kvtide.transfer.alarm import Alarm
from kvtide.transfer.channel import Channel
from kvtide.transfer.dial import Dialer
from kvtide.transfer.handshake import Session, Use

INFINITE = float("inf")


def endless(clock: Clock) -> Transfer:
    return Transfer(
        slice_count=1,
        operation=Operation.READ,
        purpose="test",
        priority=Priority.FOREGROUND,
        timeout_s=INFINITE,
        clock=clock,
    )


def test_a_wait_without_limit_ends_with_the_transfer() -> None:
    transfer = endless(CLOCK)
    transfer.begin(1, lambda _: None)
    timer = threading.Timer(0.05, transfer.settle, ["tcp"])
    timer.start()
    assert transfer.wait_blocking().path == "tcp"
    assert transfer.wait_blocking(INFINITE).path == "tcp"
    timer.join()


def test_an_alarm_for_never_leaves_the_others() -> None:
    alarm = Alarm(CLOCK)
    rang = threading.Event()
    alarm.at(INFINITE, lambda: None)
    time.sleep(0.05)  # it waits for that one alone now
    alarm.at(CLOCK.monotonic(), rang.set)
    assert rang.wait(10)
    alarm.close()


async def test_connect_and_read_without_limit() -> None:
    async with make("owner") as owner, make("reader") as reader:
        region = owner.register(bytes(MIB), name="arena")
        peer = await reader.connect(owner.address, timeout_s=INFINITE)
        into = memoryview(bytearray(b"x" * MIB))
        await peer.read([ReadSlice(region.handle(), 0, into)], timeout_s=INFINITE)
        assert into == bytes(MIB)


async def test_connect_has_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets_s: list[float] = []
    dialled = threading.Event()
    hang_up = threading.Event()

    def dial(self: Dialer, use: Use, timeout_s: float) -> tuple[Channel, Session]:
        budgets_s.append(timeout_s)
        dialled.set()
        hang_up.wait(20)
        raise Unreachable("nobody", node=self.address.node)

    async with make("reader") as reader, make("owner") as owner:
        monkeypatch.setattr(Dialer, "dial", dial)
        address = replace(owner.address, epoch=2)

        def connect() -> None:
            with pytest.raises(Unreachable):
                reader.connect_blocking(address, timeout_s=30)

        threads = [threading.Thread(target=connect) for _ in range(2)]
        threads[0].start()
        assert dialled.wait(10)
        threads[1].start()
        time.sleep(0.3)  # noqa: ASYNC251 - the second waits for its turn meanwhile
        hang_up.set()
        for thread in threads:
            thread.join()
    assert len(budgets_s) == 2
    # what it waited is gone, whatever else took time
    assert budgets_s[1] < 30 - 0.2
