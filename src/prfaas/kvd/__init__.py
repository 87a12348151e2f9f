"""kvd, one per host: owns the KV bytes outside the engines, and moves them between hosts.

    engines ── Unix socket ──► local ─┐                       ┌─► link ══► other kvds
                                      ├─► host: pool, leases ─┤
    gateways ──── HTTP ──────► http ──┘                       └── listener ◄══ other kvds

Engines import `client` and `leases` only; everything else runs in the kvd's own process.
"""
