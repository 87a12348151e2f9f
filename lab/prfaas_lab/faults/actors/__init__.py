"""Hostile parties beside a deployment's ordinary tenants: a tenant, a member and a peer kvd.

They run in one process, which takes at most a quarter of a core: what they achieve beyond that is a
defect of the deployment. Each has exactly what such a party would have, and is bounded by what
docs/security.md concedes to it:

- The *hostile tenant* has its own tenant key and the URLs of the gateways. No client is trusted, so
  it does everything that a client can do.
- The *hostile member* has a stolen member key. It registers kvds of its own and lies in every
  report. A member in use may read prompts and answer with any token; this is conceded. So its
  members always have another model than the deployment, and are therefore never in use.
- The *hostile peer* has the member key and reaches the kvds. The key opens every command of a
  gateway, so commands that are valid are conceded: to read KV (push), to assign a role, to reserve
  all memory. So it sends damaged commands and frames, never a valid role or a push to itself, and
  has few grants at a time.
"""
