"""The Helm chart, as helm renders it: golden files, the schemas of Kubernetes, and the driver with its files.

UPDATE=1 writes the golden files anew."""

import difflib
import glob
import json
import os
import subprocess
import tomllib

import kubernetes_validate
import paths
import yaml
from driver import FREESTONE_CSI, Driver, listens_at, mount, write_private
from freestoned import MIB

HELM = os.path.join(paths.REPO, "target", "tools", "bin", "helm")
CHART = os.path.join(paths.REPO, "packaging", "helm", "freestone-csi")
VALUES = sorted(glob.glob(os.path.join(paths.REPO, "tests", "csi", "chart", "*.yaml")))
# The oldest one with VolumeAttributesClass, one with its first stable version, and the newest one with schemas.
KUBERNETES = ("1.31", "1.34", "1.37")
RUN_TIMEOUT_S = 600  # bounds failures alone
SECRETS = "/etc/freestone-csi"


def _helm(subject, *arguments):
    """Run helm without the settings of the caller; returns its exit code and what it says."""
    home = {key: os.path.join(subject.scratch, key) for key in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")}
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, env={**os.environ, **home})
    return done.returncode, done.stdout, done.stderr


def _text(subject, *arguments, kubernetes="1.34"):
    code, text, error = _helm(subject, "template", "csi", CHART, "--namespace", "storage", "--kube-version", f"{kubernetes}.0", *arguments)
    assert code == 0, error
    return text


def _objects(subject, *arguments, **more):
    return [found for found in yaml.safe_load_all(_text(subject, *arguments, **more)) if found]


def _of(values):
    return os.path.basename(values).removesuffix(".yaml")


def it_is_rendered_as_the_golden_files_say(subject):
    for values in VALUES:
        text, golden = _text(subject, "--values", values), values.replace(".yaml", ".golden")
        if os.environ.get("UPDATE"):
            with open(golden, "w", encoding="utf-8") as file:
                file.write(text)
        with open(golden, encoding="utf-8") as file:
            wanted = file.read()
        changes = list(difflib.unified_diff(wanted.splitlines(), text.splitlines(), golden, "rendered", lineterm="", n=1))
        assert not changes, "\n".join(changes[:60])


def helm_lint_finds_nothing(subject):
    for values in VALUES:
        code, text, error = _helm(subject, "lint", "--strict", CHART, "--values", values)
        assert code == 0, text + error


def every_object_fits_the_schemas_of_kubernetes(subject):
    for values in VALUES:
        for version in KUBERNETES:
            objects = _objects(subject, "--values", values, kubernetes=version)
            for found in objects:
                kubernetes_validate.validate(found, version, strict=True)
            names = [(found["kind"], found["metadata"].get("namespace"), found["metadata"]["name"]) for found in objects]
            assert len(set(names)) == len(names), names


def wrong_values_are_refused_by_their_name(subject):
    good = VALUES[[_of(values) for values in VALUES].index("portal")]
    cases = [
        ('colour="red"', "colour"),
        ('image.repository=""', "repository"),
        ("backends=[]", "backends"),
        ('existingSecret="other"', "existingSecret"),
        ('backends[0].listen="10.0.0.5:1"', "backends"),
        ('backends[0].url="ftp://host"', "url"),
        ('backends[0].token-file="/x"', "token-file"),
        ('backends[0].zone="a/b"', "zone"),
        ('driverName="Upper"', "driverName"),
        ("controller.replicas=0", "replicas"),
        ('node.backend="fake"', "backend"),
        ('node.kata="yes"', "kata"),
        ('node.kubeletDir="relative"', "kubeletDir"),
        ('node.hostNqn="nqn.a,hostnqn=b"', "hostNqn"),
        ('storageClasses=[{"name":"a","parameters":{"nr-io-queues":4}}]', "nr-io-queues"),
        ('rbac.publishSecrets=[{"name":"a"}]', "namespace"),
    ]
    for case, word in cases:
        code, _, error = _helm(subject, "template", "csi", CHART, "--values", good, "--set-json", case)
        assert code != 0 and word in error, (case, error)
    code, _, error = _helm(subject, "template", "csi", CHART)
    assert code != 0 and "repository" in error, error


def _pods(objects):
    return {(found["kind"], found["metadata"]["name"]): found["spec"]["template"]["spec"]
            for found in objects if found["kind"] in ("Deployment", "DaemonSet")}


