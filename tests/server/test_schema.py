"""The server against requests made from its own OpenAPI schema: no 5xx, no hang."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings

from tests.server.servers import Server, running, wait_for

pytestmark = pytest.mark.timeout(300)

EXAMPLES = 20  # for each operation


def test_no_request_that_the_schema_can_make_is_answered_by_a_5xx(shared: Server) -> None:
    status, raw = shared.get("/openapi.json")
    assert status == 200
    schema = schemathesis.openapi.from_dict(raw)
    statuses: Counter[tuple[str, int]] = Counter()
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/health",
        "/version",
        "/metrics",
        "/tokenize",
        "/detokenize",
        "/debug/scheduler",
    }
    for operation in operations:

        @hypothesis.given(case=operation.as_strategy())
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        def probe(case: Any) -> None:
            if isinstance(case.body, dict) and case.path.startswith("/v1/"):  # long answers say nothing more
                given = case.body.get("max_tokens")
                case.body["max_tokens"] = 4 if given is None else min(given, 4) if isinstance(given, int) else given
                if isinstance(case.body.get("max_completion_tokens"), int):
                    case.body["max_completion_tokens"] = min(case.body["max_completion_tokens"], 4)
            response = case.call(base_url=shared.url, timeout=30)
            statuses[case.path, response.status_code] += 1
            assert response.status_code < 500, (case.as_curl_command(), response.text)

        probe()
    assert len({path for path, _ in statuses}) == len(operations)
    assert any(path == "/v1/completions" and status == 400 for path, status in statuses)
    wait_for(shared.idle)
    shared.check_balance()
    shared.check_quiet()


@pytest.mark.slow
def test_many_more_of_them() -> None:
    global EXAMPLES
    EXAMPLES = 600
    with running("--enable-ui") as server:
        test_no_request_that_the_schema_can_make_is_answered_by_a_5xx(server)
