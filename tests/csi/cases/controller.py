"""The controller, and the daemon that it asks."""

import concurrent.futures
import os
import socket

from driver import WRITERS, Driver, block, listens_at, mount, write_private
from freestoned import MIB


def an_unknown_parameter_is_named(subject):
    _, driver = subject.pair()
    for fields, word in [
        ({"parameters": {"colour": "red"}}, "colour"),
        ({"parameters": {"qos.iops": "fast"}}, "qos.iops"),
        ({"parameters": {"backend": "rack9"}}, "rack9"),
        ({"mutable_parameters": {"group": "g"}}, "group"),
        ({"parameters": {"backing": "nothing"}}, "nothing"),
    ]:
        refusal = driver.refusal("CreateVolume", name="v", volume_capabilities=[mount()], **fields)
        assert word in refusal.message, refusal
        assert refusal.code == ("NOT_FOUND" if word == "nothing" else "INVALID_ARGUMENT"), refusal


def a_volume_is_made_once_with_its_labels_and_limits(subject):
    daemon, driver = subject.pair()
    parameters = {"qos.iops": "2000:4000", "nr-io-queues": "2", "csi.storage.k8s.io/pvc/name": "web"}
    first = driver.call("CreateVolume", name="pvc-1", volume_capabilities=[mount()], parameters=parameters,
                        capacity_range={"required_bytes": 64 * MIB})
    again = driver.call("CreateVolume", name="pvc-1", volume_capabilities=[mount()], parameters=parameters,
                        capacity_range={"required_bytes": 64 * MIB})
    assert first == again and dict(first.volume.volume_context) == {"nr-io-queues": "2"}, (first, again)
    [volume] = daemon.get("/v1/volumes")
    assert volume["labels"]["csi.name"] == volume["name"] == "pvc-1" and volume["labels"]["csi.pvc"] == "web", volume
    assert volume["qos"]["iops"] == {"per_s": 2000, "burst": 4000}, volume
    [export] = daemon.get("/v1/exports")
    assert export["hosts"] == [] and export["options"]["nqn"].endswith(volume["uuid"]), export
    for other in [{"parameters": {}}, {"parameters": parameters, "capacity_range": {"required_bytes": 65 * MIB}}]:
        assert driver.refusal("CreateVolume", name="pvc-1", volume_capabilities=[mount()], **other).code == "ALREADY_EXISTS"


def a_volume_of_others_is_neither_used_nor_deleted(subject):
    daemon, driver = subject.pair()
    volume = daemon.post("/v1/volumes", {"name": "pvc-1", "backing": "data", "size_bytes": MIB})
    assert driver.refusal("CreateVolume", name="pvc-1", volume_capabilities=[mount()]).code == "ALREADY_EXISTS"
    refusal = driver.refusal("DeleteVolume", volume_id=f"rack1/{volume['uuid']}")
    assert refusal.code == "FAILED_PRECONDITION", refusal
    assert not driver.call("ListVolumes").entries and daemon.get("/v1/volumes") == [volume]


def names_that_the_daemon_refuses_are_kept_as_labels(subject):
    daemon, driver = subject.pair()
    volume = driver.create("Größe/" + "x" * 100)
    assert driver.create("Größe/" + "x" * 100) == volume
    [found] = daemon.get("/v1/volumes")
    assert found["name"].startswith("csi-") and found["labels"]["csi.name"].startswith("Größe/"), found


def without_room_the_next_backend_has_the_volume(subject):
    small, large = subject.daemon(member_bytes=64 * MIB), subject.daemon()
    small.post("/v1/volumes", {"name": "much", "backing": "data", "size_bytes": 128 * MIB})
    driver = subject.driver([Driver.backend(small, "small"), Driver.backend(large, "large")])
    volume = driver.create(size=64 * MIB)
    assert volume.startswith("large/") and driver.create(size=64 * MIB) == volume
    small.delete("/v1/volumes/much")
    assert driver.create(size=64 * MIB) == volume  # although there is room now
    refusal = driver.refusal("CreateVolume", name="huge", volume_capabilities=[mount()],
                             capacity_range={"required_bytes": 1 << 50})
    assert refusal.code == "RESOURCE_EXHAUSTED", refusal
    capacity = driver.call("GetCapacity")
    assert capacity.available_capacity > capacity.maximum_volume_size.value > 256 * MIB, capacity


def the_room_is_that_of_the_backends_that_answer(subject):
    backends = [subject.daemon(), subject.daemon()]
    driver = subject.driver([Driver.backend(daemon, f"b{place}") for place, daemon in enumerate(backends)])
    room = lambda **request: driver.call("GetCapacity", **request).available_capacity
    free = [room(parameters={"backend": name}) for name in ("b0", "b1")]
    assert room() == sum(free)
    backends[0].kill()
    assert room() == room(parameters={"backend": "b1"}) == free[1] > 0
    refusals = [driver.refusal("GetCapacity", parameters={"backend": "b0"})]
    backends[1].kill()
    refusals.append(driver.refusal("GetCapacity"))
    for refusal in refusals:
        assert refusal.code == "UNAVAILABLE", refusal
    for daemon in backends:
        daemon.start()
    assert room() == sum(free)


