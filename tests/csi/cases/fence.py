"""Access of nodes: given by publishing, and ended by unpublishing before its answer."""

from driver import MIB, block, free_ports, mount


def _reads(daemon, context, host):
    """Whether a host can attach the volume of a publish context."""
    device = f"nvme-tcp:address={context['addresses']},nqn={context['nqn']},hostnqn={host},ctrl-loss-tmo=0,kato=0"
    code, _, _ = daemon.cli("info", "--device", device, check=False)
    return code == 0


def a_second_node_waits_until_the_first_has_no_access(subject):
    daemon, driver = subject.pair()
    volume = driver.create()
    publish = {"volume_id": volume, "volume_capability": mount()}
    answer = driver.call("ControllerPublishVolume", node_id=driver.node("a"), **publish)
    context = dict(answer.publish_context)
    assert driver.call("ControllerPublishVolume", node_id=driver.node("a"), **publish) == answer
    assert _reads(daemon, context, driver.host("a")) and not _reads(daemon, context, driver.host("b"))
    refusal = driver.refusal("ControllerPublishVolume", node_id=driver.node("b"), **publish)
    assert refusal.code == "FAILED_PRECONDITION" and driver.host("a") in refusal.message, refusal
    assert not _reads(daemon, context, driver.host("b"))
    driver.call("ControllerUnpublishVolume", volume_id=volume, node_id=driver.node("a"))
    assert not _reads(daemon, context, driver.host("a"))
    assert driver.call("ControllerPublishVolume", node_id=driver.node("b"), **publish) == answer
    assert _reads(daemon, context, driver.host("b"))
    driver.call("ControllerUnpublishVolume", volume_id=volume)  # of every node
    assert not _reads(daemon, context, driver.host("b"))


def volumes_at_a_portal_share_an_address_and_no_host(subject):
    daemon = subject.daemon()
    address = f"127.0.0.1:{free_ports(1)}"
    daemon.post("/v1/portals", {"name": "front", "listen": [address]})
    entry = f'[[backend]]\nname = "rack1"\nurl = "unix://{daemon.socket}"\nbacking = "data"\nportal = "front"\naddresses = ["{address}"]\n'
    driver = subject.driver([entry])
    volumes = {node: driver.create(f"pvc-{node}", size=4 * MIB) for node in ("a", "b", "c")}
    contexts = {}
    for node, volume in volumes.items():
        answer = driver.call("ControllerPublishVolume", volume_id=volume, node_id=driver.node(node), volume_capability=mount())
        contexts[node] = dict(answer.publish_context)
        assert contexts[node]["addresses"] == address
    assert len({context["nqn"] for context in contexts.values()}) == 3
    for node, context in contexts.items():
        assert [other for other in volumes if _reads(daemon, context, driver.host(other))] == [node]
    driver.call("ControllerUnpublishVolume", volume_id=volumes["b"], node_id=driver.node("b"))
    assert not _reads(daemon, contexts["b"], driver.host("b")) and _reads(daemon, contexts["c"], driver.host("c"))
    daemon.kill()
    daemon.start()
    assert _reads(daemon, contexts["a"], driver.host("a")) and not _reads(daemon, contexts["b"], driver.host("b"))


def a_published_volume_is_not_deleted(subject):
    daemon, driver = subject.pair()
    volume = driver.create()
    driver.call("ControllerPublishVolume", volume_id=volume, node_id=driver.node(), volume_capability=block())
    refusal = driver.refusal("DeleteVolume", volume_id=volume)
    assert refusal.code == "FAILED_PRECONDITION" and driver.host() in refusal.message, refusal
    assert len(daemon.get("/v1/exports")) == len(daemon.get("/v1/volumes")) == 1
    driver.call("ControllerUnpublishVolume", volume_id=volume, node_id=driver.node())
    driver.call("DeleteVolume", volume_id=volume)
    driver.call("DeleteVolume", volume_id=volume)
    assert daemon.get("/v1/exports") == daemon.get("/v1/volumes") == []


def secrets_are_used_and_not_shown(subject):
    daemon, driver = subject.pair()
    volume = driver.create()
    secret = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:"
    answer = driver.call("ControllerPublishVolume", volume_id=volume, node_id=driver.node(), volume_capability=mount(),
                         secrets={"dhchap": secret})
    assert not _reads(daemon, dict(answer.publish_context), driver.host())  # it does not authenticate
    stage = {"volume_id": volume, "publish_context": answer.publish_context, "volume_capability": mount(),
             "staging_target_path": driver.path("staging"), "secrets": {"dhchap": secret}}
    driver.call("NodeStageVolume", **stage)
    shown = [str(answer), str(daemon.get("/v1/exports"))]
    for path in (driver.path("log"), daemon.path("freestoned.log")):
        with open(path, encoding="utf-8") as file:
            shown.append(file.read())
    assert not any("ia6zGodOr4" in text for text in shown)
    driver.call("NodeUnstageVolume", volume_id=volume, staging_target_path=driver.path("staging"))
