"""What a store shows of the tenants that its settings name."""

from prometheus_client import CollectorRegistry

from kvtide.bus.messages import StoreLoad
from kvtide.store.accounts import Accounts, ShareRules
from kvtide.store.metrics import StoreMetrics
from kvtide.store.setting_rules import tenant_tags
from kvtide.store.settings import StoreSettings
from kvtide.store.tally import Tally


def test_tenants_of_the_settings_are_shown_with_their_limits() -> None:
    settings = StoreSettings(
        node="store", tenant_weights={"acme": 2.0}, tenant_limit_bytes={"guest": 500}
    )
    tags = tenant_tags(settings, b"s" * 32)
    accounts = Accounts(ShareRules())
    guest = accounts.join(tags["guest"])
    accounts.charge(guest, 300)
    accounts.join(b"nobody named")
    registry = CollectorRegistry()
    metrics = StoreMetrics(registry)
    metrics.follow_tenants(tags, settings.tenant_limit_bytes, accounts.find)
    metrics.update(StoreLoad(), 0, Tally())

    def shown(name: str, tenant: str) -> float | None:
        return registry.get_sample_value(
            f"kvtide_store_tenant_{name}", {"tenant": tenant}
        )

    assert (shown("used_bytes", "guest"), shown("used_bytes", "acme")) == (300, 0)
    assert (shown("slots", "guest"), shown("slots", "acme")) == (1, 0)
    assert shown("limit_bytes", "guest") == 500
    assert shown("limit_bytes", "acme") is None
    # its tag is nobody's business
    assert len(list(registry.collect())) > 0
    assert shown("used_bytes", "nobody named") is None
