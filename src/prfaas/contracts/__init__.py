"""Contracts between processes: each message that crosses a process boundary has its one typed home
here."""
