"""Values that Google's APIs take for the attributes that terraform/ sets.

A provider's schema says that an attribute is a string, and not which: a misspelt value passes `terraform validate` with
a mocked provider and fails after minutes of apply. The tables below are narrower than the API where the course is.
"""

import re
from pathlib import Path

# From the references of the GKE API (v1: NodeConfig, NodePoolAutoscaling, NetworkConfig, MaintenanceExclusionOptions,
# ReservationAffinity, ...), of Compute Engine (routers, disk types), of Artifact Registry and of IAM.
ENUMS = {
    "action": {"DELETE", "KEEP"},
    "consume_reservation_type": {"NO_RESERVATION", "ANY_RESERVATION", "SPECIFIC_RESERVATION"},
    "datapath_provider": {"ADVANCED_DATAPATH"},  # LEGACY_DATAPATH enforces no NetworkPolicy
    "channel": {"RAPID", "REGULAR", "STABLE"},
    "disk_type": {"pd-standard", "pd-balanced", "pd-ssd"},  # g2 machines and e2 ones take these
    "effect": {"NO_SCHEDULE", "PREFER_NO_SCHEDULE", "NO_EXECUTE"},  # not as Kubernetes spells them
    "enable_components": {"SYSTEM_COMPONENTS", "WORKLOADS"},
    "format": {"DOCKER"},
    "gpu_driver_version": {"DEFAULT", "LATEST"},  # INSTALLATION_DISABLED leaves the nodes without a driver
    "image_type": {"COS_CONTAINERD", "UBUNTU_CONTAINERD"},
    "location_policy": {"BALANCED", "ANY"},
    "mode": {"GKE_METADATA"},  # GCE_METADATA gives pods the node's identity
    "nat_ip_allocate_option": {"AUTO_ONLY", "MANUAL_ONLY"},
    "role": {
        "roles/artifactregistry.reader",
        "roles/cloudbuild.builds.builder",
        "roles/container.defaultNodeServiceAccount",
    },
    "scope": {"NO_UPGRADES", "NO_MINOR_UPGRADES", "NO_MINOR_OR_NODE_UPGRADES"},
    "source_subnetwork_ip_ranges_to_nat": {
        "ALL_SUBNETWORKS_ALL_IP_RANGES",
        "ALL_SUBNETWORKS_ALL_PRIMARY_IP_RANGES",
        "LIST_OF_SUBNETWORKS",
    },
    "tag_state": {"TAGGED", "UNTAGGED", "ANY"},
}
# Where a value stands away from the attribute that takes it: a map in locals, a variable's default or validation.
ELSEWHERE = {"reservation_type": "consume_reservation_type"}


def misspelt(folder: Path) -> list[str]:
    """What no API takes, a line each, in the `.tf` files of folder; also a value in capitals with no table here."""
    faults = []
    for path in sorted(folder.glob("*.tf")):
        within = None
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if found := re.match(r'variable "(\w+)"', line):
                within = found[1]
            code = re.sub(r"(^|\s)#.*", "", line)
            if re.match(r"\s*(description|error_message)\b", code):
                continue
            # One-line blocks: the attribute is the last name before the value.
            named = re.search(r"(\w+)\s+= (?=[^=]*$|[\[{\"])(.*)", code)
            if not named:
                continue
            attribute = ELSEWHERE.get(named[1], named[1])
            if attribute in ("condition", "default") and within:
                attribute = within
            for value in re.findall(r'"([^"$]*)"', named[2]):
                table = ENUMS.get(attribute)
                if table is None and re.fullmatch(r"[A-Z]+(_[A-Z]+)*", value):
                    faults.append(f"{path.name}:{number}: no table says which values {attribute} takes ({value})")
                elif table is not None and value not in table:
                    faults.append(f"{path.name}:{number}: {attribute} is {value}; it takes {', '.join(sorted(table))}")
    return faults
