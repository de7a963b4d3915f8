"""The NATS server and the catalog's database."""

import asyncio
from pathlib import Path

from kvtide.bus import BusLimits, Disconnected
from kvtide.bus.nats_client import NatsConnection, NatsPass, shown_url
from kvtide.catalog.database import catalog_url, open_engine
from kvtide.catalog.errors import CatalogError
from kvtide.catalog.migrate import HEAD, revision
from kvtide.cli.doctor.findings import Finding, Level
from kvtide.cli.sizes import size
from kvtide.runtime import ConfigError
from kvtide.runtime.settings import RoleSettings, hide_passwords

ENVELOPE_BYTES = 16 * 1024
"""Room for the envelope and the subject around a body."""

CHECK_TIMEOUT_S = 10.0


def nats(settings: RoleSettings) -> list[Finding]:
    """Each server of the URL: whether it answers, and the largest message it takes."""
    entry = NatsPass.of(settings)
    urls = settings.nats.split(",")
    return [asyncio.run(_nats(url.strip(), entry)) for url in urls]


async def _nats(url: str, entry: NatsPass) -> Finding:
    try:
        connection = await NatsConnection.dial(url, "kvtide-doctor", BusLimits(), entry)
    except (Disconnected, ConfigError) as error:
        if url == RoleSettings.model_fields["nats"].default:
            advice = "kvtide up starts one of its own; name another one with --nats URL"
            return Finding("NATS", Level.WARN, f"no server at {url}", advice)
        advice = "start it, or correct --nats URL"
        return Finding("NATS", Level.FAIL, str(error), advice)
    try:
        return judge_payload(shown_url(url), connection.max_payload_bytes)
    finally:
        await connection.close()


def judge_payload(url: str, max_payload: int) -> Finding:
    """Messages are of at most 256 KiB; larger bodies go another way."""
    text = f"{url} answers, max_payload {size(max_payload)}"
    least = BusLimits().inline_bytes + ENVELOPE_BYTES
    if max_payload < least:
        advice = f"set max_payload to {least} or more in the server's configuration"
        return Finding("NATS", Level.FAIL, text, advice)
    return Finding("NATS", Level.OK, text)


def database(settings: RoleSettings) -> Finding:
    """Whether the catalog's database answers, and at which revision it is."""
    try:
        url = catalog_url(settings.catalog, settings.state_dir)
        shown = hide_passwords(url)
        file = url.partition(":///")[2] if url.startswith("sqlite") else ""
        if file and not Path(file).exists():
            return Finding("catalog", Level.OK, f"{shown}: made at the first start")
        return judge_revision(shown, asyncio.run(_revision(url)))
    except ConfigError as error:
        return Finding("catalog", Level.FAIL, str(error), "correct --catalog URL")
    except (CatalogError, TimeoutError, OSError) as error:
        text = hide_passwords(str(error)) or "no answer"
        advice = "start the database, or correct --catalog URL"
        return Finding("catalog", Level.FAIL, text, advice)


async def _revision(url: str) -> str | None:
    engine = open_engine(url)
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await revision(engine)
    finally:
        await engine.dispose()


def judge_revision(shown: str, found: str | None) -> Finding:
    """Conductors and stores migrate an older database when they start."""
    if found == HEAD:
        return Finding("catalog", Level.OK, f"{shown} at revision {found}, the newest")
    if found is None:
        return Finding("catalog", Level.OK, f"{shown}: empty, migrated at the start")
    if found < HEAD:
        text = f"{shown} at revision {found}; the newest is {HEAD}"
        return Finding("catalog", Level.WARN, text, "the next start migrates it")
    text = f"{shown} at revision {found}, which this kvtide does not know"
    return Finding("catalog", Level.FAIL, text, "upgrade kvtide")
