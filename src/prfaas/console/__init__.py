"""The drawing of a deployment for a browser: scenes, pages and their assets. Pure; no sockets.

A gateway streams scenes to the live console (`gateway/console`). `prfaas simulate --html` and
`prfaas plan --html` write pages that contain theirs.
"""
