"""Requests with a list of prompts: each prompt is routed as a request of its own, so that each is
offloaded or not by itself, and the answers are merged into one.

    merging     many answers to one: choices, ids and usage; pure
    fan_out     the routed requests of one list, under way
"""
