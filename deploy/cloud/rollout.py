"""Waiting until JupyterLab runs, and saying what it waits for, or why it will not come."""

import contextlib
import re

from tools import APP, NAMESPACE, Problem, Wait, call, look, say

GRACE = 120  # seconds in which a node that could not be made may still come: an old event tells nothing
HOPELESS = re.compile("not found|unauthorized|denied|manifest unknown", re.IGNORECASE)
BAD_IMAGE = (
    "InvalidImageName", "ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError", "CreateContainerError",
)  # fmt: skip
STUBBORN = 300  # seconds for what the kubelet tries again by itself: a registry that is down, a failed download
SCALING = ("TriggeredScaleUp", "FailedScaleUp", "NotTriggerScaleUp")


@contextlib.contextmanager
def pod_may_wait():
    """Say how the pod is withdrawn, however the waiting for it is given up."""
    try:
        yield
    except (Problem, KeyboardInterrupt):
        say("\nnote: the pod still waits, and a GPU node may still come and cost. This withdraws it:")
        say(f"  kubectl -n {NAMESPACE} scale deployment/{APP} --replicas=0")
        raise


def wait_for_address():
    """The public address of the Service, once the load balancer has one."""
    with Wait() as wait:
        while True:
            given = look("service", f"{APP}-svc").get("status", {}).get("loadBalancer", {}).get("ingress")
            if given:
                return given[0].get("ip") or given[0]["hostname"]
            wait.show("waiting for the load balancer's address (a minute or two)")


def wait_for_pod():
    """Wait until the newest version's pod is ready, and return it. Raises `Problem` with the reason it can't be."""
    trouble = {}
    with Wait() as wait:
        while True:
            items = look("deployments,pods", "-l", f"app={APP}").get("items", [])
            pods = [i for i in items if i["kind"] == "Pod" and not i["metadata"].get("deletionTimestamp")]
            pod = max(pods, key=lambda p: p["metadata"]["creationTimestamp"], default=None)
            if pod and any(is_done(i) for i in items if i["kind"] == "Deployment"):
                break
            words = "waiting for the last pod to go and a new one to come"
            wait.show(state_of(pod, wait.passed(), trouble) if pod else words)
    say(f"the pod is ready, after {wait.passed() // 60} minutes and {wait.passed() % 60} seconds")
    return pod


def is_done(deployment):
    status = deployment["status"]
    seen = status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
    return seen and [status.get(key) for key in ("replicas", "updatedReplicas", "availableReplicas")] == [1, 1, 1]


def state_of(pod, passed, trouble):
    """What a pod that is not ready waits for, in words. Raises `Problem` when waiting will not help.

    `trouble` remembers since when a container is in what the kubelet tries again.
    """
    name, status = pod["metadata"]["name"], pod["status"]
    more = f"kubectl -n {NAMESPACE} describe pod {name} says more"
    for part in status.get("initContainerStatuses", []) + status.get("containerStatuses", []):
        waiting, ended = part["state"].get("waiting", {}), part["state"].get("terminated", {})
        why, message = waiting.get("reason", ""), " ".join(waiting.get("message", "").split())
        crashed, key = why == "CrashLoopBackOff" or ended.get("exitCode"), (name, part["name"])
        if not crashed and why not in BAD_IMAGE:
            trouble.pop(key, None)
        elif not (
            why == "InvalidImageName"
            or HOPELESS.search(message)
            or part["restartCount"] >= 2
            or passed - trouble.setdefault(key, passed) >= STUBBORN
        ):
            return f"the container {part['name']} is tried again: {message or why or 'it ended with an error'}"
        elif not crashed:
            raise Problem(f"{why} of {part['image']}: {message} (right IMAGE and DIGEST? {more})")
        else:
            words = ["kubectl", "-n", NAMESPACE, "logs", name, "-c", part["name"], "--tail=15"]
            _, log, err = call(words + (["--previous"] if why == "CrashLoopBackOff" else []))
            say("\n" + (log or err).rstrip())
            raise Problem(f"the container {part['name']} ends with an error, its last lines are above ({more})")
        if "running" in part["state"]:
            return "JupyterLab starts" if part["name"] == "jupyter" else "adding Jupyter's packages (a minute or two)"
    said = events_of(name)
    scheduled = [c for c in status.get("conditions", []) if c["type"] == "PodScheduled"]
    if not scheduled or scheduled[0]["status"] != "True":
        return no_node(said, scheduled[0].get("message", "") if scheduled else "not looked at yet", passed)
    reason, message = said[-1] if said else ("", "")
    if reason in ("FailedMount", "FailedAttachVolume"):
        return message
    return "pulling the image: many gigabytes, ten minutes or more the first time on a node"


def events_of(name):
    """[(reason, message)] of what the cluster says about a pod, the last one last."""
    events = look("events", "--field-selector", f"involvedObject.name={name}", "--sort-by=.lastTimestamp")
    return [(e.get("reason"), " ".join(e.get("message", "").split())) for e in events.get("items", [])]


def no_node(said, message, passed):
    reason, why = next((event for event in reversed(said) if event[0] in SCALING), ("", ""))
    if passed >= GRACE and reason == "FailedScaleUp":
        quota = "make preflight shows the quota, and where to ask for more"
        empty = "zones run out of L4: try later, or another zone or provisioning in terraform.tfvars"
        raise Problem(f"no node with a GPU: {why} ({quota if 'quota' in why.lower() else empty})")
    if passed >= GRACE and reason == "NotTriggerScaleUp":
        raise Problem(
            f"no node with a GPU, and none will come: {message} {why} (raise max_gpu_nodes in terraform.tfvars?)"
        )
    return f"waiting for a node with a GPU, from zero a few minutes: {message}"
