"""Settings of the gateway."""

from pathlib import Path

from pydantic import Field

from kvtide.gateway.access.auth_mode import AuthMode
from kvtide.gateway.connection_limits import ConnectionLimits
from kvtide.gateway.life import LifeLimits
from kvtide.runtime.settings import RoleSettings


class GatewaySettings(RoleSettings):
    """What the public door needs. ``http_port`` is the API's port here."""

    model: Path = Field(
        description="folder with the served model's tokenizer.json and chat template"
    )
    model_name: str = Field(
        default="", description="the model's name for clients; empty: the folder's name"
    )
    tenant: str = Field(
        default="default", min_length=1, description="tenant of requests without a key"
    )
    auth: AuthMode = Field(
        default=AuthMode.AUTO,
        description="auto: keys are needed once one was ever made (kvtide keys make); "
        "required: always; open: never",
    )
    keys_refresh_s: float = Field(
        default=2.0,
        gt=0,
        le=60,
        description="how often keys are read again: a revoked one works no longer",
    )
    keys_max_age_s: float = Field(
        default=900.0,
        gt=0,
        description="while the database is down, keys that were known go on for so long",
    )
    cors_origins: str = Field(
        default="",
        description="origins whose pages in browsers may call, comma-separated, or *; "
        "empty: none",
    )
    tls_cert: Path | None = Field(
        default=None, description="PEM file with the certificate chain: HTTPS only then"
    )
    tls_key: Path | None = Field(
        default=None, description="PEM file with the certificate's key, unencrypted"
    )
    head_timeout_s: float = Field(
        default=15.0,
        gt=0,
        description="a request's head that takes longer to arrive ends its connection",
    )
    max_open_requests: int = Field(
        default=1024, ge=1, description="requests at a time; more are refused at once"
    )
    max_connections: int = Field(
        default=0,
        ge=0,
        description="HTTP connections at a time; 0: four times max_open_requests",
    )
    client_stall_s: float = Field(
        default=60.0,
        gt=0,
        description="a client that reads nothing of its answer for this long, or up to "
        "twice as long, is cut off",
    )
    max_body_bytes: int = Field(
        default=8 * 1024 * 1024, ge=1024, description="largest request body"
    )
    max_pictures: int = Field(
        default=8, ge=0, le=256, description="pictures per request; 0: none are taken"
    )
    max_picture_bytes: int = Field(
        default=4 * 1024 * 1024, ge=1024, description="largest picture, decoded"
    )
    max_pictures_bytes: int = Field(
        default=6 * 1024 * 1024,
        ge=1024,
        le=32 * 1024 * 1024,
        description="all pictures of a request together, once for each answer that it "
        "asks for. In base64 they are a third larger, which max_body_bytes must allow",
    )
    max_picture_pixels: int = Field(
        default=16 * 1024 * 1024,
        ge=1,
        description="width times height of a picture, by its own head: a worker opens it "
        "in three bytes a pixel",
    )
    max_open_picture_bytes: int = Field(
        default=512 * 1024 * 1024,
        ge=1024,
        description="all pictures of open requests, which are kept for fail-over; "
        "requests with more are refused with 503",
    )
    max_choices: int = Field(
        default=16, ge=1, le=128, description="answers (prompts times n) per request"
    )
    max_stops: int = Field(
        default=16, ge=1, description="stop strings, and stop token ids, per request"
    )
    max_stop_chars: int = Field(
        default=256, ge=1, description="length of a stop string"
    )
    default_max_tokens: int = Field(
        default=0, ge=0, description="max_tokens if a client names none; 0: what fits"
    )
    request_timeout_s: float = Field(
        default=600.0, gt=0, description="a request that takes longer fails"
    )
    failover_wait_s: float = Field(
        default=30.0,
        ge=0,
        description="a request that lost its workers waits this long for others, or for "
        "theirs to be started again",
    )
    quarantine_s: float = Field(
        default=600.0,
        ge=0,
        description="a prompt with which two workers died one after the other without a "
        "token between them, or three in all, is refused for this long; 0: it never is",
    )
    ping_s: float = Field(
        default=15.0, gt=0, description="a silent stream gets a comment this often"
    )
    drain_s: float = Field(
        default=20.0, ge=0, description="at shutdown open requests may take this long"
    )
    workload_log: Path | None = Field(
        default=None,
        description="file that gets a line for each request: when it came, its lengths "
        "and salted ids of its blocks, never text; kvtide plan reads it. empty: none",
    )
    workload_log_bytes: int = Field(
        default=1 << 30,
        ge=1 << 20,
        description="a workload log that would outgrow this goes to NAME.1",
    )
    kv_events: str = Field(
        default="",
        description="address such as tcp://*:5557 at which what the pool holds is "
        "published as KV events in vLLM's format: token ids of all prompts, for routers "
        "in front of this gateway. empty: nowhere",
    )
    kv_events_replay: str = Field(
        default="",
        description="address such as tcp://*:5558 at which KV events are repeated; "
        "empty: nowhere",
    )
    kv_events_topic: str = Field(default="", description="topic of the KV events")
    text_threads: int = Field(
        default=2, ge=1, description="threads that tokenise long prompts"
    )

    @property
    def served_name(self) -> str:
        """The name that clients use."""
        return self.model_name or self.model.expanduser().resolve().name

    @property
    def connection_limits(self) -> ConnectionLimits:
        """The limits of the HTTP port."""
        connections = self.max_connections or 4 * self.max_open_requests
        return ConnectionLimits(
            connections, self.client_stall_s, head_s=self.head_timeout_s
        )

    @property
    def cors(self) -> tuple[str, ...]:
        """The origins, one by one."""
        return tuple(
            part for each in self.cors_origins.split(",") if (part := each.strip())
        )

    @property
    def limits(self) -> LifeLimits:
        """The limits of each request's life."""
        return LifeLimits(
            deadline_s=self.request_timeout_s, again_limit_s=self.failover_wait_s
        )
