"""A kill of the driver between any two steps: each call, repeated, gives the same answer."""

from driver import SINGLE_WRITER, mount
from freestoned import MIB


def each_call_gives_the_same_answer_after_a_kill(subject):
    daemon, driver = subject.pair()
    staging, target = driver.path("staging"), driver.path("target")

    def twice(name, /, **fields):
        """The answer of a call, which a killed and started driver gives again."""
        first = driver.call(name, **fields)
        driver.restart()
        again = driver.call(name, **fields)
        assert first == again, (name, first, again)
        return again

    made = twice("CreateVolume", name="pvc-1", volume_capabilities=[mount()], capacity_range={"required_bytes": 64 * MIB},
                 parameters={"ctrl-loss-tmo": "60"}).volume
    volume = {"volume_id": made.volume_id}
    node = twice("NodeGetInfo").node_id
    published = twice("ControllerPublishVolume", **volume, node_id=node, volume_capability=mount())
    common = {**volume, "publish_context": published.publish_context, "volume_context": made.volume_context,
              "volume_capability": mount(), "staging_target_path": staging}
    twice("NodeStageVolume", **common)
    twice("NodePublishVolume", **common, target_path=target)
    assert driver.call("NodeGetVolumeStats", **volume, volume_path=target).usage[0].total > 0
    twice("ControllerExpandVolume", **volume, capacity_range={"required_bytes": 128 * MIB})
    twice("NodeExpandVolume", **volume, volume_path=target, capacity_range={"required_bytes": 128 * MIB})
    refusal = driver.refusal("NodeUnstageVolume", **volume, staging_target_path=staging)
    assert refusal.code == "FAILED_PRECONDITION" and target in refusal.message, refusal
    twice("NodeUnpublishVolume", **volume, target_path=target)
    twice("NodeUnstageVolume", **volume, staging_target_path=staging)
    twice("ControllerUnpublishVolume", **volume, node_id=node)
    twice("DeleteVolume", **volume)
    assert daemon.get("/v1/exports") == daemon.get("/v1/volumes") == []


def a_volume_without_its_export_is_completed(subject):
    """CreateVolume is two requests, and DeleteVolume is two: the driver may end between them."""
    daemon, driver = subject.pair()
    volume = driver.create()
    [export] = daemon.get("/v1/exports")
    daemon.delete(f"/v1/exports/{export['name']}")
    assert driver.create() == volume
    [again] = daemon.get("/v1/exports")
    assert export["options"] == again["options"], (export, again)
    daemon.delete(f"/v1/exports/{export['name']}")
    driver.call("ControllerPublishVolume", volume_id=volume, node_id=driver.node(), volume_capability=mount())
    driver.call("ControllerUnpublishVolume", volume_id=volume, node_id=driver.node())
    daemon.delete(f"/v1/exports/{export['name']}")
    driver.call("DeleteVolume", volume_id=volume)
    assert daemon.get("/v1/volumes") == []


def a_volume_is_staged_in_one_way(subject):
    _, driver = subject.pair()
    volume = driver.create()
    answer = driver.call("ControllerPublishVolume", volume_id=volume, node_id=driver.node(), volume_capability=mount())
    stage = {"volume_id": volume, "publish_context": answer.publish_context, "staging_target_path": driver.path("staging")}
    publish = {**stage, "target_path": driver.path("target")}
    refusal = driver.refusal("NodePublishVolume", **publish, volume_capability=mount())
    assert refusal.code == "FAILED_PRECONDITION", refusal
    driver.call("NodeStageVolume", **stage, volume_capability=mount())
    assert driver.refusal("NodeStageVolume", **stage, volume_capability=mount(fs_type="xfs")).code == "ALREADY_EXISTS"
    driver.call("NodePublishVolume", **publish, volume_capability=mount(SINGLE_WRITER))
    other = {**publish, "target_path": driver.path("other")}
    assert driver.refusal("NodePublishVolume", **other, volume_capability=mount(SINGLE_WRITER)).code == "FAILED_PRECONDITION"
    assert driver.refusal("NodePublishVolume", **publish, volume_capability=mount(), readonly=True).code == "ALREADY_EXISTS"
    for target in ("target", "other"):
        driver.call("NodeUnpublishVolume", volume_id=volume, target_path=driver.path(target))
    driver.call("NodeUnstageVolume", volume_id=volume, staging_target_path=driver.path("staging"))
