"""A policy that decides both ways, one worker at a time and in columns, and compares."""

from dataclasses import astuple

import pytest

from kvtide.policy import (
    Ask,
    Cluster,
    ColumnPolicy,
    CostSeeds,
    Estimate,
    HostNumbers,
    Placement,
    PolicyRules,
    ReadablePolicy,
    Refusal,
    Targets,
    fleet_of,
    holdings_of,
)


class BothWays:
    """A ``PlacementPolicy`` whose two ways are held equal by every call."""

    def __init__(
        self,
        rules: PolicyRules,
        seeds: CostSeeds | None = None,
        targets: Targets | None = None,
    ) -> None:
        self._readable = ReadablePolicy(rules, seeds, targets)
        self._columns = ColumnPolicy(rules, seeds, targets)

    def place(self, ask: Ask, cluster: Cluster) -> Placement | Refusal:
        expected = self._readable.place(ask, cluster)
        hosts = HostNumbers(ask, cluster)
        found = self._columns.place(
            ask,
            holdings_of(ask, hosts),
            fleet_of(cluster, hosts, self._columns.seeds),
        )
        same(expected, found)
        return found


def same(expected: Placement | Refusal, found: Placement | Refusal) -> None:
    """Equal but for rounding, which may order candidates that are equally good."""
    assert type(found) is type(expected)
    assert found.considered == expected.considered
    assert len(found.candidates) == len(expected.candidates)
    if isinstance(found, Refusal) and isinstance(expected, Refusal):
        assert (found.code, found.bottleneck) == (expected.code, expected.bottleneck)
        assert found.reason == expected.reason
        assert found.retry_after_ms == pytest.approx(expected.retry_after_ms)
    for mine, theirs in zip(found.candidates, expected.candidates, strict=True):
        assert numbers(mine)[3:] == pytest.approx(numbers(theirs)[3:], rel=1e-6), (
            mine,
            theirs,
        )
    assert (found.rest is None) == (expected.rest is None)
    if found.rest is not None and expected.rest is not None:
        assert astuple(found.rest) == pytest.approx(astuple(expected.rest))
    if isinstance(found, Placement) and isinstance(expected, Placement):
        mine, theirs = found.chosen, expected.chosen
        assert mine.prefill == theirs.prefill
        assert mine.decode == theirs.decode
        assert mine.rest_tokens == theirs.rest_tokens
        assert mine.reuse == theirs.reuse
        assert found.reason == expected.reason


def numbers(estimate: Estimate) -> list[float]:
    """The estimate's figures; first those that a tie may exchange."""
    return [
        estimate.hit_tokens,
        estimate.transfer_ms,
        estimate.prefill_ms,
        estimate.queue_ms,
        estimate.ttft_ms,
        estimate.tbt_ms,
        estimate.wait_ms,
    ]
