from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.kvd.engine_socket.lease_holders import LeaseHolders, LeasesAfterExit

PROCESSES = st.integers(1, 4)
STEPS = st.tuples(st.sampled_from(["add", "join", "end", "exit"]), st.integers(1, 5), PROCESSES)


@given(st.lists(STEPS))
def test_a_lease_ends_once_and_never_while_a_process_uses_it(
    steps: list[tuple[str, int, int]],
) -> None:
    holders = LeaseHolders()
    owner: dict[int, int | None] = {}
    using: dict[int, set[int]] = {}
    for step, lease, process in steps:
        match step:
            case "add" if lease not in using:
                holders.add(lease, "write", process)
                owner[lease], using[lease] = process, {process}
            case "join":
                joined = holders.join(lease, process)
                assert joined == (lease in using and owner[lease] is not None)
                if joined:
                    using[lease].add(process)
            case "end":
                assert not holders.end(lease, process, "read"), "it is a lease of the other kind"
                ended = holders.end(lease, process, "write")
                assert ended == (lease in using and owner[lease] == process)
                if ended:
                    del using[lease]  # the owner ends it for the processes that joined
            case "exit":
                after = holders.process_exited(process)
                for held, processes in list(using.items()):
                    if process in processes:
                        processes.discard(process)
                        owner[held] = None if owner[held] == process else owner[held]
                        assert ((held, "write") in after.ended) == (not processes)
                        assert (held in after.incomplete) == bool(processes)
                        if not processes:
                            del using[held]
        assert len(holders) == len(using)
        for held in range(1, 6):
            for process in range(1, 5):
                assert holders.uses(held, process) == (process in using.get(held, ()))


def test_the_exit_of_a_reader_leaves_the_lease_complete() -> None:
    holders = LeaseHolders()
    holders.add(1, "read", 7)
    assert holders.join(1, 8)
    assert holders.process_exited(8) == LeasesAfterExit((), ())
    assert holders.process_exited(7) == LeasesAfterExit(((1, "read"),), ())
