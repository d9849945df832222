"""A hundred volumes at a time, and kills while they are used."""

from driver import MIB, free_ports, mount

VOLUMES = 100
PAGE = 7


def _pages(driver):
    """The identities in ListVolumes, page by page; the driver is killed after each third page."""
    found, token, pages = [], "", 0
    while True:
        page = driver.call("ListVolumes", max_entries=PAGE, starting_token=token)
        assert len(page.entries) <= PAGE
        found += [entry.volume.volume_id for entry in page.entries]
        token, pages = page.next_token, pages + 1
        if not token:
            return found
        if pages % 3 == 0:
            driver.restart()


def a_hundred_volumes_are_used_through_kills_of_driver_and_daemon(subject):
    daemon = subject.daemon()
    port = free_ports(1)
    daemon.post("/v1/portals", {"name": "net", "listen": [f"127.0.0.1:{port}"]})
    backend = f'[[backend]]\nname = "rack1"\nurl = "unix://{daemon.socket}"\nbacking = "data"\nportal = "net"\naddresses = ["127.0.0.1:{port}"]\n'
    driver = subject.driver([backend])
    node = driver.call("NodeGetInfo").node_id
    names = [f"pvc-{place}" for place in range(VOLUMES)]

    def each(step, kills):
        """Run a step for each place, with kills before some of them."""
        answers = []
        for place in range(VOLUMES):
            if place in kills:
                kills[place]()
            answers.append(step(place))
        return answers

    def restart_daemon():
        daemon.kill()
        daemon.start()

    volumes = each(lambda place: driver.create(names[place], MIB), {20: driver.restart, 50: restart_daemon})
    assert len(set(volumes)) == VOLUMES
    assert each(lambda place: driver.create(names[place], MIB), {70: restart_daemon}) == volumes
    listed = _pages(driver)
    assert sorted(listed) == sorted(volumes), (len(listed), len(volumes))

    def publish(place):
        answer = driver.call("ControllerPublishVolume", volume_id=volumes[place], node_id=node, volume_capability=mount())
        return dict(answer.publish_context)

    contexts = each(publish, {33: restart_daemon, 66: driver.restart})
    assert len({context["nqn"] for context in contexts}) == VOLUMES
    fields = [{"volume_id": volume, "publish_context": context, "volume_capability": mount(),
               "staging_target_path": driver.path(f"staging-{place}")}
              for place, (volume, context) in enumerate(zip(volumes, contexts, strict=True))]
    target = lambda place: driver.path(f"target-{place}")
    each(lambda place: driver.call("NodeStageVolume", **fields[place]), {10: driver.restart})
    each(lambda place: driver.call("NodePublishVolume", **fields[place], target_path=target(place)), {40: driver.restart})
    restart_daemon()
    exports = daemon.get("/v1/exports")
    assert len(exports) == VOLUMES and all(len(export["hosts"]) == 1 for export in exports)

    each(lambda place: driver.call("NodeUnpublishVolume", volume_id=volumes[place], target_path=target(place)), {5: driver.restart})
    each(lambda place: driver.call("NodeUnstageVolume", volume_id=volumes[place], staging_target_path=fields[place]["staging_target_path"]),
         {80: driver.restart})
    each(lambda place: driver.call("ControllerUnpublishVolume", volume_id=volumes[place], node_id=node), {15: restart_daemon})
    each(lambda place: driver.call("DeleteVolume", volume_id=volumes[place]), {30: driver.restart, 60: restart_daemon})
    assert daemon.get("/v1/volumes") == daemon.get("/v1/exports") == [] and not _pages(driver)
