"""Kubernetes: an Indexed Job of one pod a node, each of which runs `vitscale launch`.

Rendering the objects asks nothing of a cluster; kubectl submits them.
"""

import hashlib
import math
import posixpath
import re
import subprocess
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, Field

from vitscale.ground.errors import EXIT_DONE, RecipeError
from vitscale.ground.storage import is_url, without_file_scheme
from vitscale.launch.clusters import Job, checked_recipe, launch_command, read_options
from vitscale.launch.ends import EXIT_PREEMPTED, EXIT_RETRY, FINAL
from vitscale.launch.nodes import DEFAULT_PORT
from vitscale.recipe.strict_yaml import dump_yaml
from vitscale.runs.names import default_run_dir

Object = dict[str, Any]

_CONTAINER = "vitscale"
_JOB_OF_A_POD = "batch.kubernetes.io/job-name"  # a label that the Job's controller sets
_NODE = "$(JOB_COMPLETION_INDEX)"  # which the kubelet expands
_RECIPE_FOLDER = "/etc/vitscale"
_LONGEST_NAME = 40  # names of pods and of their hosts are longer, and may have 63 characters
_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"


def _matching(pattern: str, most: int, expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if len(text) > most or not re.fullmatch(pattern, text):
            raise ValueError(f"expected at most {most} {expected}")
        return text

    return AfterValidator(check)


_Name = _matching(_LABEL, _LONGEST_NAME, "of a-z, 0-9 and -, a letter first and no - at the end")
_Namespace = _matching(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", 63, "of a-z, 0-9 and -, no - at the ends")
_ObjectName = _matching(_SUBDOMAIN, 253, "of a-z, 0-9, - and dots, a letter or digit at the ends of every part")
_Image = _matching(r"[\w][\w./:@-]*", 4096, "characters of an image's name, such as registry.example/vitscale:1")
_Claim = _matching(rf"{_SUBDOMAIN}(:/[^:/][^:]*)?", 4096, "characters CLAIM or CLAIM:/MOUNT")


class KubernetesOptions(BaseModel):
    """`--cluster-option`s of this cluster."""

    image: Annotated[str, _Image]  # the pods' image, with `vitscale` on its path
    pvc: Annotated[str, _Claim]  # CLAIM[:MOUNT], the volume that all pods see at MOUNT and work in
    name: Annotated[str, _Name] | None = None  # of all objects; by default the recipe's
    namespace: Annotated[str, _Namespace] | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None  # of a pod, if not one a rank; 0 for ranks on CPUs
    user: Annotated[int, Field(ge=0, le=2**31 - 1)] = 1000  # and group, whatever the image's; 0 for root
    secret: Annotated[str, _ObjectName] | None = None  # a secret whose entries become environment variables
    grace_s: Annotated[int, Field(ge=1)] = 600  # seconds that a pod has to save when it is told to end
    cluster_domain: Annotated[str, _ObjectName] = "cluster.local"  # the end of all names in the cluster's DNS

    @property
    def mount(self) -> PurePosixPath:
        """Where pods see the volume."""
        return PurePosixPath(posixpath.normpath(self.pvc.partition(":")[2] or "/workspace"))


def render(job: Job) -> str:
    """The objects in YAML, as `kubectl apply -f -` takes them."""
    return _yaml(_objects(job))


def submit(job: Job) -> int:
    """Submit the objects and return. Raises `RecipeError` if kubectl does not take them or the same job is there."""
    objects = _objects(job)
    try:
        answer = subprocess.run(["kubectl", "apply", "-f", "-"], input=_yaml(objects), capture_output=True, text=True)
    except FileNotFoundError:
        raise RecipeError(
            "kubectl is not installed here; --dry-run prints the objects, to be submitted in another way"
        ) from None
    print(answer.stdout, end="")
    metadata = objects[-1]["metadata"]
    name = f"{objects[-1]['kind'].lower()}/{metadata['name']}"
    where = f" -n {metadata['namespace']}" if "namespace" in metadata else ""
    again = f"kubectl delete {name}{where}, and repeat the command: the run continues, because its directory remains"
    if answer.returncode:
        hint = f". Is there an earlier one? {again}" if "immutable" in answer.stderr else ""
        raise RecipeError(f"kubectl apply failed: {answer.stderr.strip()}{hint}")
    if not answer.stdout.rstrip().endswith("created"):
        raise RecipeError(
            f"{name} already exists, running or ended, and is not started again. To start it again: {again}"
        )
    return EXIT_DONE


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _checked_options(job: Job) -> KubernetesOptions:
    """The job's checked options. Raises `RecipeError` for what a cluster would refuse, or do otherwise than meant."""
    recipe, options, what = checked_recipe(job, "k8s"), read_options(job, KubernetesOptions), job.what
    if what.ranks is None:
        raise RecipeError(
            "--cluster k8s needs --ranks, the number of GPUs per node: a pod gets only as many as it requests"
        )
    if what.resume == "never":
        raise RecipeError("--resume never cannot be used with --cluster k8s: a restarted pod continues the run")
    mount, run_dir = options.mount, what.directory
    if not _is_below(mount, mount / run_dir):
        raise RecipeError(
            f"--run-dir {run_dir} is not below {mount}, where the claim is mounted: it would be lost with its pod"
        )
    above = None if what.smoke else without_file_scheme(recipe.checkpoint.dir or "")
    if above and not is_url(above) and (above.startswith("~") or not _is_below(mount, mount / above)):
        raise RecipeError(
            f"checkpoint.dir {above} is not below {mount}, where the claim is mounted: checkpoints would be lost with "
            f"their pod. Choose a folder there, or a URL"
        )
    return options


def _is_below(mount: PurePosixPath, path: PurePosixPath) -> bool:
    return PurePosixPath(posixpath.normpath(path)).is_relative_to(mount)


def _name_of(job: Job) -> str:
    stem = default_run_dir(job.what.recipe, smoke=job.what.smoke).name
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    if len(name) > _LONGEST_NAME or not re.fullmatch(_LABEL, name):
        raise RecipeError(
            f"the name {name!r}, taken from the recipe, is not a valid job name: use --cluster-option name=NAME"
        )
    return name


# ---- Objects ---------------------------------------------------------------------------------------------------------


def _objects(job: Job) -> list[Object]:
    """The objects in the order in which they are needed; the job itself is the last one."""
    options = _checked_options(job)
    name, nodes = options.name or _name_of(job), job.nodes or 1
    objects = [
        *([_recipe_file(job, name)] if _is_own_recipe(job) else []),
        _network_policy(name),
        *([_service(name)] if nodes > 1 else []),
        _indexed_job(job, options, name, nodes),
    ]
    if options.namespace is not None:
        for each in objects:
            each["metadata"]["namespace"] = options.namespace
    return objects


def _network_policy(name: str) -> Object:
    """Lets only the job's own pods connect to them: torch's store and the ranks ask nobody who they are."""
    pods = {"matchLabels": {_JOB_OF_A_POD: name}}
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": pods}]}]}
    return _object("networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)


def _service(name: str) -> Object:
    """Gives the pods of a Job names, even before they are ready, as they must meet to become ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {_JOB_OF_A_POD: name},
        "ports": [{"name": "launch", "port": DEFAULT_PORT}],
    }
    return _object("v1", "Service", name, spec=spec)


def _indexed_job(job: Job, options: KubernetesOptions, name: str, nodes: int) -> Object:
    # The full name of a pod is in its own /etc/hosts from the start; a shorter one has to wait for DNS.
    master = f"{name}-0.{name}.$(POD_NAMESPACE).svc.{options.cluster_domain}"
    pod = _pod(job, options, name, nodes, master)
    if nodes > 1:
        pod["spec"]["subdomain"] = name
    codes, minutes = {"containerName": _CONTAINER, "operator": "In"}, job.what.time_limit_minutes
    spec = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        # The time limit is the whole job's: that of a launch would end one pod and begin again for the next.
        **({} if minutes is None else {"activeDeadlineSeconds": math.ceil(60 * minutes)}),
        "backoffLimit": nodes * job.max_restarts,  # counted once a node: all pods of a run end together
        # When a pod ends, the first rule that matches counts; failures that match none are counted.
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {**codes, "values": sorted(FINAL)}},
                {"action": "Ignore", "onExitCodes": {**codes, "values": sorted([EXIT_RETRY, EXIT_PREEMPTED])}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": pod,
    }
    return _object("batch/v1", "Job", name, spec=spec)


def _pod(job: Job, options: KubernetesOptions, name: str, nodes: int, master: str) -> Object:
    mounts: list[Object] = [{"name": "work", "mountPath": str(options.mount)}, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[Object] = [
        {"name": "work", "persistentVolumeClaim": {"claimName": options.pvc.partition(":")[0]}},
        # NCCL uses it between the GPUs of a node; the default size in containers is too small.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if _is_own_recipe(job):
        mounts.append({"name": "recipe", "mountPath": _RECIPE_FOLDER, "readOnly": True})
        volumes.append({"name": "recipe", "configMap": {"name": _recipe_file(job, name)["metadata"]["name"]}})
    gpus = job.what.ranks if options.gpus is None else options.gpus
    container: Object = {
        "name": _CONTAINER,
        "image": options.image,
        "command": _command(job, nodes, master),
        "workingDir": str(options.mount),
        "env": [{"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}],
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if options.secret is not None:
        container["envFrom"] = [{"secretRef": {"name": options.secret}}]
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    return {
        "metadata": {"labels": _labels(name)},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": options.grace_s,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # a service called "master" would set MASTER_PORT
            "securityContext": {
                "runAsUser": options.user,
                "runAsGroup": options.user,
                "runAsNonRoot": options.user > 0,
                "fsGroup": options.user,  # which makes a new claim's folder writable
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": volumes,
        },
    }


def _command(job: Job, nodes: int, master: str) -> list[str]:
    """The `vitscale launch` of a pod, in which Kubernetes expands only the node's number and `master`."""
    what = replace(job.what, time_limit_minutes=None)
    if _is_own_recipe(job):
        file = f"{_RECIPE_FOLDER}/{_file_name(what.recipe)}"
        what = replace(what, recipe=file, settings=what.settings if what.smoke else ())
    master = master if nodes > 1 else ""
    command = launch_command(replace(job, what=what), nodes=nodes, node_rank=_NODE, master=master)
    return [word if word in (_NODE, master) else word.replace("$", "$$") for word in command]


def _is_own_recipe(job: Job) -> bool:
    """Whether the recipe is a file of this machine, not one that comes with vitscale."""
    return Path(job.what.recipe).is_file()


def _recipe_file(job: Job, name: str) -> Object:
    """The recipe as pods see it: complete, as what it extends need not be in the image.

    Its name has a digest of its content, so that another recipe is another object: pods see changes of an object.
    """
    text = dump_yaml(job.what.load().dump())
    found = _object("v1", "ConfigMap", name, immutable=True, data={_file_name(job.what.recipe): text})
    found["metadata"]["name"] += f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return found


def _file_name(recipe: str) -> str:
    return re.sub(r"[^-.\w]+", "-", Path(recipe).name, flags=re.ASCII)


def _object(version: str, kind: str, name: str, **content: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": _labels(name)}, **content}


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "vitscale", "app.kubernetes.io/instance": name}


class _Dumper(yaml.SafeDumper):
    """Quotes more than PyYAML, which takes 1e3 and y for text; kubectl takes them for a number and a truth value."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write nothing by reference."""
        return True


def _yaml(objects: list[Object]) -> str:
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120).rstrip("\n")


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None if re.match(r"(--|/)?[A-Za-z]\w", text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)
