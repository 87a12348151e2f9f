"""Mutated messages to a kvd, in process and over sockets: `python -m tests.kvd.fuzz`.

The messages are those of valid sessions of engines, gateways and other kvds, with changed bytes,
fields, types, sizes, order and identifiers. A kvd may refuse or accept each of them. It is a defect
when the kvd raises an error that it does not handle, answers with HTTP 500, breaks an invariant of
its pool, or still has a lease, a page in use, a thread or a descriptor after all clients have left.

`conversions.py` does the same with the numbers that steer copies between an engine's memory and the
pages of a kvd.
"""