def lists_have_pages_over_several_backends(subject):
    backends = [subject.daemon(), subject.daemon()]
    driver = subject.driver([Driver.backend(daemon, f"b{place}") for place, daemon in enumerate(backends)])
    volumes = {driver.create(f"pvc-{place}", MIB, parameters={"backend": f"b{place % 2}"}) for place in range(6)}
    for size in (1, 2, 3, 4, 6, 7):
        found, token = [], ""
        while True:
            page = driver.call("ListVolumes", max_entries=size, starting_token=token)
            assert len(page.entries) <= size
            found += [entry.volume.volume_id for entry in page.entries]
            token = page.next_token
            if not token:
                break
        assert len(found) == 6 and set(found) == volumes, (size, found)
    assert driver.refusal("ListVolumes", starting_token="b9/x").code == "ABORTED"


def a_volume_grows_and_changes_its_limits_in_use(subject):
    daemon, driver = subject.pair()
    volume = driver.create()
    grown = driver.call("ControllerExpandVolume", volume_id=volume, capacity_range={"required_bytes": 128 * MIB},
                        volume_capability=block())
    assert grown.capacity_bytes == 128 * MIB and not grown.node_expansion_required, grown
    same = driver.call("ControllerExpandVolume", volume_id=volume, capacity_range={"required_bytes": 100 * MIB})
    assert same.capacity_bytes == 128 * MIB and same.node_expansion_required, same
    driver.call("ControllerModifyVolume", volume_id=volume, mutable_parameters={"qos.iops": "500"})
    driver.call("ControllerModifyVolume", volume_id=volume, mutable_parameters={"qos.bandwidth": "10M"})
    [found] = daemon.get("/v1/volumes")
    assert found["qos"]["iops"]["per_s"] == 500 and found["qos"]["bandwidth"]["per_s"] == 10 * MIB, found
    health = driver.call("ControllerGetVolumeHealth", volume_id=volume).volume_health
    assert health.volume_id == volume and not health.health_statuses, health


def a_daemon_that_is_away_is_named_and_its_volumes_come_back(subject):
    daemon, driver = subject.pair()
    volume = driver.create()
    [before] = daemon.get("/v1/exports")
    assert driver.call("Probe").ready.value
    daemon.kill()
    assert driver.call("Probe").ready.value  # a restart of the driver would not help
    driver.restart()
    assert not driver.call("Probe").ready.value
    refusal = driver.refusal("CreateVolume", name="pvc-2", volume_capabilities=[mount()])
    assert refusal.code == "UNAVAILABLE" and "rack1" in refusal.message, refusal
    assert driver.refusal("DeleteVolume", volume_id=volume).code == "UNAVAILABLE"
    daemon.start()
    assert driver.call("Probe").ready.value
    assert driver.create() == volume
    [after] = daemon.get("/v1/exports")
    assert before["options"] == after["options"], (before, after)


def ports_that_others_have_are_not_used(subject):
    daemon = subject.daemon()
    backend = Driver.backend(daemon, ports=4)
    first = int(backend.split("127.0.0.1:")[1].split("-")[0])
    daemon.post("/v1/volumes", {"name": "v", "backing": "data", "size_bytes": MIB})
    daemon.post("/v1/exports", {"name": "nbd", "kind": "nbd", "volumes": ["v"], "options": {"listen": f"127.0.0.1:{first}"}})
    driver = subject.driver([backend])
    with socket.create_server(("127.0.0.1", first + 2)):  # another program
        for place in (1, 2):
            driver.create(f"pvc-{place}", MIB)
        listens = {export["options"]["listen"] for export in daemon.get("/v1/exports")}
        assert listens == {f"127.0.0.1:{first + place}" for place in (0, 1, 3)}, listens
    driver.create("pvc-3", MIB)
    fields = {"name": "pvc-4", "volume_capabilities": [mount()], "capacity_range": {"required_bytes": MIB}}
    for _ in range(2):
        refusal = driver.refusal("CreateVolume", **fields)
        assert refusal.code == "RESOURCE_EXHAUSTED" and str(first) in refusal.message, refusal


