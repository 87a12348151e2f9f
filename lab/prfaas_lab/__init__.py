"""The laboratory of prfaas: what only its tests, its benchmarks and its releases use.

It lies in `lab/` of a checkout, is not published, and is not in the wheel of prfaas. It imports the
product; the product never imports it (`tests/test_architecture.py`).

    faults      faults on real processes, hostile actors, the soak
    testing     test doubles, networks with loss, vLLM servers
    fitting     the constants of the estimator, fitted to published times
    studies     runs of deployments that only benchmarks make
    documents   the pages of docs/ that are made from the schema
    machine     how busy this machine was
    cli         python -m prfaas_lab

Its own errors, beside those of `prfaas.errors`:

    prfaas_lab.faults.episode.CampaignFailed   a fault campaign found a broken condition
    prfaas_lab.testing.netns.NetworkError      the test network could not be set up
"""
