"""`make preflight`: what must be so before `terraform apply`, a line for each, with what to do about the red ones."""

import json
import re
import shutil
import sys

from tools import INSTALL, call, in_terraform, last_line, project_of, say, setting

CONSOLE = "https://console.cloud.google.com"


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

    def close(self):
        say(f"{self.red} to mend, then make preflight again" if self.red else "all green: terraform apply can start")
        return 1 if self.red else 0


def asked(*words):
    """(did gcloud answer, its answer: the JSON, or the last line of what went wrong)"""
    status, out, err = call(["gcloud", *words, "--format=json"])
    return (False, last_line(err)) if status else (True, json.loads(out or "[]"))


def preflight(_):
    """Look whether the project can hold the course: tools, account, billing, APIs, zone, quota."""
    sheet = Sheet()
    for tool in ("gcloud", "terraform", "kubectl", "gke-gcloud-auth-plugin"):
        sheet.line(shutil.which(tool), tool, INSTALL[tool])
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


def look_at_project(sheet, project):
    good, said = asked("projects", "describe", project)
    if not sheet.line(good, f"project {project}", f"{said}; put your project's id into terraform/terraform.tfvars"):
        return
    good, said = asked("billing", "projects", "describe", project)
    page = f"{CONSOLE}/billing/linkedaccount?project={project}"
    sheet.line(good and said.get("billingEnabled"), "billing is enabled", page if good else f"{said}; look at {page}")
    apis(sheet, f"--project={project}")
    quotas(sheet, project, machine(sheet, f"--project={project}"))


def apis(sheet, on):
    needed = re.findall(r'"(\w+)"', in_terraform("network.tf", r"\bapis\s*=\s*\[([^]]*)\]"))
    good, said = asked("services", "list", "--enabled", on)
    enabled = {api["config"]["name"] for api in said} if good else set()
    missing = [api for api in (f"{name}.googleapis.com" for name in needed) if api not in enabled]
    enable = f"gcloud services enable {' '.join(missing)} {on}"
    why = "terraform apply does it too, but the lines below need compute now, and apply needs cloudresourcemanager"
    what = f"APIs enabled: {len(needed) - len(missing)} of {len(needed)}"
    sheet.line(needed and not missing, what, f"{enable}  ({why})" if good else said)


def machine(sheet, on):
    """Whether the zone has the machine; returns its L4 GPUs, 1 when that can't be asked."""
    zone, kind = setting("zone"), setting("machine_type")
    good, said = asked("compute", "accelerator-types", "list", f"--filter=name=nvidia-l4 AND zone:{zone}", on)
    others = f"gcloud compute accelerator-types list --filter=name=nvidia-l4 {on} lists zones for terraform.tfvars"
    sheet.line(good and said, f"zone {zone} has L4 GPUs", others if good else said)
    good, said = asked("compute", "machine-types", "describe", kind, f"--zone={zone}", on)
    counts = [a["guestAcceleratorCount"] for a in said.get("accelerators", [])] if good else []
    sheet.line(counts, f"zone {zone} has {kind}, with GPUs", "give a g2-standard machine_type" if good else said)
    return counts[0] if counts else 1


def quotas(sheet, project, per_node):
    region, nodes = setting("zone").rpartition("-")[0], int(setting("max_gpu_nodes") or 1)
    wanted, kind = nodes * per_node, setting("provisioning")
    more = f"ask for more at {CONSOLE}/iam-admin/quotas?project={project} (hours to days)"
    for place, name, words in (
        (region, "NVIDIA_L4_GPUS", ("regions", "describe", region)),
        ("all regions", "GPUS_ALL_REGIONS", ("project-info", "describe")),
    ):
        good, said = asked("compute", *words, f"--project={project}")
        known = {quota["metric"]: quota for quota in said["quotas"]} if good else {}
        # Spot and flex-start draw on a quota of their own where the project has been given one.
        if kind in ("spot", "flex_start") and known.get(f"PREEMPTIBLE_{name}", {}).get("limit"):
            name = f"PREEMPTIBLE_{name}"
        limit, used = (int(known.get(name, {}).get(key, 0)) for key in ("limit", "usage"))
        free = limit if kind == "reservation" else limit - used  # what is reserved counts as used already
        what = f"quota {name}, {place}: {limit}, of which {used} used; {wanted} wanted ({nodes} nodes of {per_node})"
        sheet.line(free >= wanted, what, more if good else said)
