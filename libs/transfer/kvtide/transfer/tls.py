"""TLS around a channel, for networks that others can listen to.

Both ends show certificates that one authority signed. Who a peer is, is still proved by
the cluster's secret: the certificates' names are not looked at. Costs copies and
encryption, so it is off unless asked for.
"""

import socket
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtide.runtime import ConfigError
from kvtide.transfer.channel import Channel, ChannelClosedError, Check
from kvtide.transfer.errors import Refused

_CHUNK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: our certificate (with its chain), its key, and the authority's."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, slots=True)
class Tls:
    """The two contexts of an endpoint."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def load(files: TlsFiles) -> Tls:
    """Read the files.

    Raises:
        ConfigError: one is missing, or they do not fit each other.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(files.certificate, files.key)
            context.load_verify_locations(files.authority)
        except OSError as error:
            raise ConfigError(f"TLS for transfers: {error}", key="tls") from error
    # a ticket would be more bytes to read for nothing: connections live long
    server.num_tickets = 0
    return Tls(server, client)


class TlsChannel(Channel):
    """A channel whose bytes are encrypted.

    One thread may send while another receives: the TLS state is locked, the socket is
    not waited for meanwhile.
    """

    def __init__(self, sock: socket.socket, tls: Tls, *, server: bool) -> None:
        """Take over the socket; nothing is exchanged before ``open``."""
        super().__init__(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = tls.server if server else tls.client
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._state = threading.Lock()
        # records must leave in the order in which they were made
        self._sending = threading.Lock()

    def open(self, check: Check) -> None:
        """See ``Channel.open``: the TLS handshake.

        Raises:
            Refused: the other end speaks no TLS, or has no certificate that counts.
        """
        try:
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    self._flush(check)
                    self._feed(check)
                else:
                    self._flush(check)
                    return
        except ssl.SSLError as error:
            raise Refused(f"TLS with the other end failed: {error}") from error

    def send_now(self, frame: bytes) -> bool:
        """See ``Channel.send_now``: what is encrypted can't be taken back."""
        del frame
        return False

    def receive_ahead(self, most: int, check: Check) -> bytes:
        """See ``Channel.receive_ahead``: records are of no use to others."""
        del most, check
        return b""

    def send(self, buffers: Sequence[bytes | memoryview], check: Check) -> None:
        """See ``Channel.send``."""
        with self._sending:
            for buffer in buffers:
                view = memoryview(buffer)
                for start in range(0, len(view), _CHUNK_BYTES):
                    with self._state:
                        self._tls.write(view[start : start + _CHUNK_BYTES])
                        data = self._outgoing.read()
                    super().send([data], check)

    def receive_into(self, views: Sequence[memoryview], check: Check) -> None:
        """See ``Channel.receive_into``."""
        for view in views:
            at = 0
            while at < len(view):
                got = self._take(view[at:])
                if got is None:
                    self._feed(check)
                else:
                    at += got

    def receive(self, length: int, check: Check) -> bytes:
        """See ``Channel.receive``."""
        data = bytearray(length)
        self.receive_into([memoryview(data)], check)
        return bytes(data)

    def _take(self, view: memoryview) -> int | None:
        """Decrypt what has come into ``view``; None when more must come first."""
        with self._state:
            try:
                got = self._tls.read(len(view), view)
            except ssl.SSLWantReadError:
                return None
            except ssl.SSLError as error:
                raise ChannelClosedError(f"TLS: {error}") from error
        if not got:
            raise ChannelClosedError("the connection was closed")
        return int(got)

    def _feed(self, check: Check) -> None:
        data = self.receive_some(_CHUNK_BYTES, check)
        with self._state:
            self._incoming.write(data)

    def _flush(self, check: Check) -> None:
        with self._sending:
            with self._state:
                data = self._outgoing.read()
            if data:
                super().send([data], check)


def channel_for(sock: socket.socket, tls: Tls | None, *, server: bool) -> Channel:
    """A channel over the socket, encrypted where TLS is wanted."""
    return Channel(sock) if tls is None else TlsChannel(sock, tls, server=server)
