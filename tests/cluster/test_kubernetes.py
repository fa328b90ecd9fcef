"""What is handed in to Kubernetes: valid by its schemas, and by our own command line where a pod would run it."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import psutil
import pytest
import yaml
from commands import run
from messages import refusal
from processes import started, wait_until

from vitscale.ground import errors
from vitscale.recipe import load_recipe

LAUNCH = Path(__file__).parents[1] / "launch" / "small_launch.py"
VERSIONS = ("1.31", kubernetes_validate.latest_version())  # of Kubernetes; podFailurePolicy is stable from 1.31 on


def given(*options: str) -> list[str]:
    """What only this cluster knows, as words of the command line."""
    return [word for option in options for word in ("--cluster-option", option)]


OPTIONS = {
    "nothing": [],
    "one node": ["--nodes", "1"],
    "one rank": ["--nodes", "1", "--ranks", "1"],
    "no GPUs": ["--smoke", *given("gpus=0")],
    "all": [
        *["--nodes", "64", "--run-dir", "1e3", "--set", "data.root=/y/$(RANK)", "--time-limit", "90.5"],
        *["--max-restarts", "0", "--stop-at", "7"],
        *given("namespace=team-1", "name=n" + 39 * "0", "secret=y", "grace_s=30", "cluster_domain=c.example"),
    ],
}


def launch(*arguments: str) -> str:
    """What `vitscale launch` prints; raises the error that it would show."""
    code, printed = run("launch", *arguments)
    assert code == 0, printed
    return printed


def text(*options: str, recipe: str = "h14_jft") -> str:
    """What a dry run prints; of an option that is given twice, the later one counts."""
    own = given("image=registry.example/v:1", "pvc=runs:/work")
    return launch(recipe, "--cluster", "k8s", "--nodes", "4", "--ranks", "8", *own, "--dry-run", *options)


def rendered(*options: str, recipe: str = "h14_jft") -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text(*options, recipe=recipe)))


def template_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all pods of the job, which is the last object."""
    return objects[-1]["spec"]["template"]


def command(template: dict[str, Any], environment: dict[str, str]) -> list[str]:
    """The container's, as the kubelet expands it."""
    [container] = template["spec"]["containers"]

    def expand(match: re.Match[str]) -> str:
        return match[1] or environment.get(match[2], match[0])

    return [re.sub(r"\$(\$)|\$\((\w+)\)", expand, word) for word in container["command"]]


