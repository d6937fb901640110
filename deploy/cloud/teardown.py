"""`make teardown`: services and volumes, then what Terraform made, then a list of what is left."""

import json
import re
import shlex
import sys

from tools import (
    NAMESPACE,
    TERRAFORM,
    Problem,
    Wait,
    ask,
    call,
    context,
    context_of,
    fault_in,
    kubectl,
    look,
    need,
    project_of,
    say,
    setting,
    show,
    terraform_outputs,
)

# What a cluster can leave behind: how it is listed, and how one of it is deleted, in an order that works.
KINDS = {
    "cluster": ("container clusters list", "container clusters delete {name} --location={place}"),
    "instance": ("compute instances list", "compute instances delete {name} --zone={place}"),
    "disk": ("compute disks list", "compute disks delete {name} --zone={place}"),
    "forwarding rule": ("compute forwarding-rules list", "compute forwarding-rules delete {name} --region={place}"),
    "firewall rule": ("compute firewall-rules list", "compute firewall-rules delete {name}"),
    "router": ("compute routers list", "compute routers delete {name} --region={place}"),
    "address": ("compute addresses list", "compute addresses delete {name} --region={place}"),
    "subnet": ("compute networks subnets list", "compute networks subnets delete {name} --region={place}"),
    "network": ("compute networks list", "compute networks delete {name}"),
    "repository": (
        "artifacts repositories list --location=all",
        "artifacts repositories delete {name} --location={place}",
    ),
    "service account": ("iam service-accounts list", "iam service-accounts delete {name}"),
}


def teardown(options):
    """Delete all that the course made, after one question; list what is left."""
    need("terraform", "gcloud", "kubectl")
    given = terraform_outputs()
    project = project_of(given)
    cluster, zone = (given.get(name) or setting(name) for name in ("cluster_name", "zone"))
    held = find_cluster(given, project, cluster, zone)
    refuse_for_others(held or [])
    say(f"This deletes for good, in project {project}:")
    if held is not None:
        say(f"- the namespace {NAMESPACE}: every notebook that students have on its volumes")
    say(f"- the cluster {cluster} in {zone}, its network, its accounts, its images: all that terraform made")
    if not options.yes:
        confirm(cluster)
    if held is not None:
        say("deleting services and volumes; load balancers and disks take some minutes")
        kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=15m", seconds=1000)
        with Wait() as wait:
            while any(goes(volume["spec"]) for volume in look("pv").get("items", [])):
                wait.show("waiting for the disks to go")
    try:
        known = destroy()
    except Problem:
        list_what_is_left(project, cluster, True)
        raise
    return list_what_is_left(project, cluster, known)


def refuse_for_others(held):
    """Raises `Problem` when others have volumes or load balancers: with those the cluster's network can't go."""
    spaces = sorted({space for _, space, _ in held} - {NAMESPACE})
    if spaces:
        what = ", ".join(f"{kind} {space}/{name}" for kind, space, name in held if space in spaces)
        hubs = {space for _, space, name in held if name in ("hub-db-dir", "proxy-public")}
        first = [f"helm -n {space} uninstall hub" for space in spaces if space in hubs]
        todo = "; ".join(first + [f"kubectl delete namespace {space}" for space in spaces])
        raise Problem(
            f"others use this cluster: {what}. Their disks would stay, and their firewall rules hold the network. "
            f"Nothing was deleted. Delete theirs first, if nobody needs it: {todo}; then make teardown again"
        )


def goes(volume):
    """Whether a volume's disk is deleted with its claim. Those of a namespace that went just before count too."""
    return "claimRef" in volume and volume.get("persistentVolumeReclaimPolicy") != "Retain"


def confirm(cluster):
    say(f"Type the cluster's name, {cluster}, to go on: ", end="")
    typed = sys.stdin.readline().strip()
    if typed != cluster:
        raise Problem(f"{typed!r} was given, not {cluster}: nothing was deleted (YES=1 asks nothing)")


