"""Blocks of KV: identity, layout, headers and descriptors. Pure."""

from kvtide.kv.descriptor import Located, SlotRef
from kvtide.kv.errors import HeaderMismatchError, KvError
from kvtide.kv.header import (
    PRIVATE_KEY,
    BlockHeader,
    HeaderForm,
    PartEntry,
    SpaceTags,
    make_header,
    renewed_header,
)
from kvtide.kv.ids import (
    KEY_BYTES,
    BlockKey,
    Lease,
    NodeId,
    NodeRef,
    RequestId,
    RequestRef,
    Role,
    TenantId,
    Tier,
)
from kvtide.kv.keys import (
    MIN_SECRET_BYTES,
    KeySpace,
    SpaceId,
    derive_key,
    model_tag,
    tenant_tag,
)
from kvtide.kv.layout import Layout, PartKind
from kvtide.kv.model import ModelFacts
from kvtide.kv.rendezvous import rendezvous_order
from kvtide.kv.request_names import (
    NAME_CHARS,
    answer_name,
    cluster_name,
    name_prefix,
)
from kvtide.kv.workload_log import BlockIds, LoggedRequest

__all__ = [
    "KEY_BYTES",
    "MIN_SECRET_BYTES",
    "NAME_CHARS",
    "PRIVATE_KEY",
    "BlockHeader",
    "BlockIds",
    "BlockKey",
    "HeaderForm",
    "HeaderMismatchError",
    "KeySpace",
    "KvError",
    "Layout",
    "Lease",
    "Located",
    "LoggedRequest",
    "ModelFacts",
    "NodeId",
    "NodeRef",
    "PartEntry",
    "PartKind",
    "RequestId",
    "RequestRef",
    "Role",
    "SlotRef",
    "SpaceId",
    "SpaceTags",
    "TenantId",
    "Tier",
    "answer_name",
    "cluster_name",
    "derive_key",
    "make_header",
    "model_tag",
    "name_prefix",
    "rendezvous_order",
    "renewed_header",
    "tenant_tag",
]
