"""Requests that schemathesis makes from ``/openapi.json``, good and bad: none is a fault of the service.

``AMBISEG_REQUESTS=300 pytest tests/test_serving_schema.py`` makes more of them, for each path.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from ambiseg.serving import Limits
from tests.services import Service, serving

REQUESTS = int(os.environ.get("AMBISEG_REQUESTS", "8"))
_SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
PATHS = [
    ("/healthz", "get"),
    ("/metrics", "get"),
    ("/v1/models", "get"),
    ("/v1/predict", "post"),
    ("/v1/predictions", "post"),
    ("/v1/predictions/{id}", "get"),
    ("/v1/predictions/{id}", "delete"),
    ("/v1/predictions/{id}/slices/{k}", "get"),
    ("/v1/predictions/{id}/files", "get"),
]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving(limits=Limits(queue=1000)) as found:
        yield found


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("path", "method"), PATHS)
def test_no_request_is_a_fault(service, path, method, mode):
    schema: Any = schemathesis.openapi.from_dict(service.client.get("/openapi.json").json())
    schema.config.update(base_url=service.url)
    operation, statuses = schema[path][method.upper()], Counter[int]()

    def send(case: Any) -> None:
        answer = case.call(base_url=service.url)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=[not_a_server_error])
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()) == {"error"}, answer.text
            assert "\n" not in answer.json()["error"]

    strategy = operation.as_strategy(generation_mode=mode)
    few = settings(max_examples=REQUESTS, deadline=None, suppress_health_check=[*_SLOW], database=None)
    try:
        few(given(strategy)(send))()
    except Unsatisfiable:  # nothing can be wrong in a request without parameters
        assert mode == GenerationMode.NEGATIVE
        assert "{" not in path
        assert method == "get"
    print(method, path, mode, dict(statuses))
    assert not [status for status in statuses if status >= 500]


def test_every_path_is_tried(service):
    found = service.client.get("/openapi.json").json()["paths"]
    assert sorted(PATHS) == sorted((path, method) for path, methods in found.items() for method in methods)
