"""GPUs of each part: the plan as a pure function, and real placement groups on made-up nodes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from stepwell.cluster.placement import (
    Bundle,
    Node,
    Placement,
    Plan,
    place,
    plan,
    stable_order,
    wanted_gpus,
)
from stepwell.config.load import load_config
from stepwell.config.run import RunConfig
from stepwell.trainer.errors import ConfigError
from tests.helpers import ray_nodes

ROOT = Path(__file__).parents[2]
DRIVER = Node("10.0.0.2", "a" * 40, 2, is_driver=True)
OTHER = Node("10.0.0.10", "b" * 40, 2)


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def config(*overrides: str) -> RunConfig:
    return load_config(
        "quickstart", ["engine.kind=sglang", "backend.device=auto", "backend.ranks=2", *overrides]
    )


def test_ranks_and_engines_have_gpus_of_their_own() -> None:
    planned = plan(config("cluster.engines=2"), [OTHER, DRIVER])
    assert planned.mode == "disaggregated"
    assert planned.bundles == (1, 1, 1, 1)
    assert [s.bundle for s in planned.ranks] == [0, 1]
    assert [s.bundle for s in planned.engines] == [2, 3]


def test_colocated_they_share_gpu_by_gpu() -> None:
    planned = plan(config("cluster.engines=2", "cluster.placement=colocated"), [DRIVER])
    assert planned.bundles == (1, 1)
    assert [(s.bundle, s.gpus) for s in (*planned.ranks, *planned.engines)] == [
        (0, 0.5),
        (1, 0.5),
        (0, 0.5),
        (1, 0.5),
    ]


def test_a_colocated_engine_of_several_gpus_shares_those_of_as_many_ranks() -> None:
    asked = ("cluster.placement=colocated", "cluster.gpus_per_engine=2", "cluster.engines=2")
    planned = plan(config(*asked, "backend.ranks=4"), [DRIVER, OTHER])
    assert planned.bundles == (1, 1, 1, 1)
    assert [(s.bundle, s.gpus) for s in planned.engines] == [(0, 0.5), (2, 0.5)]
    bundles = [Bundle(i, f"10.0.0.{i // 2}", "ab"[i // 2], (str(i % 2),)) for i in range(4)]
    placement = Placement(planned, tuple(bundles))
    seen = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert [placement.engine_env(i) for i in range(2)] == [seen, seen]
    assert not placement.is_one_machine()
    torn = Placement(planned, (bundles[0], bundles[2], bundles[1], bundles[3]))
    with pytest.raises(ConfigError, match=r"2 GPUs of engine 0 .* on several nodes \(10"):
        torn.engine_env(0)
    assert Placement(plan(config("cluster.engines=2"), [DRIVER, OTHER])).engine_env(0) == {}


@pytest.mark.parametrize(("placement", "share"), [("disaggregated", 1 / 2), ("colocated", 1 / 3)])
def test_each_rank_of_a_critic_shares_the_gpu_of_the_policys_rank(
    placement: str, share: float
) -> None:
    gae = ("algorithm.adv_estimator=gae", f"cluster.placement={placement}", "cluster.engines=2")
    planned = plan(config(*gae), [DRIVER, OTHER])
    assert [s.bundle for s in planned.critic] == [s.bundle for s in planned.ranks] == [0, 1]
    assert {s.gpus for s in (*planned.ranks, *planned.critic)} == {share}
    alone = plan(config(*gae, "backend.ranks=1"), [DRIVER, OTHER])
    assert alone.critic == ()  # in the driver's process, as the policy is


def test_auto_shares_where_there_are_too_few_gpus() -> None:
    assert plan(config(), [DRIVER]).mode == "colocated"
    assert plan(config(), [DRIVER, OTHER]).mode == "disaggregated"


@pytest.mark.parametrize("asked", ["auto", "disaggregated", "colocated"])
def test_without_gpus_every_part_is_a_plain_actor(asked: str) -> None:
    node = Node("127.0.0.1", "this machine", 0, is_driver=True)
    planned = plan(config(f"cluster.placement={asked}"), [node])
    assert planned == Plan("plain")


BARE = [
    Node("10.0.0.10", "b" * 40, 0),
    Node("10.0.0.3", "c" * 40, 0, is_driver=True),
    Node("10.0.0.2", "a" * 40, 0),
]


def on_cpu(*overrides: str) -> RunConfig:
    return load_config("quickstart", ["backend.device=cpu", *overrides])


def test_without_gpus_ranks_and_engines_are_dealt_out_from_the_drivers_node() -> None:
    planned = plan(on_cpu("backend.ranks=2", "cluster.engines=4"), BARE)
    assert planned.mode == "plain"
    assert [node.ip for node in planned.cpu_ranks] == ["10.0.0.3", "10.0.0.2"]
    ips = ["10.0.0.3", "10.0.0.2", "10.0.0.10", "10.0.0.3"]
    assert [node.ip for node in planned.cpu_engines] == ips
    placement = Placement(planned)
    assert [placement.engine_ip(i) for i in range(4)] == ips
    assert placement.engine_options(1) == [{"label_selector": {"ray.io/node-id": "a" * 40}}]
    assert placement.backend_options() == placement.critic_options()
    assert placement.backend_options()["options"][1] == placement.engine_options(1)[0]
    assert placement.parts_by_node() == {
        "c" * 40: "rank 0, engine 0, engine 3",
        "a" * 40: "rank 1, engine 1",
        "b" * 40: "engine 2",
    }
    assert placement.text() == (
        "placement plain; rank 0, engine 0, engine 3 on 10.0.0.3; rank 1, engine 1 on 10.0.0.2; "
        "engine 2 on 10.0.0.10"
    )


def test_a_run_of_one_engine_and_one_rank_is_on_the_drivers_node_alone() -> None:
    alone = Placement(plan(on_cpu(), BARE))
    assert {*alone.parts_by_node()} == {"c" * 40}
    assert alone.text() == ""
    attached = on_cpu("engine.kind=attach", "engine.urls=[http://10.0.0.9:1]", "cluster.engines=3")
    assert plan(attached, BARE) == Plan("plain")
    assert plan(on_cpu("cluster.engines=3"), BARE, serves=False) == Plan("plain")


def test_embedded_engines_are_dealt_out_beside_ranks_on_gpus() -> None:
    planned = plan(config("engine.kind=embedded", "cluster.engines=2"), [OTHER, DRIVER])
    assert (len(planned.ranks), planned.engines, planned.cpu_ranks) == (2, (), ())
    assert [node.ip for node in planned.cpu_engines] == ["10.0.0.2", "10.0.0.10"]


def test_a_trainer_on_cuda_in_a_cluster_without_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"backend\.device is 'cuda'.*--num-gpus"):
        plan(load_config("quickstart", ["backend.device=cuda"]), BARE)


def test_the_embedded_engine_and_a_trainer_on_the_cpu_ask_for_none() -> None:
    assert wanted_gpus(on_cpu()) == (0, 0)
    assert plan(on_cpu(), [DRIVER]).mode == "plain"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("cluster.placement=disaggregated", "cluster.engines=3"), r"needs 5 GPUs .* has 2; use"),
        (("cluster.placement=colocated", "cluster.engines=3"), r"needs 3 GPUs .* has 2; use fewer"),
        (("cluster.gpus_per_engine=3",), r"needs 3 GPUs .* has 2; use fewer"),
        (
            ("cluster.placement=colocated", "cluster.gpus_per_engine=2", "cluster.engines=2"),
            "4 GPUs",
        ),
    ],
)
def test_too_few_gpus_are_an_error_with_the_arithmetic(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(config(*overrides), [DRIVER])


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (("cluster.placement=colocated", "cluster.engines=1"), "set placement to 'disaggregated'"),
        (("cluster.engines=3",), "use fewer engines or ranks"),
    ],
)
def test_gpus_of_a_node_that_engines_do_not_divide_are_an_error_with_what_would_do(
    overrides: tuple[str, ...], remedy: str
) -> None:
    nodes = [DRIVER._replace(gpus=3), OTHER._replace(gpus=3)]
    with pytest.raises(ConfigError, match=rf"not divide the 3 GPUs of .* does, or {remedy}$"):
        plan(config("cluster.gpus_per_engine=2", *overrides), nodes)


def test_an_engine_that_fits_a_node_is_on_one() -> None:
    nodes = [DRIVER, OTHER, OTHER._replace(node_id="c" * 40)]
    planned = plan(config("cluster.gpus_per_engine=2"), nodes)
    assert planned.bundles == (1, 1, 2)
    assert planned.engines == ((2, 2.0),)


NODES = [Node(f"10.0.0.{i}", f"{i}" * 40, 8, is_driver=i == 1) for i in range(1, 5)]


def test_an_engine_larger_than_a_node_is_spread_in_equal_parts() -> None:
    planned = plan(config("cluster.gpus_per_engine=12", "cluster.engines=2"), NODES)
    assert planned.nodes_per_engine == 2
    assert planned.bundles == (1, 1, 6, 6, 6, 6)
    assert planned.engines == ((2, 6), (3, 6), (4, 6), (5, 6))
    bundles = [Bundle(i, f"10.0.0.{i}", "a", ()) for i in range(6)]
    placement = Placement(planned, tuple(bundles))
    assert [placement.engine_ip(i) for i in range(2)] == ["10.0.0.2", "10.0.0.4"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("cluster.gpus_per_engine=11",), r"is 11, which no number of nodes .* 8, 8, 8, 8 GPUs"),
        (("cluster.gpus_per_engine=12", "engine.host=10.0.0.2"), "leave engine.host out"),
        (("cluster.gpus_per_engine=12", "engine.port=30000"), "engine.port is 30000: each"),
    ],
)
def test_an_engine_that_cannot_be_spread_is_refused_with_the_way_to_have_one(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(config(*overrides), NODES)


def test_an_engine_of_another_kind_stays_on_one_node() -> None:
    asked = config("cluster.gpus_per_engine=12")
    of_a_plug_in = asked.engine.model_copy(update={"kind": "plugged"})
    with pytest.raises(ConfigError, match=r"'plugged' stays on one node; .* engine\.urls"):
        plan(asked.model_copy(update={"engine": of_a_plug_in}), NODES)


BUNDLES = [
    Bundle(3, "10.0.0.2", "a", ("0",)),
    Bundle(0, "10.0.0.2", "a", ("2",)),
    Bundle(5, "10.0.0.2", "a", ("10",)),
    Bundle(1, "10.0.0.2", "b", ("0",)),
    Bundle(4, "10.0.0.10", "c", ("0",)),
    Bundle(2, "gpu-node", "d", ("0",)),
    Bundle(6, "10.0.0.2", "a", ("4", "5")),
]


def test_parts_of_a_gpu_that_have_no_number_stand_behind_those_that_have() -> None:
    bundles = [
        Bundle(0, "10.0.0.2", "a", ("MIG-b",)),
        Bundle(1, "10.0.0.2", "a", ("10",)),
        Bundle(2, "10.0.0.2", "a", ("MIG-a",)),
        Bundle(3, "10.0.0.2", "a", ("9",)),
        Bundle(4, "10.0.0.2", "a", ("0", "1")),
    ]
    assert [bundle.number for bundle in stable_order(bundles)] == [3, 1, 2, 0, 4]


@given(st.randoms(use_true_random=False))
def test_the_order_does_not_depend_on_the_numbers_that_ray_gives(rng: random.Random) -> None:
    numbers = rng.sample(range(len(BUNDLES)), len(BUNDLES))
    shuffled = [b._replace(number=n) for b, n in zip(BUNDLES, numbers, strict=True)]
    expected = [b[1:] for b in BUNDLES]
    rng.shuffle(shuffled)
    assert [b[1:] for b in stable_order(shuffled)] == expected


@pytest.fixture(scope="module")
def gpus() -> Iterator[None]:
    """Two nodes of two GPUs each, as Ray is told; the driver is on the first."""
    node = {"num_cpus": 2, "num_gpus": 2}
    with ray_nodes(node, node) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield


@pytest.mark.slow
@pytest.mark.e2e
def test_actors_sit_where_the_plan_says_in_every_start(gpus: None) -> None:
    class Part:
        def where(self) -> tuple[str, tuple[str, ...]]:
            context = ray.get_runtime_context()
            return context.get_node_id(), tuple(map(str, context.get_accelerator_ids()["GPU"]))

    first = place(config("cluster.engines=2"))
    options = [*first.backend_options()["options"]]
    options += [o for i in range(2) for o in first.engine_options(i)]
    parts = [ray.remote(Part).options(num_cpus=0, **o).remote() for o in options]
    seats = ray.get([part.where.remote() for part in parts])
    for part in parts:
        ray.kill(part)
    first.release()
    assert len(set(seats)) == 4  # a GPU each
    assert seats == sorted(seats)
    second = place(config("cluster.engines=2"))
    second.release()
    for placement in (first, second):
        assert [(bundle.node_id, bundle.gpu_ids) for bundle in placement.bundles] == seats


@pytest.mark.slow
@pytest.mark.e2e
def test_the_gpus_of_a_colocated_engine_are_those_of_its_ranks(gpus: None) -> None:
    class Part:
        def where(self) -> tuple[str, str]:
            context = ray.get_runtime_context()
            return context.get_node_id(), ",".join(map(str, context.get_accelerator_ids()["GPU"]))

    asked = ("cluster.placement=colocated", "cluster.gpus_per_engine=2", "cluster.engines=2")
    placement = place(config(*asked, "backend.ranks=4"))
    options = [*placement.backend_options()["options"]]
    options += [o for i in range(2) for o in placement.engine_options(i)]
    parts = [ray.remote(Part).options(num_cpus=0, **o).remote() for o in options]
    places = ray.get([part.where.remote() for part in parts], timeout=60)
    ranks, engines = places[:4], places[4:]
    for i, (node, _) in enumerate(engines):
        own = ranks[2 * i : 2 * i + 2]
        assert {of for of, _ in own} == {node}
        assert placement.engine_env(i) == {"CUDA_VISIBLE_DEVICES": ",".join(g for _, g in own)}
    for part in parts:
        ray.kill(part)
    placement.release()


@pytest.mark.slow
@pytest.mark.e2e
def test_a_critic_with_ranks_starts_where_no_gpu_is_left_over(gpus: None) -> None:
    class Part:
        def where(self) -> tuple[str, tuple[str, ...]]:
            context = ray.get_runtime_context()
            return context.get_node_id(), tuple(map(str, context.get_accelerator_ids()["GPU"]))

    placement = place(config("algorithm.adv_estimator=gae", "cluster.engines=2"))
    options = [placement.backend_options(), placement.critic_options()]
    parts = [
        [ray.remote(Part).options(num_cpus=0, **rank).remote() for rank in of["options"]]
        for of in options
    ]
    policy, critic = [ray.get([p.where.remote() for p in ps], timeout=60) for ps in parts]
    assert policy == critic
    for part in (*parts[0], *parts[1]):
        ray.kill(part)
    placement.release()


@pytest.mark.slow
@pytest.mark.e2e
def test_a_single_rank_keeps_its_gpu_from_the_engines(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "untouched")
    placement = place(config("backend.ranks=1", "cluster.engines=3"))
    try:
        own, *engines = placement.bundles
        assert own.node_id == ray.get_runtime_context().get_node_id()
        assert own.gpu_ids == (os.environ["CUDA_VISIBLE_DEVICES"],)
        assert own[2:] not in [engine[2:] for engine in engines]
        assert engines == stable_order(engines)
        assert placement.backend_options() == {}
    finally:
        placement.release()
