"""Ports: free ones for processes that are about to start, and clear words on taken ones."""

import errno
import socket

from kvtide.runtime import ConfigError


def require_free(host: str, port: int) -> None:
    """Check that the gateway will be able to listen there.

    Raises:
        ConfigError: something listens there already, or it is not an own address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # as servers do: connections that linger from an earlier run don't count
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise _explained(host, port, error) from error


def _explained(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        message = (
            f"port {port} on {host} is taken by another program: "
            "stop it, or choose another port with --port"
        )
        return ConfigError(message, key="port")
    if error.errno == errno.EACCES:
        message = f"port {port} needs root: choose one from 1024 on with --port"
        return ConfigError(message, key="port")
    message = f"can't listen on {host} port {port}: {error.strerror or error}"
    return ConfigError(message, key="host")


def free_ports(count: int, host: str = "127.0.0.1") -> tuple[int, ...]:
    """``count`` different ports that were free a moment ago."""
    sockets = [socket.create_server((host, 0)) for _ in range(count)]
    try:
        return tuple(listener.getsockname()[1] for listener in sockets)
    finally:
        for listener in sockets:
            listener.close()