# ---- Schemas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
def test_every_object_fits_the_schema_of_its_api(options):
    objects = rendered(*OPTIONS[options])
    for one in objects:
        check_schema(one)
    template = template_of(objects)
    check_schema({"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]})


def check_schema(one: dict[str, Any]) -> None:
    """Raises unless it fits, and has no field that its API does not know."""
    for version in VERSIONS:
        kubernetes_validate.validate(one, version, strict=True)


def test_the_schemas_find_mistakes():
    objects = rendered()
    template_of(objects)["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check_schema(objects[-1])


def test_nothing_that_yaml_readers_take_for_something_else():
    """kubectl reads other plain words as numbers and truth values than PyYAML does."""
    shown = text(*OPTIONS["all"])
    assert '- "1e3"\n' in shown and 'name: "y"\n' in shown


# ---- What the objects say --------------------------------------------------------------------------------------------


def test_every_exit_code_of_ours_has_a_rule():
    objects = rendered()
    policy = objects[-1]["spec"]["podFailurePolicy"]
    actions = {
        code: rule["action"]
        for rule in reversed(policy["rules"])
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert actions == {2: "FailJob", 3: "FailJob", 4: "FailJob", 75: "Ignore", 85: "Ignore"}
    ours = {one.exit_code for one in vars(errors).values() if isinstance(one, type)}
    assert set(actions) == ours - {errors.VitscaleError.exit_code}  # a bug's, which is counted
    template = template_of(objects)
    names = {container["name"] for container in template["spec"]["containers"]}
    assert {rule["onExitCodes"]["containerName"] for rule in policy["rules"] if "onExitCodes" in rule} == names
    assert template["spec"]["restartPolicy"] == "Never"  # or the API refuses the policy
    assert policy["rules"][-1]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_pods_have_gpus_the_claim_time_to_save_and_no_more_rights_than_they_need():
    pod = template_of(rendered(*given("grace_s=300")))["spec"]
    [container] = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert pod["terminationGracePeriodSeconds"] == 300
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "emptyDir" not in v}
    assert claims == {"work": "runs"} and mounts["work"] == container["workingDir"] == "/work"
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"] and not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


@pytest.mark.parametrize(("options", "user"), [([], 1000), (["user=4001"], 4001), (["user=0"], 0)])
def test_pods_run_as_root_only_where_that_is_asked_for(options, user):
    context = template_of(rendered(*given(*options)))["spec"]["securityContext"]
    # The kubelet refuses to start a pod that has to be another than root and is not told whom, if its image says root.
    assert context["runAsUser"] == context["runAsGroup"] == user and context["runAsNonRoot"] is (user != 0)


@pytest.mark.parametrize("nodes", ["1", "4"])
def test_only_the_pods_of_a_job_reach_each_other(nodes):
    objects = rendered("--nodes", nodes, *given("namespace=team-1"))
    [policy] = [one for one in objects if one["kind"] == "NetworkPolicy"]
    assert policy["metadata"]["namespace"] == "team-1" and policy["spec"]["policyTypes"] == ["Ingress"]
    # What the Job's controller puts on its pods, and on no others; a podSelector alone means this namespace.
    own = {"matchLabels": {"batch.kubernetes.io/job-name": objects[-1]["metadata"]["name"]}}
    assert policy["spec"]["podSelector"] == own and policy["spec"]["ingress"] == [{"from": [{"podSelector": own}]}]


def test_the_time_limit_is_the_jobs_and_not_that_of_each_pod():
    objects = rendered("--time-limit", "90.5")
    assert objects[-1]["spec"]["activeDeadlineSeconds"] == 5430
    assert "--time-limit" not in command(template_of(objects), {})


# ---- The command in a pod --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_command_of_every_pod_starts_its_ranks(nodes, monkeypatch):
    ranks = []
    objects = rendered("--nodes", str(nodes), "--set", "seed=7")
    for pod in range(objects[-1]["spec"]["completions"]):
        # As the Job's controller and the kubelet make them.
        environment = {"JOB_COMPLETION_INDEX": str(pod), "POD_NAMESPACE": "team-1"}
        words = command(template_of(objects), environment)
        assert words[:2] == ["vitscale", "launch"]
        with monkeypatch.context() as of_pod:
            for name, value in environment.items():
                of_pod.setenv(name, value)
            lines = launch(*words[2:], "--dry-run").splitlines()
        for line in lines[1:]:
            assert line.count("seed=7") == 1
            own = dict(re.findall(r"(\w+)=(\S+)", line.partition(" --")[0]))
            assert own["MASTER_ADDR"] == ("h14-jft-0.h14-jft.team-1.svc.cluster.local" if nodes > 1 else "127.0.0.1")
            assert own["WORLD_SIZE"] == str(8 * nodes) and own["LOCAL_WORLD_SIZE"] == "8"
            assert own["LOCAL_RANK"] == str(int(own["RANK"]) % 8)
            ranks.append(int(own["RANK"]))
    assert ranks == list(range(8 * nodes))


def test_pods_of_a_job_have_the_name_that_all_are_told():
    _, service, job = rendered(*given("cluster_domain=c.example"))
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    words = command(job["spec"]["template"], {"POD_NAMESPACE": "ns"})
    name = f"{job['metadata']['name']}-0.{service['metadata']['name']}.ns.svc.c.example"
    assert words[words.index("--master") + 1] == name and pod["subdomain"] == service["metadata"]["name"]


def test_what_a_person_writes_is_not_expanded():
    [_, job] = rendered("--nodes", "1", "--run-dir", "$(HOME)/$$(x)$")
    words = command(job["spec"]["template"], {"HOME": "/root", "x": "no"})
    assert words[words.index("--run-dir") + 1] == "$(HOME)/$$(x)$"


def test_a_recipe_of_ones_own_goes_along_with_what_it_extends_and_the_settings(tmp_path):
    file = tmp_path / "my recipe.yaml"
    file.write_text("extends: h14_jft\nseed: 3\n")
    objects = rendered("--set", "optimizer.lr=1e-4", recipe=str(file))
    check_schema(objects[0])
    assert objects[0]["kind"] == "ConfigMap" and objects[0]["immutable"]
    template = template_of(objects)
    [container], volumes = template["spec"]["containers"], template["spec"]["volumes"]
    [volume] = [
        volume["name"] for volume in volumes if volume.get("configMap") == {"name": objects[0]["metadata"]["name"]}
    ]
    [folder] = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == volume]
    assert container["command"][2] == f"{folder}/my-recipe.yaml" and "--set" not in container["command"]
    copy = tmp_path / "copy.yaml"
    copy.write_text(objects[0]["data"]["my-recipe.yaml"])
    assert load_recipe(copy) == load_recipe(file, ["optimizer.lr=1e-4"])
    # Another recipe is another object, so that it never changes under pods that run.
    assert rendered(recipe=str(file))[0]["metadata"]["name"] != objects[0]["metadata"]["name"]


# ---- What cannot be ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *("--cluster-option name=Big_name", "--cluster-option name=9lives", f"--cluster-option name={'n' * 41}"),
        *("--cluster-option namespace=a.b", "--cluster-option image=-v", "--cluster-option secret=A"),
        *("--cluster-option pvc=runs:work", "--cluster-option pvc=runs:/", "--cluster-option grace_s=0"),
        *("--cluster-option imag=v", "--nodes 3", "--run-dir /tmp/run", "--run-dir ../run"),
        *("--set checkpoint.dir=/elsewhere", "--resume never", "--node-rank 0", "--master node1"),
    ],
)
def test_what_cannot_be_is_said(options):
    named = {option.partition("=")[0] for option in options.split()}
    needed = [option for option in ("image=v", "pvc=runs:/work") if option.partition("=")[0] not in named]
    with refusal(errors.RecipeError, "launch", f"k8s {options}"):
        launch("h14_jft", "--cluster", "k8s", "--ranks", "8", "--dry-run", *given(*needed), *options.split())


