"""`make teardown`: services and volumes, then what Terraform made, then a list of what is left."""

import json
import re
import shlex
import sys

from tools import (
    CONNECT,
    NAMESPACE,
    TERRAFORM,
    Problem,
    Wait,
    ask,
    call,
    context,
    context_of,
    kubectl,
    last_line,
    look,
    need,
    project_of,
    say,
    setting,
    show,
    terraform_outputs,
)

# What a cluster can leave behind: how it is listed, and how one of it is deleted.
KINDS = {
    "cluster": ("container clusters list", "container clusters delete {name} --location={place}"),
    "instance": ("compute instances list", "compute instances delete {name} --zone={place}"),
    "disk": ("compute disks list", "compute disks delete {name} --zone={place}"),
    "forwarding rule": ("compute forwarding-rules list", "compute forwarding-rules delete {name} --region={place}"),
    "address": ("compute addresses list", "compute addresses delete {name} --region={place}"),
}


def teardown(options):
    """Delete all that the course made, after one question; list what is left."""
    need("terraform", "gcloud", "kubectl")
    given = terraform_outputs()
    project = project_of(given)
    cluster, zone = (given.get(name) or setting(name) for name in ("cluster_name", "zone"))
    held = find_cluster(given)
    say(f"This deletes for good, in project {project}:")
    if held is not None:
        say(f"- the namespace {NAMESPACE}: every notebook that students have on its volumes")
    say(f"- the cluster {cluster} in {zone}, its network, its accounts, its images: all that terraform made")
    for kind, space, name in held or []:
        if space != NAMESPACE:
            say(f"What stays, and costs on: {kind} {space}/{name}. Before you go on: kubectl delete namespace {space}")
    if not options.yes:
        confirm(cluster)
    if held is not None:
        say("deleting services and volumes; load balancers and disks take some minutes")
        kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=15m", seconds=1000)
        with Wait() as wait:
            while any(v["spec"].get("claimRef", {}).get("namespace") == NAMESPACE for v in look("pv").get("items", [])):
                wait.show("waiting for the disks to go")
    destroy()
    return list_what_is_left(project, cluster)


def confirm(cluster):
    say(f"Type the cluster's name, {cluster}, to go on: ", end="")
    typed = sys.stdin.readline().strip()
    if typed != cluster:
        raise Problem(f"{typed!r} was given, not {cluster}: nothing was deleted (YES=1 asks nothing)")


def find_cluster(given):
    """(kind, namespace, name) of each volume claim and load balancer; None when the cluster does not answer.

    kubectl may stand on another cluster, where nothing must be deleted: it is connected anew.
    """
    try:
        if "get_credentials_command" in given:
            status, _, err = call(shlex.split(given["get_credentials_command"]))
            if status:
                raise Problem(last_line(err))
        if context() != context_of(given):
            raise Problem(f"kubectl works on {context()}, not on {context_of(given)}")
        items = json.loads(kubectl("get", "pvc,service", "-A", "-o", "json", "--request-timeout=30s"))["items"]
    except Problem as problem:
        say(f"The cluster does not answer: {problem}")
        say(f"If it is gone, go on. If not, its disks would stay: connect first with {CONNECT}")
        return None
    items = [item for item in items if item["kind"] != "Service" or item["spec"].get("type") == "LoadBalancer"]
    return [(item["kind"], item["metadata"]["namespace"], item["metadata"]["name"]) for item in items]


def destroy():
    terraform = ["terraform", f"-chdir={TERRAFORM}"]
    if not call([*terraform, "state", "list"])[1].strip():
        say("terraform has nothing to destroy: it has no state here")
        return
    for words in (["init", "-input=false"], ["destroy", "-auto-approve", "-input=false"]):  # confirmed before
        show([*terraform, *words], "mend that, then make teardown again; what is gone stays gone")


def list_what_is_left(project, cluster):
    left, on = 0, f"--project={project}"
    for kind, (listing, deleting) in KINDS.items():
        command = ["gcloud", *listing.split(), on, "--format=json"]
        items = json.loads(ask(command, "nothing else was listed: make teardown again") or "[]")
        for item in items:
            whose = owner(item, cluster)
            if whose == "other":
                continue
            left += 1
            place = (item.get("location") or item.get("zone") or item.get("region") or "").split("/")[-1]
            line = deleting.format(name=item["name"], place=place)
            line = line if place else line.split(" --")[0] + " --global"
            maybe = "" if whose == "ours" else " (of this cluster or another)"
            say(f"left: {kind} {item['name']}{maybe}: gcloud {line} {on}")
        others = sum(owner(item, cluster) == "other" for item in items)
        if others:
            say(f"{others} of kind {kind} belong to something else: gcloud {listing} {on}")
    bucket = f"gs://{project}_cloudbuild"
    if not call(["gcloud", "storage", "buckets", "describe", bucket, on])[0]:
        left += 1
        say(f"left: {bucket}, the sources of image builds: gcloud storage rm --recursive {bucket} {on}")
    if left:
        say(f"Last resort, for a project that holds only this course: gcloud projects delete {project}")
        return 1
    say("nothing of the course is left")
    return 0


def owner(item, cluster):
    """ "ours", "other" or "unsure", by what Google Cloud and GKE write into names, labels and descriptions."""
    labels, said = item.get("labels") or {}, item.get("description") or ""
    networks = [item.get("network")] + [i.get("network") for i in item.get("networkInterfaces", [])]
    names = [item["name"], labels.get("goog-k8s-cluster-name"), *((n or "").split("/")[-1] for n in networks)]
    if cluster in names or item["name"].startswith(f"gke-{cluster}-") or f"{NAMESPACE}/" in said:
        return "ours"
    by_a_cluster = item["name"].startswith("pvc-") or re.search(r"kubernetes\.io/(service|created-for)", said)
    return "unsure" if by_a_cluster and not labels.get("goog-k8s-cluster-name") else "other"
