"""`make preflight`: what must be so before `terraform apply`, a line for each, with what to do about the red ones."""

import json
import re
import shutil
import sys

from tools import INSTALL, call, fault_in, in_terraform, project_of, say, setting

CONSOLE = "https://console.cloud.google.com"
SYSTEM_VCPUS, GPU_DISK, OTHER_DISKS = 2, 100, 50 + 20  # of cluster.tf's two pools, and the volume of deploy/base


class Sheet:
    """Lines that are green or red, and how many are red."""

    def __init__(self):
        self.red = 0

    def line(self, good, what, to_do):
        mark = "ok " if good else "RED"
        if sys.stdout.isatty():
            mark = f"\x1b[{32 if good else 31}m{mark}\x1b[0m"
        say(f"{mark}  {what}" + ("" if good else f": {to_do}"))
        self.red += not good
        return good

    def note(self, what):
        say(f"--   {what}")

    def close(self):
        say(f"{self.red} to mend, then make preflight again" if self.red else "all green: terraform apply can start")
        return 1 if self.red else 0


def asked(*words):
    """(did gcloud answer, its answer: the JSON, or what went wrong)"""
    status, out, err = call(["gcloud", *words, "--format=json"])
    return (False, fault_in(err)) if status else (True, json.loads(out or "[]"))


def preflight(_):
    """Look whether the project can hold the course: tools, account, billing, APIs, zone, quota."""
    sheet = Sheet()
    sheet.line(shutil.which("gcloud"), "gcloud", INSTALL["gcloud"])
    least = in_terraform("versions.tf", r'required_version\s*=\s*">= ([\d.]+)"')
    new_enough(sheet, "terraform", "version -json", "terraform_version", least, "terraform/ needs it")
    why = "older ones forward ports by SPDY, which the cluster's DNS endpoint may not let through"
    new_enough(sheet, "kubectl", "version --client -o json", "gitVersion", "1.31", why)
    sheet.line(shutil.which("gke-gcloud-auth-plugin"), "gke-gcloud-auth-plugin", INSTALL["gke-gcloud-auth-plugin"])
    if not shutil.which("gcloud"):
        say("The rest is asked with gcloud. In Cloud Shell (https://shell.cloud.google.com) all four are there.")
        return sheet.close()
    good, accounts = asked("auth", "list", "--filter=status:ACTIVE")
    if sheet.line(good and accounts, "an account is logged in", "gcloud auth login"):
        # Terraform does not use gcloud's account, but these. The token that is asked for is never shown.
        good = not call(["gcloud", "auth", "application-default", "print-access-token"])[0]
        sheet.line(good, "Terraform has credentials", "gcloud auth application-default login")
        look_at_project(sheet, project_of({}))
    return sheet.close()


def new_enough(sheet, tool, words, key, least, why):
    if not shutil.which(tool):
        sheet.line(False, tool, INSTALL[tool])
        return
    said = re.search(rf'"{key}":\s*"v?([\d.]+)', call([tool, *words.split()])[1])
    have, wanted = ([int(n) for n in re.findall(r"\d+", text)] for text in (said[1] if said else "", least))
    what = f"{tool} {said[1] if said else 'of an unknown version'}"
    sheet.line(have >= wanted, what, f"{least} or newer is wanted: {why}; {INSTALL[tool]}")


def look_at_project(sheet, project):
    good, said = asked("projects", "describe", project)
    if not sheet.line(good, f"project {project}", f"{said}; put your project's id into terraform/terraform.tfvars"):
        return
    other = call(["gcloud", "config", "get", "project"])[1].strip()
    if other not in ("", project):
        sheet.note(f"gcloud's own project is {other}: all commands here use {project}, as terraform.tfvars says")
    good, said = asked("billing", "projects", "describe", project)
    page = f"{CONSOLE}/billing/linkedaccount?project={project}"
    if good:
        sheet.line(said.get("billingEnabled"), "billing is enabled", page)
    else:
        sheet.note(f"billing is not known ({said}): look at {page}")
    if apis(sheet, f"--project={project}"):
        quotas(sheet, project, *machine(sheet, f"--project={project}"))
    else:
        say("Zone and quota can't be asked without the compute API: enable these, then make preflight again.")