def test_what_is_missing_is_said():
    with pytest.raises(errors.RecipeError, match="--ranks"):
        launch("h14_jft", "--cluster", "k8s", *given("image=v", "pvc=c"), "--dry-run")
    with pytest.raises(errors.RecipeError, match="image"):
        launch("h14_jft", "--cluster", "k8s", "--ranks", "8", *given("pvc=c"), "--dry-run")


# ---- kubectl ---------------------------------------------------------------------------------------------------------

SUBMIT = ["h14_jft", "--cluster", "k8s", "--ranks", "8", *given("image=v", "pvc=runs")]


def put_kubectl(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A stand-in, as there is no cluster to hand anything in to: it keeps what it is given, and answers so."""
    (folder / "kubectl").write_text(f'#!/bin/sh\necho "$@" >{folder}/arguments\n/bin/cat >{folder}/objects\n{script}\n')
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_kubectl_is_given_what_a_dry_run_prints(tmp_path, monkeypatch):
    put_kubectl(tmp_path, monkeypatch, "echo job.batch/h14-jft created")
    assert launch(*SUBMIT) == "job.batch/h14-jft created\n"
    assert (tmp_path / "arguments").read_text() == "apply -f -\n"
    assert (tmp_path / "objects").read_text() == launch(*SUBMIT, "--dry-run").rstrip("\n")


def test_kubectl_that_refuses(tmp_path, monkeypatch):
    put_kubectl(tmp_path, monkeypatch, "echo 'connection refused' >&2; exit 1")
    with pytest.raises(errors.RecipeError, match=r"kubectl apply.*connection refused$"):
        launch(*SUBMIT)
    put_kubectl(tmp_path, monkeypatch, "echo 'spec.template: field is immutable' >&2; exit 1")
    with pytest.raises(errors.RecipeError, match="kubectl delete job/h14-jft"):
        launch(*SUBMIT)
    for answer in ("unchanged", "configured"):
        put_kubectl(tmp_path, monkeypatch, f"echo job.batch/h14-jft {answer}")
        with pytest.raises(errors.RecipeError, match=r"kubectl delete job/h14-jft -n team-1"):
            launch(*SUBMIT, *given("namespace=team-1"))


def test_no_kubectl(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.RecipeError, match=r"kubectl.*--dry-run"):
        launch(*SUBMIT)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_the_real_kubectl_without_a_cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KUBERNETES_MASTER", "http://127.0.0.1:1")
    with pytest.raises(errors.RecipeError, match=r"kubectl apply.*refused"):
        launch(*SUBMIT)


# ---- The launch as the first process of a container ------------------------------------------------------------------

# Leaves a process behind that has ended, and whose parent has: the first process inherits it.
_RANK = """
subprocess.run(["sh", "-c", "setsid sleep 0.1 & echo $! >orphan"], cwd=here)
def told(*_):
    note(f"told-{rank}")
    sys.exit(85)
signal.signal(signal.SIGTERM, told)
orphan = Path("/proc") / (here / "orphan").read_text().strip()
while rank == 0 and orphan.exists():
    time.sleep(0.01)
beat(3)
note(f"ready-{rank}", os.getppid())
while True:
    time.sleep(0.1)
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a PID namespace needs root")
def test_process_1_passes_sigterm_on_and_reaps_what_it_inherits(tmp_path):
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    launched = [sys.executable, str(LAUNCH), "0", "1", "0", str(tmp_path), "2", "10", _RANK]
    with started([*namespace, *launched], stderr=subprocess.PIPE) as process:
        wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)))
        assert {(tmp_path / f"ready-{rank}").read_text() for rank in (0, 1)} == {"1"}
        [first] = psutil.Process(process.pid).children()
        first.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 85, said
        assert all((tmp_path / f"told-{rank}").exists() for rank in (0, 1))
        assert "told to end by SIGTERM" in said
