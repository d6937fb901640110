"""What a public address needs: the ranges that may reach it, and a certificate."""

import base64
import hashlib
import ipaddress
import json
import os
import re
import shutil
import ssl
import tempfile

from tools import APP, NAMESPACE, Problem, ask, call, kubectl, look, say

MINE = "your own address is what https://checkip.amazonaws.com shows, with /32"
EXAMPLES = [ipaddress.ip_network(net) for net in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")]
WEEK = "604800"  # seconds


def ranges(text):
    """The source ranges in SOURCES. Raises `Problem` for one that lets in too many, or nobody."""
    found = []
    for word in text.replace(",", " ").split():
        try:
            net = ipaddress.ip_network(word)
        except ValueError as error:
            raise Problem(f"SOURCES={word}: {error}. Give IPv4 ranges, such as your campus's; {MINE}") from None
        fault = ""
        if net.prefixlen < 8:
            fault = "lets in the whole internet, or much of it"
        elif net.version == 6:
            fault = "is IPv6, and the address will be an IPv4 one"
        elif any(net.overlaps(kept) for kept in EXAMPLES):
            fault = "is a range kept for examples, which nobody has"
        elif not net.is_global:
            fault = "is a private range, which a public address never sees"
        if fault:
            raise Problem(f"SOURCES={word} {fault}. Give the range you come from; {MINE}")
        found.append(str(net))
    if not found:
        raise Problem(f"OVERLAY=public opens JupyterLab to address ranges: name them in SOURCES; {MINE}")
    return found


def make_secret(name, values, kind="Opaque", notes=None, verb="create"):
    """A Secret, through kubectl's standard input: arguments and environment can be read by others."""
    meta = {"name": name, "namespace": NAMESPACE, "annotations": notes or {}}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": kind, "stringData": values}
    kubectl(verb, "-f", "-", send=json.dumps(secret).encode())


def certificate(address, cert, key):
    """See to the Secret with the certificate: the one given, or a month's, made here. Returns whether it changed.

    A Secret that was not made here is the person's own, and stays unless another certificate is given. Raises `Problem`
    for files that are no certificate with its key.
    """
    there = look("secret", f"{APP}-tls")
    old = base64.b64decode(there["data"]["tls.crt"]).decode() if there else ""
    private, notes, theirs = "", {}, cert or there and not made_for(there)
    if cert:
        pem, private = own(cert, key)
    elif theirs:
        pem = old
        say(f"keeping your own certificate (kubectl -n {NAMESPACE} delete secret {APP}-tls, and one is made here)")
    elif made_for(there) == address and not call(["openssl", "x509", "-noout", "-checkend", WEEK], old.encode())[0]:
        pem = old
    else:
        (pem, private), notes = self_signed(address), {"made-for": address}
    if pem != old:
        values = {"tls.crt": pem, "tls.key": private}
        make_secret(f"{APP}-tls", values, "kubernetes.io/tls", notes, "replace" if there else "create")
    first = re.search(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", pem, re.DOTALL)
    if not first:
        raise Problem(f"the Secret {APP}-tls holds no certificate: kubectl -n {NAMESPACE} delete secret {APP}-tls")
    shown = hashlib.sha256(ssl.PEM_cert_to_DER_cert(first[0])).hexdigest().upper()
    say(f"certificate, {end_of(pem)}; SHA-256 fingerprint: " + ":".join(re.findall("..", shown)))
    if not theirs:
        say("  It is for 30 days; in its last week make deploy with the same words renews it and restarts the pod.")
        say("  Nobody vouches for it, so the browser warns: compare the fingerprint there before you enter the token.")
    return pem != old


def end_of(pem):
    """Until when a certificate is valid, in words. Without openssl nobody here can say."""
    if not shutil.which("openssl"):
        return "valid until a date that only openssl could tell"
    ends = call(["openssl", "x509", "-noout", "-enddate"], pem.encode())[1].strip()
    return f"valid until {ends.partition('=')[2] or 'an unknown date'}"


def made_for(secret):
    return secret.get("metadata", {}).get("annotations", {}).get("made-for")


def own(cert, key):
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
        texts = []
        for path in (cert, key):
            with open(path, encoding="ascii") as file:
                texts.append(file.read())
        return texts
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise Problem(f"CERT={cert} KEY={key}: {error}. Give a PEM certificate and its key, without password") from None


def self_signed(address):
    """(certificate, key) in PEM for an IP address or a name."""
    kind = "IP" if re.fullmatch(r"[\d.]+", address) else "DNS"
    extensions = [f"subjectAltName = {kind}:{address}", "extendedKeyUsage = serverAuth", "basicConstraints = CA:FALSE"]
    lines = ["[req]", "prompt = no", "distinguished_name = dn", "x509_extensions = ext", "[dn]", f"CN = {address}"]
    with tempfile.TemporaryDirectory() as folder:  # only this user can read there
        config, key = os.path.join(folder, "openssl.cnf"), os.path.join(folder, "key.pem")
        # A file, because macOS's openssl has no option for it.
        with open(config, "w", encoding="utf-8") as file:
            file.write("\n".join([*lines, "[ext]", *extensions, ""]))
        words = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-config", config, "-keyout", key]
        pem = ask(["openssl", "req", *words], "or give a certificate of your own: CERT=FILE KEY=FILE")
        with open(key, encoding="ascii") as file:
            return pem, file.read()
