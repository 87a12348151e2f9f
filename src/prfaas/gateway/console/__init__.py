"""The console of a gateway: sessions, the stream of scenes, the latest requests, and their paths.

What is drawn, and how, is in `prfaas.console`.
"""
