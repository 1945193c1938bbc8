"""Who may ask: tokens, names of the service, pages of other origins; and that a client's names are never paths."""

from __future__ import annotations

import io
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambiseg._util.errors import ConfigError
from ambiseg.cli import main
from ambiseg.cli.serve import check_token
from ambiseg.serving.server import address_of, listening
from ambiseg.serving.uploads import shown_name
from tests.services import Service, standing

TOKEN = "right-token"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with standing(token=TOKEN) as (found, _):
        yield found


def ask(service: Service, path: str = "/v1/models", method: str = "GET", **headers: str | bytes) -> httpx.Response:
    """Without the token of the fixture's client; a cookie is named after the port."""
    port = service.url.rpartition(":")[2]
    headers = {
        name: value.replace("ambiseg_token=", f"ambiseg_token_{port}=") if isinstance(value, str) else value
        for name, value in headers.items()
    }
    sent = {name.encode(): value if isinstance(value, bytes) else value.encode() for name, value in headers.items()}
    return httpx.request(method, service.url + path, headers=sent, trust_env=False)


RIGHT = f"Bearer {TOKEN}"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Bearer {TOKEN}x"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": b"Bearer \xff"}, 401),
        ({"Cookie": "ambiseg_token=wrong"}, 401),
        ({"Cookie": "="}, 401),
        ({"Authorization": RIGHT}, 200),
        ({"Authorization": RIGHT.lower().replace(TOKEN.lower(), TOKEN)}, 200),
        ({"Cookie": f"other=1; ambiseg_token={TOKEN}"}, 200),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/"])
def test_every_path_asks_for_the_token(service, path, headers, status):
    answer = ask(service, path, **headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"].startswith("expected the token of this service")
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_without_a_token_only_health_is_told(service):
    assert ask(service, "/healthz").status_code == 200
    for path in ("/v1/predict", "/v1/predictions"):
        assert ask(service, path, "POST").status_code == 401
    assert ask(service, "/v1/predictions/x", "DELETE").status_code == 401
    assert ask(service, "/nowhere").status_code == 401


def test_the_token_moves_from_the_address_into_a_cookie(service):
    answer = ask(service, f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert ask(service, "/?token=wrong").status_code == 401
    assert ask(service, f"/v1/models?token={TOKEN}").status_code == 401
    assert ask(service, f"/?token={TOKEN}", "POST").status_code == 401


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "",
        "[::1",
        "[::1].evil.example",
        "127.0.0.1:80:80",
        "10.0.0.9",
    ],
)
def test_another_host_is_refused(service, host):
    """As a browser sends it when a name of somebody else was made to mean this machine."""
    answer = ask(service, "/healthz", Host=host, Authorization=RIGHT)
    assert answer.status_code == 421 or (host == "" and answer.status_code in (400, 421))


@pytest.mark.parametrize("host", ["localhost:9", "LOCALHOST", "127.0.0.1", "[::1]:8000"])
def test_names_of_this_machine(service, host):
    assert ask(service, "/v1/models", Host=host, Authorization=RIGHT).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://localhost"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "method": "POST"},
    ],
)
def test_a_page_of_another_origin_can_neither_read_nor_trigger_anything(service, headers):
    """Even with the cookie of a user who is logged in."""
    headers = dict(headers)
    method = headers.pop("method", "GET")
    sent = {**headers, "Cookie": f"ambiseg_token_{service.url.rpartition(':')[2]}={TOKEN}"}
    for path, verb in (("/v1/models", method), ("/v1/predict", "POST"), ("/v1/predictions/x", "DELETE")):
        answer = httpx.request(verb, service.url + path, headers=sent, trust_env=False)
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    preflight = {**sent, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert httpx.options(f"{service.url}/v1/predict", headers=preflight, trust_env=False).status_code in (403, 405)
    assert service.jobs.health["running"] == service.jobs.health["waiting"] == 0


def test_its_own_page_may_ask(service):
    own = {"Origin": service.url, "Sec-Fetch-Site": "same-origin", "Cookie": f"ambiseg_token={TOKEN}"}
    assert ask(service, **own).status_code == 200
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Cookie": f"ambiseg_token={TOKEN}"}
    assert ask(service, "/", **link).status_code == 200


def test_headers_of_every_answer(service):
    for path in ("/healthz", "/v1/models", "/nowhere"):
        headers = ask(service, path, Authorization=RIGHT).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]


