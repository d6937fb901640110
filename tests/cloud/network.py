"""What NetworkPolicies let through, by the rules of Kubernetes."""

import ipaddress

from manifests import of_kind

OPERATORS = {
    "In": lambda value, given: value in given,
    "NotIn": lambda value, given: value not in given,
    "Exists": lambda value, given: value is not None,
    "DoesNotExist": lambda value, given: value is None,
}


def passes(docs: list[dict], direction: str, peer: str | dict, port: int, protocol: str = "TCP") -> bool:
    """Whether the pod that the policies select may talk with a peer.

    Args:
        docs: the manifests; each NetworkPolicy among them is taken to select the pod.
        direction: "ingress" or "egress".
        peer: an address, or a pod: its labels, and its namespace's name under "namespace".
        port: the port of the side that is called.
    """
    policies = [d for d in of_kind(docs, "NetworkPolicy") if direction.title() in d["spec"]["policyTypes"]]
    rules = [(d["metadata"]["namespace"], rule) for d in policies for rule in d["spec"].get(direction, [])]
    key = "to" if direction == "egress" else "from"
    # What no policy covers is open. A rule without ports is for all ports, one without peers for all peers.
    return not policies or any(
        any(_is_port(p, port, protocol) for p in rule.get("ports", [{"protocol": protocol}]))
        and (key not in rule or any(_is_peer(p, peer, namespace) for p in rule[key]))
        for namespace, rule in rules
    )


def _is_port(given: dict, port: int, protocol: str) -> bool:
    return given.get("protocol", "TCP") == protocol and given.get("port", port) == port


def _is_peer(given: dict, peer: str | dict, namespace: str) -> bool:
    if "ipBlock" in given:
        return isinstance(peer, str) and _inside(peer, given["ipBlock"])
    if isinstance(peer, str):
        return False
    if "namespaceSelector" in given:
        near = _selects(given["namespaceSelector"], {"kubernetes.io/metadata.name": peer["namespace"]})
    else:
        near = peer["namespace"] == namespace
    return near and _selects(given.get("podSelector", {}), peer)


def _inside(address: str, block: dict) -> bool:
    address = ipaddress.ip_address(address)
    return address in ipaddress.ip_network(block["cidr"]) and not any(
        address in ipaddress.ip_network(hole) for hole in block.get("except", [])
    )


def _selects(selector: dict, labels: dict) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        OPERATORS[e["operator"]](labels.get(e["key"]), e.get("values")) for e in selector.get("matchExpressions", [])
    )