def apis(sheet, on):
    """Whether the APIs are enabled; returns whether compute is, as far as can be known."""
    needed = re.findall(r'"(\w+)"', in_terraform("network.tf", r"\bapis\s*=\s*\[([^]]*)\]"))
    good, said = asked("services", "list", "--enabled", on)
    enabled = {api["config"]["name"] for api in said} if good else set()
    missing = [api for api in (f"{name}.googleapis.com" for name in needed) if api not in enabled]
    enable = f"gcloud services enable {' '.join(missing)} {on}"
    why = "terraform apply does it too, but the lines below need compute now, and apply needs cloudresourcemanager"
    what = f"APIs enabled: {len(needed) - len(missing)} of {len(needed)}"
    if good:
        sheet.line(needed and not missing, what, f"{enable}  ({why})")
    else:
        sheet.line(False, "APIs enabled", said)
    return not good or "compute.googleapis.com" in enabled


def machine(sheet, on):
    """Whether the zone has the machine; returns its L4 GPUs and vCPUs, 1 and 0 when that can't be asked."""
    zone, kind = setting("zone"), setting("machine_type")
    good, said = asked("compute", "accelerator-types", "list", f"--filter=name=nvidia-l4 AND zone:{zone}", on)
    others = f"gcloud compute accelerator-types list --filter=name=nvidia-l4 {on} lists zones for terraform.tfvars"
    sheet.line(good and said, f"zone {zone} has L4 GPUs", others if good else said)
    good, said = asked("compute", "machine-types", "describe", kind, f"--zone={zone}", on)
    counts = [a["guestAcceleratorCount"] for a in said.get("accelerators", [])] if good else []
    sheet.line(counts, f"zone {zone} has {kind}, with GPUs", "give a g2-standard machine_type" if good else said)
    return (counts[0], said["guestCpus"]) if counts else (1, 0)


def quotas(sheet, project, gpus, vcpus):
    """Whether each quota allows max_gpu_nodes nodes, and what the cluster has beside them."""
    region, nodes, kind = (
        setting("zone").rpartition("-")[0],
        int(setting("max_gpu_nodes") or 1),
        setting("provisioning"),
    )
    here = [("NVIDIA_L4_GPUS", gpus, "GPU", 0), ("CPUS", vcpus, "vCPU", SYSTEM_VCPUS)]
    here.append(("SSD_TOTAL_GB", GPU_DISK, "GB", OTHER_DISKS))  # pd-balanced counts there
    for place, words, rows in (
        (region, ("regions", "describe", region), here),
        ("all regions", ("project-info", "describe"), [("GPUS_ALL_REGIONS", gpus, "GPU", 0)]),
    ):
        good, said = asked("compute", *words, f"--project={project}")
        if not good:
            sheet.line(False, f"quota, {place}", said)
            continue
        known = {quota["metric"]: quota for quota in said["quotas"]}
        for name, each, unit, beside in rows:
            # Spot and flex-start draw on a quota of their own where the project has been given one.
            if kind in ("spot", "flex_start") and known.get(f"PREEMPTIBLE_{name}", {}).get("limit"):
                name, beside = f"PREEMPTIBLE_{name}", 0
            one_quota(sheet, project, f"{name}, {place}", known.get(name), nodes, each, unit, beside, kind)


def one_quota(sheet, project, name, quota, nodes, each, unit, beside, kind):
    if not each:  # the machine is not known, which is red already
        return
    wanted = nodes * each + beside
    what = f"{wanted} wanted, {count(nodes, 'node')} with {count(each, unit)}{' each' if nodes > 1 else ''}"
    what += f" and {beside} beside" if beside else ""
    more = f"ask for more at {CONSOLE}/iam-admin/quotas?project={project} (hours to days)"
    if not quota:
        sheet.line(False, f"quota {name}: not listed; {what}", more)
        return
    limit, used = int(quota["limit"]), int(quota["usage"])
    free = limit if kind == "reservation" and unit != "GB" else limit - used  # what is reserved counts as used already
    more = f"this course's own running nodes count as used; {more}"
    what = f"quota {name}: {limit}, of which {used} used; {what}"
    if unit == "vCPU" and free < wanted:  # Google's pages do not say whether g2 machines count there
        sheet.note(f"{what}. Whether g2 machines count there is not known here; if no node comes: {more}")
    else:
        sheet.line(free >= wanted, what, more)


def count(number, unit):
    return f"{number} {unit}" + ("" if number == 1 or unit == "GB" else "s")
