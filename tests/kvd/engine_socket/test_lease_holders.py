from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.kvd.engine_socket.lease_holders import LeaseHolders, LeasesAfterExit

PROCESSES = st.integers(1, 4)
STEPS = st.tuples(st.sampled_from(["take", "join", "end", "gone"]), st.integers(1, 5), PROCESSES)


@given(st.lists(STEPS))
def test_a_lease_ends_once_and_never_under_a_process_that_touches_it(
    steps: list[tuple[str, int, int]],
) -> None:
    holders = LeaseHolders()
    owner: dict[int, int | None] = {}
    touching: dict[int, set[int]] = {}
    for step, lease, process in steps:
        match step:
            case "take" if lease not in touching:
                holders.add(lease, "write", process)
                owner[lease], touching[lease] = process, {process}
            case "join":
                joined = holders.join(lease, process)
                assert joined == (lease in touching and owner[lease] is not None)
                if joined:
                    touching[lease].add(process)
            case "end":
                ended = holders.end(lease, process)
                assert (ended is not None) == (lease in touching and owner[lease] == process)
                if ended:
                    del touching[lease]  # the owner vouches for those who joined
            case "gone":
                lost = holders.process_exited(process)
                for held, processes in list(touching.items()):
                    if process in processes:
                        processes.discard(process)
                        owner[held] = None if owner[held] == process else owner[held]
                        assert ((held, "write") in lost.ended) == (not processes)
                        assert (held in lost.incomplete) == bool(processes)
                        if not processes:
                            del touching[held]
        assert len(holders) == len(touching)
        for held in range(1, 6):
            for someone in range(1, 5):
                assert holders.uses(held, someone) == (someone in touching.get(held, ()))


def test_a_reader_that_goes_harms_nobody() -> None:
    holders = LeaseHolders()
    holders.add(1, "read", 7)
    assert holders.join(1, 8)
    assert holders.process_exited(8) == LeasesAfterExit((), ())
    assert holders.process_exited(7) == LeasesAfterExit(((1, "read"),), ())
