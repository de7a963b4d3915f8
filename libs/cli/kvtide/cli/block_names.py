"""What people call blocks, tenants and models, and how the pool knows them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtide.bus.messages import BlockSelector
from kvtide.kv import KEY_BYTES, BlockKey, ModelFacts, TenantId, model_tag, tenant_tag
from kvtide.runtime import ConfigError

TAG_BYTES = 16
USUAL_TENANT = TenantId("default")
"""Whose requests without a key are, unless the gateway's settings say otherwise."""

_SHORT = 8
_DIGITS = "0123456789abcdef"


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Names by tag, as far as they are known; the pool itself keeps only tags."""

    secret: bytes = field(repr=False)
    tenants: dict[bytes, str] = field(default_factory=dict[bytes, str])
    models: dict[bytes, str] = field(default_factory=dict[bytes, str])

    def __post_init__(self) -> None:
        """No catalog names the tenant of those who have no keys."""
        self.learn(tenants=[USUAL_TENANT])

    def learn(
        self,
        *,
        tenants: Iterable[TenantId] = (),
        models: Iterable[ModelFacts] = (),
    ) -> None:
        """These names are used."""
        for tenant in tenants:
            self.tenants[tenant_tag(self.secret, tenant)] = tenant
        for facts in models:
            self.models[model_tag(self.secret, facts)] = facts.name

    def tenant(self, tag: bytes) -> str:
        """A tenant's name, or the start of its tag."""
        return self.tenants.get(tag) or f"#{tag.hex()[:_SHORT]}"

    def model(self, tag: bytes) -> str:
        """A model's name, or the start of its tag."""
        return self.models.get(tag) or f"#{tag.hex()[:_SHORT]}"

    def select(
        self, *, keys: Iterable[str] = (), tenant: str | None, model: str | None
    ) -> BlockSelector:
        """The blocks that are meant.

        Raises:
            ConfigError: a key is none, or no live worker serves a model of that name.
        """
        named = tuple(block_key(key) for key in keys)
        return BlockSelector(
            keys=named or None,
            tenant=None
            if tenant is None
            else tenant_tag(self.secret, TenantId(tenant)),
            model=None if model is None else self._model_tag(model),
        )

    def _model_tag(self, model: str) -> bytes:
        for tag, name in self.models.items():
            if name == model:
                return tag
        if len(model) == 2 * TAG_BYTES and set(model) <= set("0123456789abcdef"):
            return bytes.fromhex(model)
        known = ", ".join(sorted(self.models.values())) or "none"
        raise ConfigError(
            f"no live worker serves a model {model!r} (those that are served: {known}); "
            "a model that nobody serves any more is named by its tag in full, which "
            "'kvtide blocks list --json' shows",
            key="model",
        )


def key_range(text: str) -> tuple[BlockKey, BlockKey]:
    """The first and the last key that begin so.

    Raises:
        ConfigError: none can begin so.
    """
    digits = 2 * KEY_BYTES
    if not text or len(text) > digits or not set(text.lower()) <= set(_DIGITS):
        raise ConfigError(
            f"{text!r} is not how a block's key begins: that has {digits} hexadecimal "
            "digits",
            key="key",
        )
    first, last = text.ljust(digits, "0"), text.ljust(digits, "f")
    return BlockKey(bytes.fromhex(first)), BlockKey(bytes.fromhex(last))


def block_key(text: str) -> BlockKey:
    """A key as it is shown: hexadecimal.

    Raises:
        ConfigError: it is none.
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{text!r} is no block's key: that has {2 * KEY_BYTES} hexadecimal digits",
            key="key",
        )
    return BlockKey(key)