def the_driver_knows_its_arguments_and_images_are_named_once(subject):
    for values in VALUES:
        for where, pod in _pods(_objects(subject, "--values", values)).items():
            containers = {container["name"]: container for container in pod["containers"]}
            command = [argument.replace("$(NODE_NAME)", "worker-1") for argument in containers["driver"]["args"]]
            done = subprocess.run([FREESTONE_CSI, *command, "--version"], capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
            assert done.returncode == 0 and done.stdout.startswith("freestone-csi "), (where, done.stderr)
            for name, container in containers.items():
                tag = container["image"].rpartition(":")[2]
                assert tag and tag != "latest" and "/" not in tag, (where, name, container["image"])
    with open(os.path.join(CHART, "values.yaml"), encoding="utf-8") as file:
        lines = file.read().splitlines()
    images = [line for line in lines if "registry.k8s.io" in line]
    assert len(images) == 6, images
    for template in glob.glob(os.path.join(CHART, "templates", "*")):
        with open(template, encoding="utf-8") as file:
            assert "registry.k8s.io" not in file.read(), template


def the_version_is_that_of_the_workspace(subject):
    version = subprocess.run([os.path.join(paths.REPO, "packaging", "version")], check=True, capture_output=True, text=True).stdout.strip()
    with open(os.path.join(CHART, "Chart.yaml"), encoding="utf-8") as file:
        chart = yaml.safe_load(file)
    assert chart["version"] == chart["appVersion"] == version, chart


def nodes_see_the_devices_and_mounts_of_their_machine(subject):
    """Each of these was missed by a driver once."""
    for values in VALUES:
        pods = [pod for (kind, _), pod in _pods(_objects(subject, "--values", values)).items() if kind == "DaemonSet"]
        assert len(pods) == (2 if _of(values) == "full" else 1)
        for pod in pods:
            driver = next(container for container in pod["containers"] if container["name"] == "driver")
            paths_of_host = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
            mounts = {entry["mountPath"]: entry for entry in driver["volumeMounts"]}
            for path in ("/dev", "/sys", "/run/freestone-csi"):
                assert paths_of_host[mounts[path]["name"]] == path, (path, mounts)
            kata = "/run/kata-containers/shared/direct-volumes"
            if _of(values) == "kata":
                for path in (kata, "/run/freestone"):
                    assert paths_of_host[mounts[path]["name"]] == path, (path, mounts)
            else:
                assert kata not in mounts, mounts
            kubelet = next(entry for entry in mounts.values() if entry.get("mountPropagation"))
            assert kubelet["mountPropagation"] == "Bidirectional" and kubelet["mountPath"].endswith("/kubelet"), kubelet
            # The same path inside and outside: kubelet names paths of its own.
            assert paths_of_host[kubelet["name"]] == kubelet["mountPath"], kubelet
            assert pod["hostNetwork"] and driver["securityContext"]["privileged"] and not pod["automountServiceAccountToken"]
            registrar = next(container for container in pod["containers"] if container["name"] == "registrar")
            socket = next(text for text in registrar["args"] if "registration-path" in text).partition("=")[2]
            assert os.path.dirname(socket) == paths_of_host["socket"], socket


def accounts_have_no_more_rights_than_sidecars_take(subject):
    for values in VALUES:
        objects = _objects(subject, "--values", values)
        bound = [subject["name"] for found in objects if found["kind"].endswith("RoleBinding") for subject in found["subjects"]]
        assert not any("node" in name for name in bound), bound
        for role in (found for found in objects if found["kind"] in ("Role", "ClusterRole")):
            for rule in role["rules"]:
                assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"], rule
                assert "secrets" not in rule["resources"] or rule["resourceNames"] and rule["verbs"] == ["get"], rule
                changes = {"create", "update", "patch", "delete"} & set(rule["verbs"])
                core = {"nodes", "pods", "csinodes", "storageclasses"} & set(rule["resources"])
                assert not (changes and core), rule
        for pod in _pods(objects).values():
            for container in pod["containers"]:
                if not container["securityContext"].get("privileged"):
                    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, container


def the_driver_starts_with_the_files_of_the_secret(subject):
    token = 'a "token" of \\ 24 characters'.replace(" ", "-")
    tokens = os.path.join(subject.scratch, "tokens")
    write_private(tokens, f"provisioner csi {token}\n")
    daemon = subject.daemon("--listen", "127.0.0.1:0", "--tokens", tokens)
    daemon.post("/v1/volumes", {"name": "first", "backing": "data", "size_bytes": MIB})
    plain = tomllib.loads(Driver.backend(daemon))["backend"][0]
    backend = {"name": "rack1", "url": f"http://{listens_at(daemon)}", "token": token, "backing": "data", "listen": plain["listen"]}
    objects = _objects(subject, "--set-json", f"backends={json.dumps([backend])}", "--set", "image.repository=x")
    secret = next(found for found in objects if found["kind"] == "Secret")
    folder = os.path.join(subject.scratch, "secret")
    os.mkdir(folder)
    for name, text in secret["stringData"].items():
        write_private(os.path.join(folder, name), text.replace(SECRETS, folder))
    with open(os.path.join(folder, "backends.toml"), encoding="utf-8") as file:
        driver = subject.driver([file.read()])
    volume = driver.create("pvc-1", MIB)
    driver.call("ControllerPublishVolume", volume_id=volume, node_id=driver.node(), volume_capability=mount())
    assert daemon.get("/v1/volumes/pvc-1")["label"] == "csi"
