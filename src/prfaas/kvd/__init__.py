"""kvd, one process per host: owns the KV bytes outside the engines, and moves them between hosts.

    engines ── Unix socket ──► engine_socket ─┐                         ┌─► links ═════► other kvds
                                              ├─► store: pool, leases ──┤
    gateways ─── HTTP ───────► http_api ──────┘                         └── listener ◄══ other kvds

Engines import `engine_socket.client` and `engine_socket.leases` only; the rest runs in the process
of the kvd.
"""
