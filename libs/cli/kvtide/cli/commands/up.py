"""``kvtide up``: the whole system on this machine, one process for each role."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import Generator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from kvtide.bus import NatsBus, load_secret
from kvtide.bus.messages import StatusQuery, StatusReply
from kvtide.catalog.database import catalog_url
from kvtide.catalog.migrate import migrate
from kvtide.cli.access import ask_conductor, open_bus
from kvtide.cli.commands.status import summary
from kvtide.cli.nats_keys import keys_of
from kvtide.cli.resolve import nats_url_file, operator_files
from kvtide.cli.settings import UpSettings
from kvtide.cli.supervisor.addresses import free_ports
from kvtide.cli.supervisor.children import ProcessSpec
from kvtide.cli.supervisor.model import PreparedModel, prepare_model
from kvtide.cli.supervisor.nats_server import token_access, write_config
from kvtide.cli.supervisor.obituaries import Obituaries
from kvtide.cli.supervisor.plan import (
    LOOPBACK,
    Ground,
    nats_spec,
    nodes_of,
    role_specs,
)
from kvtide.cli.supervisor.readiness import fetch
from kvtide.cli.supervisor.screen import open_screen
from kvtide.cli.supervisor.spare import SparePlan
from kvtide.cli.supervisor.spare_plan import spare_plan
from kvtide.cli.supervisor.supervise import Supervisor, WhenReady
from kvtide.cli.supervisor.up import NotReadyError, Session
from kvtide.runtime import Clock, ConfigError, KvtideError, SystemClock
from kvtide.runtime.settings import RoleSettings

FIRST_TOKEN_TIMEOUT_S = 60.0
FIRST_TOKEN_TRIES = 20
STATUS_EVERY_S = 2.0
_OK = 200
_UNAUTHORIZED = 401


class KeyNeededError(KvtideError):
    """The gateway asks for an API key, of which nobody keeps the text."""


def up(settings: UpSettings, config: Path | None, console: Console) -> int:
    """Run until a signal; the exit code.

    Raises:
        ConfigError: a setting is wrong, the port is taken, or the state is in use.
        KvtideError: the model can't be had, or never answered.
    """
    _require_workers(settings)
    launch = Launch(settings, config, console, SystemClock())
    screen = open_screen(console)
    session = Session(
        settings=settings,
        screen=screen,
        clock=launch.clock,
        make_specs=launch.specs,
        when_ready=launch.when_ready,
        watch=launch.watch if console.is_terminal else None,
        spare=launch.spare,
        obituaries=Obituaries(settings.state_dir, launch.open_bus, launch.clock),
    )
    with launch.address_file():
        code = session.run()
    screen.say("everything is stopped")
    return code


def _require_workers(settings: UpSettings) -> None:
    for role in ("prefill", "decode"):
        if getattr(settings, role) + settings.worker == 0:
            message = (
                f"no worker would do {role}: set --{role} or --worker to 1 or more"
            )
            raise ConfigError(message, key=role)


@dataclass(slots=True)
class Launch:
    """What this run of ``kvtide up`` adds to the supervisor."""

    settings: UpSettings
    config: Path | None
    console: Console
    clock: Clock
    nats_url: str = ""

    @contextmanager
    def address_file(self) -> Generator[None]:
        """The NATS address is there for other commands only while it is true."""
        try:
            yield
        finally:
            if self.nats_url:
                nats_url_file(self.settings.state_dir).unlink(missing_ok=True)

    def specs(self, settings: UpSettings, shm_dir: Path) -> Sequence[ProcessSpec]:
        """Make model, secret, catalog and NATS ready; what is to run.

        Raises:
            ConfigError, KvtideError: one of them can't be made ready.
        """
        load_secret(settings.state_dir / "secret")
        model = prepare_model(settings, self.console)
        asyncio.run(migrate(catalog_url(settings.catalog, settings.state_dir)))
        if settings.nats:
            ground = Ground(shm_dir, model, settings.nats, None, 0, self.config)
            specs: list[ProcessSpec] = []
        else:
            ground = self._own_nats(shm_dir, model)
            specs = [nats_spec(ground)]
        self._publish_address(ground.nats_url)
        return [*specs, *role_specs(settings, ground)]

    def _own_nats(self, shm_dir: Path, model: PreparedModel) -> Ground:
        (port,) = free_ports(1)
        folder, keys = self.settings.state_dir / "nats", None
        if self.settings.secure:
            # only a secure start needs what makes certificates
            from kvtide.cli.nats_access import (  # noqa: PLC0415
                authorization,
                make_certificates,
            )

            keys, url = keys_of(self.settings.state_dir), f"tls://{LOOPBACK}:{port}"
            make_certificates(keys, (LOOPBACK, "localhost"))
            access = authorization(keys, self.settings.cluster, nodes_of(self.settings))
        else:
            token = secrets.token_urlsafe(24)
            url = f"nats://{token}@{LOOPBACK}:{port}"
            access = token_access(token)
        config = write_config(folder, host=LOOPBACK, port=port, access=access)
        return Ground(shm_dir, model, url, config, port, self.config, keys)

    def _publish_address(self, url: str) -> None:
        self.nats_url = url
        path = nats_url_file(self.settings.state_dir)
        path.touch(mode=0o600)
        path.write_text(url + "\n", encoding="ascii")

    def when_ready(self, supervisor: Supervisor) -> WhenReady:
        """Ask for one token, then tell the person where to go."""

        async def announce() -> None:
            model = await self._first_token(supervisor)
            if not model:
                self._announce_keyed(supervisor)
                return
            address = f"http://{_shown_host(self.settings.host)}:{self.settings.port}"
            body = {
                "model": model,
                "messages": [{"role": "user", "content": "Why is the sky blue?"}],
            }
            supervisor.say(f"kvtide serves {model} at {address}/v1")
            supervisor.say(
                f"try: curl {address}/v1/chat/completions "
                f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
            )
            supervisor.say("Ctrl-C stops everything")

        return announce

    def _announce_keyed(self, supervisor: Supervisor) -> None:
        address = f"http://{_shown_host(self.settings.host)}:{self.settings.port}"
        supervisor.say(f"kvtide serves at {address}/v1, for who has an API key")
        supervisor.say("Ctrl-C stops everything")

    async def _first_token(self, supervisor: Supervisor) -> str:
        """The model's name, once it has made a token; "" if that needs a key.

        Raises:
            NotReadyError: it made none in any of ``FIRST_TOKEN_TRIES`` tries.
        """
        why = ""
        for _ in range(FIRST_TOKEN_TRIES):
            try:
                async with asyncio.timeout(FIRST_TOKEN_TIMEOUT_S):
                    return await self._try_token()
            except KeyNeededError:
                return ""
            except (OSError, TimeoutError, ValueError, LookupError) as error:
                why = str(error) or type(error).__name__
            if supervisor.stopping:
                break
            await self.clock.sleep(0.5)
        message = f"every role is ready, but the model makes no token: {why}"
        raise NotReadyError(message)

    async def _try_token(self) -> str:
        models = await self._call("GET", "/v1/models")
        model = cast("str", models["data"][0]["id"])
        body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        await self._call("POST", "/v1/completions", json.dumps(body).encode())
        return model

    async def _call(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        host = _shown_host(self.settings.host).strip("[]")
        status, answer = await fetch(host, self.settings.port, method, path, body)
        if status == _UNAUTHORIZED:
            raise KeyNeededError
        if status != _OK:
            raise ValueError(f"{path} answers {status}: {answer[:200]!r}")
        return cast("dict[str, Any]", json.loads(answer))

    def open_bus(self) -> AbstractAsyncContextManager[NatsBus]:
        """A connection for looking on; NATS's address is known once it is to run."""
        settings = RoleSettings(
            nats=self.nats_url,
            cluster=self.settings.cluster,
            state_dir=self.settings.state_dir,
        )
        entry = operator_files(settings, self.nats_url)
        return open_bus(settings.model_copy(update=entry))

    def spare(self, specs: Sequence[ProcessSpec]) -> SparePlan | None:
        """A worker in reserve, if the settings want one and there is whom to replace."""
        return spare_plan(specs) if self.settings.spare else None

    def watch(self, supervisor: Supervisor) -> WhenReady:
        """Keep the status line on load and cache fresh."""

        async def follow() -> None:
            while True:
                with contextlib.suppress(KvtideError, TimeoutError):
                    async with self.open_bus() as bus:
                        while True:
                            reply = await ask_conductor(bus, StatusQuery())
                            if isinstance(reply, StatusReply):
                                supervisor.cluster = summary(reply)
                            await self.clock.sleep(STATUS_EVERY_S)
                supervisor.cluster = ""
                await self.clock.sleep(STATUS_EVERY_S)

        return follow


def _shown_host(host: str) -> str:
    """The host in a URL that works on this machine."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
