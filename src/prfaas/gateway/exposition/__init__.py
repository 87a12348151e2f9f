"""The Prometheus metrics of the gateway's backend, made at each scrape from the state of its parts.
`gateway/api/metrics.py` has those of requests, which are counted when a request ends."""
