"""Every look-up in an index, counted: none is for keys of another tenant (F18)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from kvtide.bus.messages import Admit, Placed
from kvtide.conductor.reducers.admission import Admission
from kvtide.conductor.reducers.prefix_index import PrefixIndex
from kvtide.kv import BlockKey, KeySpace, TenantId
from kvtide.sim import Scenario, clients, drawn
from kvtide.sim.checker import Violation
from kvtide.sim.engine import undisturbed
from kvtide.sim.spaces import space_of

SEEDS = range(1, 3)
DECIDE, FIND, LIVES = Admission.decide, PrefixIndex.find, PrefixIndex.lives_of


@dataclass
class LookUps:
    """Keys that conductors look up for a request, and blocks that they name in a placement.

    ``foreign`` and ``foreign_reuse`` are those of another tenant than the request's.
    """

    owner: dict[BlockKey, TenantId]
    tenant: TenantId | None = None
    own: int = 0
    reuse: int = 0
    foreign: list[BlockKey] = field(default_factory=list[BlockKey])
    foreign_reuse: list[BlockKey] = field(default_factory=list[BlockKey])

    def looked_up(self, keys: Sequence[BlockKey]) -> None:
        if self.tenant is None:  # for nobody's request: what is hot is looked at, too
            return
        for key in keys:
            if self.owner.get(key) == self.tenant:
                self.own += 1
            else:
                self.foreign.append(key)

    def placed(self, answer: Placed, tenant: TenantId) -> None:
        for copy in answer.reuse:
            self.reuse += 1
            if self.owner.get(copy.key) != tenant:
                self.foreign_reuse.append(copy.key)


def watched(scenario: Scenario) -> tuple[LookUps, list[Violation]]:
    """Simulate; whose keys were looked up, and what else is wrong."""
    owner: dict[BlockKey, TenantId] = {}
    for each in scenario.clients.answers:
        asked = each.question
        answer = undisturbed(asked.prompt, asked.sampling, asked.max_new_tokens)
        for key in space_of(asked.tenant, "").chain((*asked.prompt, *answer)):
            owner[key] = asked.tenant
    seen = LookUps(owner)

    def decide(mind: Admission, admit: Admit, *rest: Any) -> Any:
        seen.tenant = admit.tenant
        try:
            decision = DECIDE(mind, admit, *rest)
        finally:
            seen.tenant = None
        answer = getattr(decision, "answer", None)
        if isinstance(answer, Placed):
            seen.placed(answer, admit.tenant)
        return decision

    def find(index: PrefixIndex, keys: Sequence[BlockKey]) -> Any:
        seen.looked_up(keys)
        return FIND(index, keys)

    def lives_of(index: PrefixIndex, keys: Sequence[BlockKey]) -> Any:
        seen.looked_up(keys)
        return LIVES(index, keys)

    with (
        patch.object(Admission, "decide", decide),
        patch.object(PrefixIndex, "find", find),
        patch.object(PrefixIndex, "lives_of", lives_of),
    ):
        return seen, scenario.run().violations


def test_no_look_up_leaves_the_tenant_of_its_request() -> None:
    """Two tenants ask for the same prompts; what goes wrong is drawn."""
    own = reuse = 0
    for seed in SEEDS:
        seen, violations = watched(drawn(seed, questions=30))
        assert violations == []
        assert (seen.foreign, seen.foreign_reuse) == ([], [])
        own += seen.own
        reuse += seen.reuse
    assert own > reuse > 0


def test_a_key_space_that_tenants_share_by_mistake_is_seen() -> None:
    def anybodys(_: TenantId, salt: str) -> KeySpace:
        return space_of(TenantId("tenant-a"), salt)

    scenario = drawn(1, questions=30)
    with patch.object(clients, "space_of", anybodys):
        seen, _ = watched(scenario)
    assert seen.foreign
    assert seen.foreign_reuse
