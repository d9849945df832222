"""freestone-csi gc: volumes that the cluster has forgotten."""

import subprocess

from driver import FREESTONE_CSI, MIB, Driver, mount


def _gc(driver, handles, *arguments, check=True):
    command = [FREESTONE_CSI, "gc", "--backends", driver.path("backends.toml"), "--handles", "-", *arguments]
    done = subprocess.run(command, input="\n".join(handles), capture_output=True, text=True, timeout=600)
    assert (done.returncode == 0) == check, done
    return done.stdout.splitlines(), done.stderr


def volumes_without_a_handle_are_listed_and_deleted_when_listed_before(subject):
    daemons = [subject.daemon(), subject.daemon()]
    driver = subject.driver([Driver.backend(daemon, f"b{place}") for place, daemon in enumerate(daemons)])
    daemons[0].post("/v1/volumes", {"name": "other", "backing": "data", "size_bytes": MIB})
    parameters = {"csi.storage.k8s.io/pvc/name": "web", "csi.storage.k8s.io/pvc/namespace": "shop"}
    kept, used, lost = (driver.create(name, MIB, parameters={**parameters, "backend": "b0"}) for name in ("kept", "used", "lost"))
    elsewhere = driver.create("elsewhere", MIB, parameters={"backend": "b1"})
    driver.call("ControllerPublishVolume", volume_id=used, node_id=driver.node(), volume_capability=mount())

    listed, _ = _gc(driver, [kept, "other-driver-handle"])
    assert {line.split("\t")[0] for line in listed} == {used, lost, elsewhere}, listed
    assert f"{lost}\t{MIB}\tlost\tshop/web" in listed and f"{elsewhere}\t{MIB}\telsewhere\t/" in listed, listed
    earlier = driver.path("orphans")
    with open(earlier, "w", encoding="utf-8") as file:
        file.write("\n".join(listed))
    late = driver.create("late", MIB, parameters={"backend": "b0"})  # its handle is not known yet

    done, error = _gc(driver, [kept, elsewhere], "--delete", earlier, check=False)
    assert {line.split("\t")[0] for line in done} == {lost, late}, done
    assert [line.split("\t")[0] for line in done if line.endswith("\tdeleted")] == [lost], done
    assert used in error and driver.host() in error, error  # a host has access to it
    assert {entry.volume.volume_id for entry in driver.call("ListVolumes").entries} == {kept, used, late, elsewhere}
    assert {volume["name"] for volume in daemons[0].get("/v1/volumes")} == {"other", "kept", "used", "late"}


def handles_of_another_cluster_delete_nothing(subject):
    daemon, driver = subject.pair()
    volume = driver.create()
    earlier = driver.path("orphans")
    with open(earlier, "w", encoding="utf-8") as file:
        file.write(volume)
    for handles in ([], ["pvc-1"], [volume.replace("rack1", "rack2")]):
        _, error = _gc(driver, handles, "--delete", earlier, check=False)
        assert "--allow-none" in error, error
    assert [found["name"] for found in daemon.get("/v1/volumes")] == ["pvc-1"]
    done, _ = _gc(driver, [], "--delete", earlier, "--allow-none")
    assert done and daemon.get("/v1/volumes") == daemon.get("/v1/exports") == []


def a_backend_that_does_not_answer_is_an_error(subject):
    daemon, driver = subject.pair()
    volume = driver.create()
    daemon.kill()
    listed, error = _gc(driver, [volume], check=False)
    assert not listed and "rack1" in error, (listed, error)
    daemon.start()
