"""Which ``Host`` and ``Origin`` a server without keys answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.limits import origins
from cosched.limits.origins import AccessConfig, Origins, names_of_machine

OWN = Origins(AccessConfig(), own_names=["gpu1", "gpu1.example.com"])
OPEN = Origins(
    AccessConfig(hosts=("LLM.example.com",), origins=("https://ui.example.com:443", "null")),
    own_names=["gpu1"],
)

labels = st.from_regex(r"[a-z][a-z0-9-]{0,9}", fullmatch=True)
ports = st.one_of(st.just(""), st.integers(1, 65535).map(lambda port: f":{port}"))


@given(labels, labels, st.sampled_from(["com", "dev", "io", "example", "xyz"]), ports)
def test_a_page_of_a_public_name_is_refused_as_host_and_as_origin(one, two, top, port):
    name = f"{one}.{two}.{top}{port}"
    assert name in OWN.why_foreign_host(name)
    for host in (name, "localhost:30000", "10.0.0.1"):
        assert "access.origins" in OWN.why_foreign_origin(f"http://{name}", host)


PASSING = """
    localhost LOCALHOST:30000 127.0.0.1:1 [::1]:30000 10.1.2.3 203.0.113.9:80 a.localhost
    gpu1 gpu1.example.com:30000 GPU1.example.com. replica-1:30000 node.local:1 llm.internal
    cosched.default.svc.cluster.local:30000 x.default.svc
""".split()


@pytest.mark.parametrize("host", ["", *PASSING])
def test_own_and_private_names_and_addresses_pass(host):
    """No page on the internet can have such a name, so none was pointed here."""
    assert OWN.why_foreign_host(host) is None
    if host:  # a page of the server itself
        assert OWN.why_foreign_origin(f"http://{host}", host) is None


@pytest.mark.parametrize("host", ["gpu1.evil.com", "localhost.evil.com", "127.0.0.1.nip.io", "a.b"])
def test_names_that_only_begin_like_own_ones_are_foreign(host):
    assert OWN.why_foreign_host(host) is not None


@pytest.mark.parametrize("origin", ["null", "http://203.0.113.9", "http://wiki", "https://x.local"])
def test_another_server_in_the_network_is_no_page_of_this_one(origin):
    assert OWN.why_foreign_origin(origin, "10.0.0.1:30000") is not None


def test_the_operator_allows_hosts_and_origins():
    assert OPEN.why_foreign_host("llm.example.com:8443") is None
    for origin in (
        "https://ui.example.com",
        "null",
        "https://llm.example.com",
        "http://[::1]:3000",
    ):
        assert OPEN.why_foreign_origin(origin, "10.0.0.1") is None
    for origin in ("http://ui.example.com", "https://ui.example.com:444", "https://example.com"):
        assert OPEN.why_foreign_origin(origin, "10.0.0.1") is not None
    anyone = Origins(AccessConfig(hosts=("*",), origins=("*",)), own_names=[])
    assert anyone.why_foreign_host("evil.com") is None
    assert anyone.why_foreign_origin("https://evil.com", "evil.com") is None


NO_NAMES = [{"hosts": ["https://a.com"]}, {"hosts": ["a.com:80"]}, {"origins": ["a.com"]},
            {"origins": ["https://a.com/x"]}]  # fmt: skip


@pytest.mark.parametrize("fields", NO_NAMES)
def test_what_is_no_host_or_origin_is_a_config_error(fields):
    [[name, [value]]] = fields.items()
    with pytest.raises(ValueError, match=f"{name}: {value!r} is no"):
        AccessConfig(**fields)


def test_names_of_a_pod_are_found_without_dns(tmp_path, monkeypatch):
    hosts, resolver = tmp_path / "hosts", tmp_path / "resolv.conf"
    hosts.write_text("# x\n127.0.0.1 localhost\n10.1.2.3 pod-0.app.ns.svc.cluster.local pod-0\n")
    resolver.write_text("search ns.svc.cluster.local corp.example.com\n")
    monkeypatch.setattr(origins, "_HOSTS", hosts)
    monkeypatch.setattr(origins, "_RESOLVER", resolver)
    monkeypatch.setattr(origins.socket, "gethostname", lambda: "pod-0")
    names = names_of_machine()
    assert {"pod-0", "pod-0.app", "pod-0.app.ns", "pod-0.corp.example.com"} <= names
    assert "localhost" not in names and "app" not in names