def a_provisioner_makes_publishes_and_deletes_volumes(subject):
    daemon = subject.daemon("--listen", "127.0.0.1:0", "--tokens", _tokens(subject))
    daemon.post("/v1/volumes", {"name": "first", "backing": "data", "size_bytes": MIB})  # a pool for it
    token = os.path.join(subject.scratch, "token")
    backend = Driver.backend(daemon).replace(f"unix://{daemon.socket}", f"http://{listens_at(daemon)}")
    driver = subject.driver([backend + f'token-file = "{token}"\n'])
    assert driver.call("Probe").ready.value
    volume = driver.create()
    assert driver.create() == volume
    driver.call("ControllerPublishVolume", volume_id=volume, node_id=driver.node(), volume_capability=mount())
    driver.call("ControllerUnpublishVolume", volume_id=volume, node_id=driver.node())
    assert driver.call("GetCapacity").available_capacity == daemon.get("/v1/arrays/data")["free_bytes"] > 0
    daemon.post("/v1/devices", {"name": "disk", "spec": daemon.file("disk", 64 * MIB)})
    for backing in ("disk", "nothing"):  # it may prepare none, and does not see which exist
        capacity = driver.call("GetCapacity", parameters={"backing": backing})
        assert capacity.available_capacity == capacity.maximum_volume_size.value == 0, capacity
    driver.call("ControllerModifyVolume", volume_id=volume, mutable_parameters={"qos.iops": "500"})
    limits = {found["name"]: found["qos"] for found in daemon.get("/v1/volumes")}
    assert limits["pvc-1"]["iops"]["per_s"] == 500 and not limits["first"], limits
    first = next(found["uuid"] for found in daemon.get("/v1/volumes") if found["name"] == "first")
    refusal = driver.refusal("ControllerModifyVolume", volume_id=f"rack1/{first}", mutable_parameters={"qos.iops": "500"})
    assert refusal.code == "NOT_FOUND", refusal
    driver.call("DeleteVolume", volume_id=volume)
    assert [found["name"] for found in daemon.get("/v1/volumes")] == ["first"]
    with open(driver.path("log"), encoding="utf-8") as log:
        assert "a-token-of-24-characters" not in log.read()


def _tokens(subject):
    for name, text in (("tokens", "provisioner csi a-token-of-24-characters-and-more\n"),
                       ("token", "a-token-of-24-characters-and-more\n")):
        write_private(os.path.join(subject.scratch, name), text)
    return os.path.join(subject.scratch, "tokens")


def a_volume_that_is_zeroed_slowly_is_asked_for_again(subject):
    daemon, driver = subject.pair()
    fields = {"name": "pvc-1", "volume_capabilities": [mount()], "capacity_range": {"required_bytes": 600 * MIB}}
    with concurrent.futures.ThreadPoolExecutor() as calls:
        first = calls.submit(driver.refusal, "CreateVolume", **fields)
        daemon.wait_for("its job", lambda: daemon.get("/v1/jobs") or first.done())
        if daemon.request("PATCH", "/v1/jobs/pvc-1.create", {"is_paused": True})[0] != 200:
            return "not tested: this machine's disk is too fast"
        refusal = driver.refusal("CreateVolume", **fields)  # meanwhile
        assert refusal.code == "ABORTED" and "in progress" in refusal.message, refusal
        refusal = first.result()
    assert refusal.code == "ABORTED" and "pvc-1.create" in refusal.message and "% done" in refusal.message, refusal
    driver.restart()
    refusal = driver.refusal("CreateVolume", **fields)
    assert refusal.code == "ABORTED" and "pvc-1.create" in refusal.message, refusal
    daemon.patch("/v1/jobs/pvc-1.create", {"is_paused": False})
    answer = driver.call("CreateVolume", **fields)
    assert answer == driver.call("CreateVolume", **fields)
    assert len(daemon.get("/v1/volumes")) == len(daemon.get("/v1/exports")) == 1


def several_nodes_write_to_block_volumes_only(subject):
    daemon = subject.daemon()
    plain = Driver.backend(daemon)
    driver = subject.driver([plain])
    reservable = {"parameters": {"reservations": "on"}}
    refusal = driver.refusal("CreateVolume", name="v", volume_capabilities=[mount(WRITERS)], **reservable)
    assert refusal.code == "INVALID_ARGUMENT" and "MULTI_NODE_MULTI_WRITER" in refusal.message, refusal
    for fields in {}, {"parameters": {"reservations": "off"}}, {"parameters": {"reservations": "yes"}}, reservable:
        refusal = driver.refusal("CreateVolume", name="v", volume_capabilities=[block(WRITERS)], **fields)
        assert refusal.code == "INVALID_ARGUMENT" and "reservations" in refusal.message, refusal
    lonely = driver.create("lonely")
    publish = {"volume_id": lonely, "node_id": driver.node("a"), "volume_capability": block(WRITERS)}
    assert "reservations" in driver.refusal("ControllerPublishVolume", **publish).message
    directory = daemon.path("state/reservations/csi")
    driver = subject.driver([plain + f'reservations = "{directory}"\n'])
    volume = driver.create(capability=block(WRITERS), **reservable)
    [export] = [export for export in daemon.get("/v1/exports") if export["options"].get("reservations")]
    assert export["options"]["reservations"] == directory, export
    for name in "ab":
        driver.call("ControllerPublishVolume", volume_id=volume, node_id=driver.node(name), volume_capability=block(WRITERS))
    [export] = [shown for shown in daemon.get("/v1/exports") if shown["name"] == export["name"]]
    assert export["hosts"] == [driver.host("a"), driver.host("b")], "publishing to a node ends the access of another"
    for other, capability in (volume, mount(WRITERS)), (lonely, block(WRITERS)):
        answer = driver.call("ValidateVolumeCapabilities", volume_id=other, volume_capabilities=[capability])
        assert not answer.HasField("confirmed") and answer.message, answer
    answer = driver.call("ValidateVolumeCapabilities", volume_id=volume, volume_capabilities=[block(WRITERS)])
    assert answer.HasField("confirmed"), answer
