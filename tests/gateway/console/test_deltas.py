"""A scene and the deltas after it are the next scene."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from prfaas.console.scene import ClusterScene, HomeScene, LinkScene, NodeScene, Scene, TtftParts
from prfaas.gateway.console.deltas import Delta, apply, delta
from tests.gateway.console.made_scenes import HOSTILE, node, scene

NAMES = st.sampled_from(["a", "b", "c", "d", HOSTILE])
NODES = st.builds(
    NodeScene,
    id=NAMES,
    name=NAMES,
    role=st.sampled_from([None, "prefill", "decode"]),
    status=st.sampled_from(["in use", "drains", "not in use", "lost"]),
    active=st.integers(0, 2),
)
CLUSTERS = st.builds(
    ClusterScene,
    name=st.sampled_from(["pd", "far"]),
    kind=st.just("pd"),
    nodes=st.lists(NODES, max_size=4, unique_by=lambda n: n.id).map(tuple),
    drained=st.booleans(),
)
SCENES = st.builds(
    Scene,
    at_s=st.floats(0, 10),
    model=st.just("m"),
    policy=st.just("paper"),
    clusters=st.lists(CLUSTERS, min_size=1, max_size=2, unique_by=lambda c: c.name).map(tuple),
    links=st.builds(LinkScene, st.just("a"), st.just("b"), backlog_bytes=st.integers(0, 1)).map(
        lambda link: (link,)
    ),
    homes=st.builds(HomeScene, st.just("pd"), waiting=st.integers(0, 1)).map(lambda h: (h,)),
    ttft=st.builds(TtftParts, first_tokens=st.integers(0, 1)),
    in_flight=st.integers(0, 1),
    gateways=st.lists(NAMES, max_size=1).map(tuple),
)


@given(st.lists(SCENES, min_size=2, max_size=5))
def test_a_scene_and_its_deltas_are_the_next_scene(scenes: list[Scene]) -> None:
    shown = msgspec.json.decode(msgspec.json.encode(scenes[0]), type=Scene)
    for before, after in zip(scenes, scenes[1:], strict=False):
        change = delta(before, after)
        if change is None:
            shown = after  # the stream has the whole scene
        else:
            sent = msgspec.json.decode(msgspec.json.encode(change), type=Delta)
            shown = apply(shown, sent)
        assert shown == after


@given(SCENES, SCENES)
def test_a_delta_leaves_out_what_has_not_changed(before: Scene, after: Scene) -> None:
    again = delta(before, replace(before, at_s=11.0))
    assert msgspec.json.encode(again) == b'{"at_s":11.0}'
    change = delta(before, after)
    if change is not None and before.links == after.links:
        assert change.links is msgspec.UNSET


def test_only_the_nodes_that_have_changed_are_sent() -> None:
    one = scene(clusters=(ClusterScene("pd", "pd", tuple(node(n) for n in range(200))),))
    nodes = (*(node(n) for n in range(1, 199)), node(199, active=1), node(200))
    two = replace(one, clusters=(ClusterScene("pd", "pd", nodes),))
    change = delta(one, two)
    assert change is not None and change.nodes is not msgspec.UNSET
    assert change.nodes == {
        "pd": {
            "http://n0:2": None,
            "http://n199:2": node(199, active=1),
            "http://n200:2": node(200),
        }
    }
    assert apply(one, change) == two


def test_other_links_or_an_other_order_need_the_whole_scene() -> None:
    one = scene()
    assert delta(one, replace(one, links=())) is None
    turned = replace(one.clusters[0], nodes=one.clusters[0].nodes[::-1])
    assert delta(one, replace(one, clusters=(turned, one.clusters[1]))) is None
