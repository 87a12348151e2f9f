"""One OpenAI endpoint over a local PD cluster and remote PrfaaS clusters.

`front` speaks HTTP with clients, `back` carries out the life of a request; `ask` is between them.
Soft state only: everything is rebuilt from the kvds' reports and events after a restart.
"""
