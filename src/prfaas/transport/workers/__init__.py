"""Worker processes that move the bytes of connections, so that TLS and checksums use all cores.

One interpreter encrypts on one core only. A worker is a process that maps the arenas of its kvd and
has sockets of its own. The kvd keeps all state: grants, claims, transfers, and the decision which
bytes go where. It gives a worker orders for one frame at a time, and the worker reports what has
arrived or was sent.

    kvd                                          worker
    WorkerPool ── Serve, Map, UseCredentials ──► main thread      `worker.py`
    WorkerChannel ── orders of one connection ─► its thread       `connection.py`
                  ◄─ reports ──────────────────

A connection's thread in the kvd uses a `WorkerChannel` as it uses a `Channel`, which does the same
work in its own process. A worker that dies costs its connections: the kvd takes the claims of their
frames back, and the sender sends those frames again on other connections.
"""
