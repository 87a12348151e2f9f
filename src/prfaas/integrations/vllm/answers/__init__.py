"""Kept answers: the state of prompt and answer stays in the kvd, and later prompts resume there.

boundaries   pure: at which lengths states are copied, and what an answer consists of
keeper       the scheduler's side: which requests are kept, their slots and leases
slots        a worker's side: the copies at boundaries, and the writes of ended answers
lookups      the scheduler's side: prefixes in the kvd for requests that are not handed off
"""