def find_cluster(given, project, cluster, zone):
    """(kind, namespace, name) of each volume claim and load balancer; None when the cluster is gone.

    kubectl may stand on another cluster, where nothing must be deleted: it is connected anew. Raises `Problem` for a
    cluster that is there and does not answer.
    """
    try:
        if "get_credentials_command" in given:
            status, _, err = call(shlex.split(given["get_credentials_command"]))
            if status:
                raise Problem(fault_in(err))
        if context() != context_of(given):
            raise Problem(f"kubectl works on {context() or 'no cluster'}, not on {context_of(given)}")
        items = json.loads(kubectl("get", "pvc,service", "-A", "-o", "json", "--request-timeout=30s"))["items"]
    except Problem as problem:
        at = f"{cluster} --location={zone} --project={project}"
        listing = ["gcloud", "container", "clusters", "list", f"--project={project}", "--format=json"]
        found = json.loads(ask(listing, "nothing was deleted: the cluster may be there, with disks") or "[]")
        if any((item["name"], item.get("location") or item.get("zone")) == (cluster, zone) for item in found):
            raise Problem(
                f"the cluster {cluster} is there and does not answer: {problem}. Its disks would stay, so nothing was "
                f"deleted. Connect: gcloud container clusters get-credentials {at} --dns-endpoint; see that kubectl "
                f"get nodes works; make teardown again. If it never does: gcloud container clusters delete {at}, then "
                "make teardown, which lists the disks"
            ) from None
        say(f"The cluster {cluster} is gone already: Google Cloud lists none of this name in {zone}.")
        return None
    items = [item for item in items if item["kind"] != "Service" or item["spec"].get("type") == "LoadBalancer"]
    return [(item["kind"], item["metadata"]["namespace"], item["metadata"]["name"]) for item in items]


def destroy():
    """Have Terraform destroy what it made. Returns whether it has a state here. Raises `Problem` when it fails."""
    terraform = ["terraform", f"-chdir={TERRAFORM}"]
    if not call([*terraform, "state", "list"])[1].strip():
        say("terraform has no state here: it lies in the folder terraform/ of the clone that made the cluster")
        return False
    for words in (["init", "-input=false"], ["destroy", "-auto-approve", "-input=false"]):  # confirmed before
        show([*terraform, *words], "mend that, then make teardown again; what is gone stays gone")
    return True


def list_what_is_left(project, cluster, known):
    """Name what is left, and how it is deleted; return the exit status. `known`: Terraform had a state here."""
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
            if "/locations/" in item["name"]:  # projects/P/locations/L/repositories/NAME
                place = item["name"].split("/")[3]
            line = deleting.format(name=name_of(item), place=place)
            line = line.split(" --")[0] + " --global" if "{place}" in deleting and not place else line
            maybe = "" if whose == "ours" else " (of this cluster or another)"
            say(f"left: {kind} {name_of(item)}{maybe}: gcloud {line} {on}")
        others = sum(owner(item, cluster) == "other" for item in items)
        if others:
            say(f"{others} of kind {kind} belong to something else: gcloud {listing} {on}")
    bucket = f"gs://{project}_cloudbuild"
    if not call(["gcloud", "storage", "buckets", "describe", bucket, on])[0]:
        say(f"{bucket} holds the sources of all image builds of this project, the course's among them.")
        say(f"  If nobody needs them: gcloud storage rm --recursive {bucket} {on}")
    if not known:
        say("Without Terraform's state this goes by names: what was made under other names is not found.")
    if left:
        say(f"Last resort, for a project that holds only this course: gcloud projects delete {project}")
        return 1
    say("nothing of the course is left" if known else f"nothing with the names of {cluster} was found in {project}")
    return 0


def name_of(item):
    return item.get("email") or item["name"].split("/")[-1]


def owner(item, cluster):
    """ "ours", "other" or "unsure", by what Google Cloud and GKE write into names, labels and descriptions."""
    labels, said = item.get("labels") or {}, item.get("description") or ""
    networks = [item.get("network")] + [i.get("network") for i in item.get("networkInterfaces", [])]
    used_by = [user for user in item.get("users", []) if "/routers/" in user]  # an address of the NAT
    name, names = name_of(item), [(path or "").split("/")[-1] for path in networks + used_by]
    accounts = name.startswith((f"{cluster}-nodes@", f"{cluster}-build@"))
    if cluster in (name, labels.get("goog-k8s-cluster-name"), *names) or accounts or f"{NAMESPACE}/" in said:
        return "ours"
    if name.startswith(f"gke-{cluster}-"):
        return "ours"
    by_a_cluster = item["name"].startswith("pvc-") or re.search(r"kubernetes\.io/(service|created-for)", said)
    return "unsure" if by_a_cluster and not labels.get("goog-k8s-cluster-name") else "other"