def test_a_number_is_a_name_where_other_machines_may_ask():
    with standing(token=TOKEN, hosts=("ip", "lab.example")) as (service, _):
        for host, status in (("10.0.0.9:8000", 200), ("[fe80::1]", 200), ("lab.example", 200), ("evil.example", 421)):
            assert ask(service, "/v1/models", Host=host, Authorization=RIGHT).status_code == status


@given(st.text(max_size=300))
def test_a_name_of_a_client_is_never_a_path(given):
    found = shown_name(given)
    assert found
    assert len(found) <= 121
    assert not set(found) & set('/\\\0\n\r"<>')


def test_a_file_of_the_server_with_the_name_of_an_upload_is_not_read(tmp_path, monkeypatch):
    """The headers of TIFF and NIfTI are looked for where a source says: that is a client's word here."""
    import tifffile

    from ambiseg.io.open import open_source
    from ambiseg.io.write import write_map
    from ambiseg.serving.tasks import Pixels, with_header

    tifffile.imwrite(tmp_path / "own.tif", np.zeros((4, 4), np.uint8), resolution=(300, 300))
    tifffile.imwrite(tmp_path / "sent.tif", np.zeros((4, 4), np.uint8), resolution=(72, 72))
    monkeypatch.chdir(tmp_path)
    pixels = Pixels.of(open_source(tmp_path / "sent.tif"))
    (tmp_path / "sent.tif").unlink()
    for header in (pixels.about["header"], b""):
        source = Pixels(pixels.pixels, pixels.about | {"header": header}).source("own.tif")
        write_map(tmp_path / "out.tif", np.zeros((4, 4), np.uint8), with_header(source, tmp_path))
        with tifffile.TiffFile(io.BytesIO((tmp_path / "out.tif").read_bytes())) as file:
            assert file.pages.first.tags[282].value[0] == (72 if header else 1)


# -- the command -------------------------------------------------------------------------------------------------------


def test_other_machines_need_a_token(capsys, monkeypatch):
    monkeypatch.delenv("AMBISEG_TOKEN", raising=False)
    assert main(["serve", "demo", "--host", "0.0.0.0"]) == 2
    assert "--token: expected one where other machines reach the service, found none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: expected the folder of a run, or a model of the package"),
        (["demo", "--token", "short"], "--token: expected 8 to 512 letters"),
        (["demo", "--token", "long enough", "--port", "0"], "--token: expected 8 to 512 letters"),
        (["demo", "--port", "65536"], "--port: expected at most 65,535, found 65536"),
        (["demo", "--host", "no.name.invalid", "--no-token"], "--port: expected an address that is free"),
        (["demo", "--no-token", "--token", "0123456789"], "--no-token: expected no --token beside it"),
    ],
)
def test_options_are_checked(capsys, arguments, said):
    assert main(["serve", *arguments]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1


def test_a_port_that_is_taken(capsys):
    with listening("127.0.0.1", 0) as bound:
        port = address_of(bound).rsplit(":", 1)[1]
        assert main(["serve", "demo", "--port", port]) == 2
    assert "expected an address that is free" in capsys.readouterr().err


def test_tokens_fit_into_headers():
    assert check_token("a-Zed_09.~+/=") == "a-Zed_09.~+/="
    for token in ("1234567", "has space", "semi;colon", 'quo"te-quote', "ümlaut-ümlaut", "x" * 513, "new\nline-line"):
        with pytest.raises(ConfigError):
            check_token(token)
