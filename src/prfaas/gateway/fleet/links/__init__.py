"""The links between clusters: reports of kvds on their connections, one report per link."""
