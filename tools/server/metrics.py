# SPDX-License-Identifier: Apache-2.0
"""What /metrics says: the cache's counts as they stand, and the server's own account of its requests."""
from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from .answers import Call

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)

# Counts of kvleaf-generate: name, what it is, and the counts that are its labels' values or the only one.
GAUGES: tuple[tuple[str, str, dict[str, str] | str], ...] = (
    ("kvleaf_pool_blocks", "Blocks of the pool", "total"),
    ("kvleaf_blocks", "Blocks of the pool by state",
     {"used": "used", "cached": "cached", "free": "free"}),
    ("kvleaf_blocks_pinned", "Used blocks that no sequence refers to", "pinned"),
    ("kvleaf_blocks_indexed", "Blocks that the prefix index finds", "indexed"),
    ("kvleaf_host_pool_blocks", "Blocks of the pool in host memory", "host_total"),
    ("kvleaf_host_blocks_used", "Blocks of preempted sequences in host memory", "host_used"),
    ("kvleaf_sequences", "Sequences in the cache", "sequences"),
    ("kvleaf_sequences_swapped", "Sequences in host memory", "swapped"),
    ("kvleaf_tokens", "Tokens of all sequences, shared ones counted once a sequence", "tokens"),
    ("kvleaf_slots_wasted", "Slots of used blocks without a token", "slots_wasted"),
    ("kvleaf_requests_running", "Requests in the batch", "running"),
    ("kvleaf_requests_waiting", "Requests that wait for a place or for blocks", "waiting"),
)
COUNTERS = (
    ("kvleaf_block_copies", "Blocks copied on write or for a partial prefix", "copies"),
    ("kvleaf_prefix_tokens_looked_up", "Tokens looked up in the prefix cache", "looked_up"),
    ("kvleaf_prefix_tokens_found", "Tokens found in the prefix cache", "hits"),
    ("kvleaf_evictions", "Cached blocks taken for something else", "evictions"),
    ("kvleaf_blocks_swapped_out", "Blocks written to host memory", "swapped_out"),
    ("kvleaf_blocks_swapped_in", "Blocks read back from host memory", "swapped_in"),
)


class CacheCounts:
    """A collector of the counts that kvleaf-generate answered last."""

    def __init__(self) -> None:
        self.stats: dict[str, float] = {}   # empty: it is down
        self.restarts = 0

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("kvleaf_up", "Whether kvleaf-generate answers", float(bool(self.stats)))
        yield CounterMetricFamily("kvleaf_restarts", "How often kvleaf-generate was started again", self.restarts)
        if not self.stats:
            return
        for name, text, source in GAUGES:
            if isinstance(source, str):
                yield GaugeMetricFamily(name, text, self.stats[source])
                continue
            family = GaugeMetricFamily(name, text, labels=["state"])
            for state, count in source.items():
                family.add_metric([state], self.stats[count])
            yield family
        for name, text, count in COUNTERS:
            yield CounterMetricFamily(name, text, self.stats[count])


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.cache = CacheCounts()
        self.registry.register(self.cache)
        self.requests = self._counter("kvleaf_http_requests", "Requests answered", ("path", "status"))
        self.prompt_tokens = self._counter("kvleaf_prompt_tokens", "Tokens of prompts")
        self.cached_tokens = self._counter("kvleaf_cached_tokens", "Prompt tokens that the prefix cache held")
        self.generated_tokens = self._counter("kvleaf_generated_tokens", "Tokens generated")
        self.held_blocks = self._counter("kvleaf_choice_blocks", "Blocks that each choice held at most, summed up")
        self.shared_blocks = self._counter("kvleaf_choice_blocks_shared", "Of these, blocks that it shared")
        self.first_token = self._histogram("kvleaf_first_token_seconds", "From a call to its first token")
        self.call_seconds = self._histogram("kvleaf_call_seconds", "From a call to its last token")

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=SECONDS)

    def count_call(self, call: Call) -> None:
        self.prompt_tokens.inc(call.usage.prompt)
        self.cached_tokens.inc(call.usage.cached)
        self.generated_tokens.inc(call.usage.generated)
        for choice in call.choices:
            self.held_blocks.inc(choice.usage["peak_blocks"])
            self.shared_blocks.inc(choice.usage["shared_blocks"])
        self.first_token.observe(call.first_token or 0)
        self.call_seconds.observe(call.seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
