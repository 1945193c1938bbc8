"""The application behind a socket: started, announced when it can be used, and ended in order by a signal."""

from __future__ import annotations

import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI

from ambiseg._util.errors import ConfigError
from ambiseg._util.extras import require

_GRACE = 10  # seconds that requests have to end once a signal has come
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("lab.example")
    (True, True, False, False)
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def listening(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address; port 0 takes a free one."""
    name = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=512)
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--port: expected an address that is free, found {name}:{port}: {reason}") from None


def address_of(bound: socket.socket) -> str:
    """Where a browser on this machine finds it."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: FastAPI, bound: socket.socket, ready: Callable[[], None], started: list[Any] | None = None) -> None:
    """Answer requests until a signal comes; it is sent again when everything has ended.

    Args:
        app: of :func:`ambiseg.serving.create_app`; its models are loaded already or while it starts.
        bound: where requests come in.
        ready: called when they can.
        started: gets the server, whose ``should_exit`` ends it as a signal does.
    """
    require("serve")
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready()

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
            kept: dict[int, Any] = {n: signal.getsignal(n) for n in numbers}
            kept = {n: handler for n, handler in kept.items() if handler not in (signal.SIG_IGN, None)}
            if threading.current_thread() is not threading.main_thread():
                kept = {}
            for number in kept:
                signal.signal(number, self.handle_exit)
            try:
                yield
            finally:
                for number, handler in kept.items():
                    signal.signal(number, handler)
            for number in self._captured_signals[:1]:
                signal.raise_signal(number)

    about: dict[str, Any] = {"http": "h11", "ws": "none", "loop": "asyncio", "lifespan": "on"}
    about |= {"log_level": "critical", "access_log": False, "server_header": False, "proxy_headers": False}
    server = Server(uvicorn.Config(app, timeout_graceful_shutdown=_GRACE, **about))
    if started is not None:
        started.append(server)
    try:
        server.run(sockets=[bound])
    finally:
        bound.close()
