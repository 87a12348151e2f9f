"""Workload, profiles, clusters and links in; threshold, split, rates, egress, TTFT and gain out."""
