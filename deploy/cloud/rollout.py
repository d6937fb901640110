"""Waiting until JupyterLab runs, and saying what it waits for, or why it will not come."""

from tools import APP, NAMESPACE, Problem, Wait, call, look, say

GRACE = 120  # seconds in which a node that could not be made may still come: an old event tells nothing
BAD_IMAGE = ("ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")
SCALING = ("TriggeredScaleUp", "FailedScaleUp", "NotTriggerScaleUp")


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
    with Wait() as wait:
        while True:
            items = look("deployments,pods", "-l", f"app={APP}").get("items", [])
            pods = [i for i in items if i["kind"] == "Pod" and not i["metadata"].get("deletionTimestamp")]
            pod = max(pods, key=lambda p: p["metadata"]["creationTimestamp"], default=None)
            if pod and any(is_done(i) for i in items if i["kind"] == "Deployment"):
                break
            words = state_of(pod, wait.passed()) if pod else "waiting for the last pod to go and a new one to come"
            wait.show(words)
    say(f"the pod is ready, after {wait.passed() // 60} minutes and {wait.passed() % 60} seconds")
    return pod


def is_done(deployment):
    status = deployment["status"]
    seen = status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
    return seen and [status.get(key) for key in ("replicas", "updatedReplicas", "availableReplicas")] == [1, 1, 1]


def state_of(pod, passed):
    """What a pod that is not ready waits for, in words. Raises `Problem` when waiting will not help."""
    name, status = pod["metadata"]["name"], pod["status"]
    more = f"kubectl -n {NAMESPACE} describe pod {name} says more"
    for part in status.get("initContainerStatuses", []) + status.get("containerStatuses", []):
        waiting, ended = part["state"].get("waiting", {}), part["state"].get("terminated", {})
        why = waiting.get("reason", "")
        if why in BAD_IMAGE:
            message = " ".join(waiting.get("message", "").split())
            raise Problem(f"{why} of {part['image']}: {message} (right IMAGE and DIGEST? {more})")
        if why == "CrashLoopBackOff" or ended.get("exitCode"):
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
