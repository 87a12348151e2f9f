"""What one request adds to the metrics."""

from __future__ import annotations

import re

from prfaas.contracts.openai import Usage
from prfaas.gateway.api.metrics import ApiMetrics, RequestRecord
from prfaas.gateway.request import RequestTrace
from prfaas.scheduler.short_term import LONG


def handed_off() -> RequestRecord:
    """A streamed request that a remote cluster prefilled: 3 s, of which 0.5 s are exposed."""
    trace = RequestTrace(arrived_s=10.0, home="pd", cluster="far", offloaded=True, reason=LONG)
    trace.attempts, trace.cached_tokens, trace.stateless_tokens = 1, 400, 300
    trace.form, trace.nbytes = "native", 5000
    trace.routed_s, trace.prefilled_s, trace.committed_s = 10.25, 12.0, 12.5
    trace.first_token_s = 13.0
    usage = Usage(prompt_tokens=1000, completion_tokens=7)
    return RequestRecord("id", "/v1/completions", "t", trace, 1000, usage, stream=True)


def counted(*records: RequestRecord) -> dict[str, float]:
    """The samples that are not zero, by name and labels."""
    metrics = ApiMetrics()
    for record in records:
        metrics.count(record, "completed", 14.0)
    page = metrics.render().decode()
    found = re.findall(r"^prfaas_gateway_([^#\s]+) (\S+)$", page, re.MULTILINE)
    return {name: float(value) for name, value in found if float(value)}


def test_a_hand_off() -> None:
    found = counted(handed_off())
    remote = '{route="remote"}'
    assert found[f"time_to_first_token_seconds_sum{remote}"] == 3.0
    assert found[f"request_duration_seconds_sum{remote}"] == 4.0
    assert found[f"time_to_route_seconds_sum{remote}"] == 0.25
    assert found[f"exposed_transfer_seconds_sum{remote}"] == 0.5
    assert found[f"uncached_tokens_sum{remote}"] == 600
    assert found[f"prompt_tokens_total{remote}"] == 1000
    assert found[f"cached_tokens_total{remote}"] == 400
    assert found[f"stateless_tokens_total{remote}"] == 300
    assert found[f"output_tokens_total{remote}"] == 7
    assert found[f"handed_off_bytes_total{remote}"] == 5000
    assert found['handoffs_total{form="native",route="remote"}'] == 1
    assert found['tenant_requests_total{outcome="completed",tenant="t"}'] == 1
    labels = 'cluster="far",home="pd",reason="long",route="remote"'
    assert found[f"routed_prompts_total{{{labels}}}"] == 1


def test_bytes_that_moved_count_without_a_first_token() -> None:
    failed = handed_off()
    failed.trace.first_token_s = None
    assert counted(failed)['handed_off_bytes_total{route="remote"}'] == 5000


def test_a_commit_before_the_answer_of_the_prefill_exposes_nothing() -> None:
    early, unanswered = handed_off(), handed_off()
    early.trace.prefilled_s, unanswered.trace.prefilled_s = 12.75, None
    found = counted(early, unanswered)
    assert found['exposed_transfer_seconds_count{route="remote"}'] == 2
    assert 'exposed_transfer_seconds_sum{route="remote"}' not in found, "it is zero"


def test_a_request_that_was_not_routed() -> None:
    record = RequestRecord("id", "/v1/completions", "", RequestTrace(10.0))
    assert counted(record) == {
        'requests_total{outcome="completed",path="/v1/completions",route="none"}': 1
    }


def test_outcomes_are_there_before_they_happen() -> None:
    """Prometheus counts increases from the first value that it has seen."""
    page = ApiMetrics().render().decode()
    for outcome in ("failed", "broken", "shed"):
        labels = f'outcome="{outcome}",path="/v1/chat/completions",route="remote"'
        assert f"prfaas_gateway_requests_total{{{labels}}} 0.0" in page
