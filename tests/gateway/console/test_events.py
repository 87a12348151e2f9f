"""Events of the time line."""

from __future__ import annotations

from msgspec.structs import replace

from prfaas.console.scene import HomeScene, Scene
from prfaas.gateway.console.events import KEPT, EventLog, Moves, events_between
from tests.gateway.console.made_scenes import node, scene


def texts(before: Scene, after: Scene) -> list[tuple[str, str, str]]:
    return [tuple(found) for found in events_between(before, after)]


def with_node(before: Scene, *nodes: object) -> Scene:
    far = replace(before.clusters[1], nodes=nodes)
    return replace(before, clusters=(before.clusters[0], far))


def with_link(before: Scene, **fields: object) -> Scene:
    return replace(before, links=(replace(before.links[0], **fields),))


def test_links() -> None:
    up = scene()
    cut, slow = with_link(up, verdict="cut"), with_link(up, verdict="congested", cause="loss")
    assert texts(up, cut) == [("link", "The link far -> pd is cut.", "far -> pd")]
    assert texts(cut, up) == [("link", "The link far -> pd is restored.", "far -> pd")]
    assert texts(up, slow) == [("link", "The link far -> pd is congested (loss).", "far -> pd")]
    assert texts(slow, up) == [("link", "The link far -> pd is clear again.", "far -> pd")]
    assert texts(up, with_link(up, rate_bps=3.0)) == []


def test_nodes_and_roles() -> None:
    one = scene()
    lost = with_node(one, node(2, role="prefill", status="lost", why="its kvd does not answer"))
    assert texts(one, lost) == [
        ("node", "n2 of far is lost: its kvd does not answer.", "n2"),
    ]
    assert texts(lost, one) == [("node", "n2 of far is in use.", "n2")]
    assert texts(one, with_node(one)) == [("node", "n2 of far has left the fleet.", "n2")]
    assert texts(with_node(one), one) == [("node", "n2 of far has joined the fleet.", "n2")]
    converts = with_node(one, node(2, role="prefill", becomes="decode", status="drains"))
    assert [kind for kind, *_ in texts(one, converts)] == ["node", "role"]
    converted = with_node(one, node(2, role="decode"))
    assert ("role", "n2 of far decodes now.", "n2") in texts(converts, converted)


def test_clusters_plans_and_gateways() -> None:
    one = scene()
    drained = replace(one, clusters=(replace(one.clusters[0], drained=True), one.clusters[1]))
    assert texts(one, drained)[0][:2] == (
        "cluster",
        "The cluster pd is drained: it gets no new requests.",
    )
    assert texts(drained, one)[0][1] == "The cluster pd is in use again."
    home = HomeScene("pd", True, 900.0, 19400.0, 3.21, 0.4, "traffic has changed")
    planned = replace(one, homes=(home,))
    assert texts(one, planned) == [
        (
            "plan",
            "New plan of pd: requests with more than 19,400 uncached tokens are offloaded, "
            "3.21 requests/s (traffic has changed).",
            "pd",
        )
    ]
    lost = replace(home, service="unserved", service_reason="no node of pd decodes")
    unserved = replace(planned, homes=(lost,))
    assert texts(planned, unserved) == [
        ("cluster", "pd is not served: no node of pd decodes.", "pd")
    ]
    assert texts(unserved, planned) == [("cluster", "pd is served as planned again.", "pd")]
    other = replace(planned, homes=(replace(home, threshold_tokens=20.0, waiting=3),))
    assert texts(planned, other) == [], "the short-term loop makes no plan"
    gone = replace(one, gateways=("gateway west does not answer",))
    assert texts(one, gone) == [("gateway", "Gateway west does not answer.", "")]


def test_the_log_keeps_the_latest_events_and_tells_copies_together() -> None:
    log = EventLog()
    up = scene(at_s=0.0)
    assert log.observe(up, {"route": Moves(5, 0, 10, 10)}) == []
    for second in range(1, 2 * KEPT):
        verdict = "cut" if second % 2 else "clear"
        found = log.observe(replace(with_link(up, verdict=verdict), at_s=float(second)), {})
        assert [event.at_s for event in found] == [float(second)]
    kept = log.kept()
    assert len(kept) == KEPT and [e.id for e in kept] == sorted({e.id for e in kept})

    log = EventLog()
    log.observe(up, {"route": Moves(5, 0, 10, 10)})
    assert log.observe(replace(up, at_s=5.0), {"route": Moves(6, 0, 1010, 10)}) == []
    found = log.observe(replace(up, at_s=10.0), {"route": Moves(7, 1, 2010, 2_000_010)})
    assert [event.text for event in found] == [
        "2 prefixes were copied for requests: 2,000 tokens, 2.0 MB.",
        "1 copy of prefixes for requests failed.",
    ]
