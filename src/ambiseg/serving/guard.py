"""Who may ask: the address by which the service is called, pages of other origins, the token; and headers of answers.

A page of another site that is open in the same browser can send requests to a service on this machine. It is refused
by ``Origin`` and ``Sec-Fetch-Site``, which browsers set and pages cannot; one whose name was made to mean this machine
(DNS rebinding) by ``Host``, which then has that name. No answer has a header that lets another origin read it.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
import time
from collections.abc import Sequence
from http.cookies import CookieError, SimpleCookie
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse

from ambiseg.serving.metrics import Metrics

COOKIE = "ambiseg_token"
OPEN = ("/healthz",)  # needs no token
_SAFE = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
Scope: TypeAlias = Any


class Guard:
    """Middleware around the whole service.

    Args:
        app: what is guarded.
        token: that every request must bring; ``None``: none.
        hosts: names by which the service may be called, in lower case and without port; ``"*"``: any.
        metrics: that requests are counted in.
    """

    def __init__(self, app: Any, token: str | None, hosts: Sequence[str], metrics: Metrics) -> None:
        self.app, self.token, self.metrics = app, token, metrics
        self.hosts = {host.lower().strip("[]") for host in hosts}

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Refuse, redirect or hand on one request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def guarded(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in _SAFE.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            if (problem := self._problem(scope)) is not None:
                await refuse(guarded, receive, *problem)
            elif (answer := self._welcome(scope)) is not None:
                await answer(scope, receive, guarded)
            else:
                await self.app(scope, receive, guarded)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", None) or "other"
            self.metrics.answered(scope["method"], path, status, time.perf_counter() - started)

    def _problem(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the line of a refusal."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._known(host):
            return 421, "expected a request to this service's own address, found another Host"
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            return 403, "expected a request of this service's own page, found another Origin"
        top = scope["method"] in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not top:
            return 403, "expected a request of this service's own page, found one of another site"
        if self.token is None or scope["path"] in OPEN or self._has_token(headers) or self._brings_token(scope):
            return None
        return 401, "expected the token of this service, found none or another: Authorization: Bearer TOKEN"

    def _known(self, host: str) -> bool:
        if "*" in self.hosts:
            return True
        parts = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d*)?", host.lower())
        if parts is None:
            return False
        name = parts[1] or parts[2] or ""
        if name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return "ip" in self.hosts  # a number is no name that somebody else could give another meaning

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._equal(given.strip()):
            return True
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        name = cookie_of(headers)
        return name in cookies and self._equal(cookies[name].value)

    def _brings_token(self, scope: Scope) -> bool:
        if scope["method"] != "GET" or scope["path"] != "/":
            return False
        query = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=8) if scope["query_string"] else {}
        return self._equal(query.get("token", [""])[0])

    def _equal(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def _welcome(self, scope: Scope) -> RedirectResponse | None:
        """For an address with the token in it: the token moves into a cookie, out of the address."""
        if self.token is None or not self._brings_token(scope):
            return None
        answer = RedirectResponse("/", 303)
        answer.set_cookie(cookie_of(Headers(scope=scope)), self.token, httponly=True, samesite="strict", path="/")
        return answer


def cookie_of(headers: Headers) -> str:
    """The name of the cookie: browsers send those of one host to all its ports, where other services may be.

    >>> cookie_of(Headers({"host": "127.0.0.1:8000"}))
    'ambiseg_token_8000'
    """
    port = headers.get("host", "").rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isascii() and port.isdigit() else COOKIE


async def refuse(send: Any, receive: Any, status: int, message: str, headers: Sequence[tuple[str, str]] = ()) -> None:
    """Answer with an error of one line."""
    body = json.dumps({"error": message}, ensure_ascii=False).encode()
    fields = [("content-type", "application/json"), ("content-length", str(len(body))), *headers]
    if status == 401:
        fields.append(("www-authenticate", "Bearer"))
    start = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})
