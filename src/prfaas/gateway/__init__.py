"""One OpenAI endpoint over a local PD cluster and remote PrfaaS clusters.

    api/         HTTP for clients and operators
    body_workers/  processes that read long request bodies
    dispatch/    one request: attempts, hand-off, answer
    fleet/       members, roles, booked work, links, polling
    planning/    plans, role changes, prefix copies
    client/      HTTP to nodes and kvds

`request` is the seam between `api` and the rest, which `backend` wires together; `router` decides
where requests go. All state is soft: after a restart it is rebuilt from the kvds' reports and
events.
"""
