"""The fleet that the gateway serves with: members, roles, booked work, links, and their polling."""
