"""Fault injection on several PD clusters: their gateways, their sizes, and cluster-wide faults."""
