"""What the gateway knows of its nodes and links: members, polls, link reports, prefill work."""
