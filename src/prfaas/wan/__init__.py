"""The WAN emulator: a user-space relay that gives TCP connections a rate, a delay and faults."""
