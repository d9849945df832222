"""Zones: volumes lie where their nodes reach them."""

import os

from driver import MIB, Driver, mount

KEY = "freestone.csi/zone"


def _zones(subject):
    """A driver of three backends, two of them in zones, and a node in zone b."""
    daemons = [subject.daemon(member_bytes=size * MIB) for size in (64, 128, 256)]
    places = zip(daemons, ("in-a", "in-b", "everywhere"), ('\nzone = "a"', '\nzone = "b"', ""), strict=True)
    return subject.driver([Driver.backend(daemon, name, 'backing = "data"' + zone) for daemon, name, zone in places], "--zone", "b")


def _wanted(requisite, preferred=()):
    return {"requisite": [{"segments": {KEY: zone}} for zone in requisite],
            "preferred": [{"segments": {KEY: zone}} for zone in preferred]}


def _zones_of(volume):
    return [dict(topology.segments) for topology in volume.accessible_topology]


def a_volume_is_made_in_a_zone_that_its_nodes_reach(subject):
    driver = _zones(subject)
    assert dict(driver.call("NodeGetInfo").accessible_topology.segments) == {KEY: "b"}
    capabilities = driver.call("GetPluginCapabilities").capabilities
    assert any(capability.service.type == capability.service.VOLUME_ACCESSIBILITY_CONSTRAINTS for capability in capabilities)
    fields = {"volume_capabilities": [mount()], "capacity_range": {"required_bytes": MIB}}
    make = lambda name, **more: driver.call("CreateVolume", name=name, **fields, **more).volume
    first = make("v1", accessibility_requirements=_wanted("ab", "ba"))
    assert first.volume_id.startswith("in-b/") and _zones_of(first) == [{KEY: "b"}], first
    assert make("v1", accessibility_requirements=_wanted("ab", "ab")) == first  # as it was made
    refusal = driver.refusal("CreateVolume", name="v1", **fields, accessibility_requirements=_wanted("a"))
    assert refusal.code == "ALREADY_EXISTS" and "in-b" in refusal.message, refusal
    only = make("v2", accessibility_requirements=_wanted("c"))
    assert only.volume_id.startswith("everywhere/") and not _zones_of(only), only
    refusal = driver.refusal("CreateVolume", name="v3", **fields, parameters={"backend": "in-a,in-b"},
                             accessibility_requirements=_wanted("c"))
    assert refusal.code == "RESOURCE_EXHAUSTED" and "zones c" in refusal.message, refusal
    full = driver.call("CreateVolume", name="v4", volume_capabilities=[mount()], capacity_range={"required_bytes": 250 * MIB},
                       parameters={"backend": "in-a,in-b"}, accessibility_requirements=_wanted("ab", "ab")).volume
    assert full.volume_id.startswith("in-b/"), full  # a has no room for it
    listed = {entry.volume.volume_id: _zones_of(entry.volume) for entry in driver.call("ListVolumes").entries}
    assert listed == {first.volume_id: [{KEY: "b"}], full.volume_id: [{KEY: "b"}], only.volume_id: []}, listed
    assert driver.call("ControllerGetVolume", volume_id=first.volume_id).volume.accessible_topology == first.accessible_topology


def a_zone_has_the_room_of_its_backends(subject):
    driver = _zones(subject)
    room = lambda **topology: driver.call("GetCapacity", **topology).available_capacity
    a, b, c = (room(accessible_topology={"segments": {KEY: zone}}) for zone in "abc")
    assert 0 < c < a < b and room() == a + b - c, (a, b, c)


def a_zone_that_is_no_label_is_refused(subject):
    daemon = subject.daemon()
    driver = Driver(os.path.join(subject.scratch, "wrong"), [Driver.backend(daemon, more='backing = "data"\nzone = "a b"')])
    try:
        driver.start()
    except RuntimeError as error:
        assert 'zone="a b"' in str(error), error
    else:
        raise AssertionError("the driver starts")
    finally:
        driver.close()
