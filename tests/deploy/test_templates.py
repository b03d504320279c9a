"""Units, compose files and the image, rendered and looked at without a container engine."""

from __future__ import annotations

import configparser
import getpass
import re
import shutil
import subprocess
from pathlib import Path

import jinja2
import pytest
import yaml

from deploy.provision_plan import Federation
from deploy.services import LOG_DIR

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PLAN = {
    "name": "Chest.2026",
    "labels": ["cat", "dog"],
    "server": {"host": "fl.example.org", "port": 8443, "superlink_port": 8000},
    "sites": [{"name": "St-Mary", "data_root": "/data/fl"}],
}
TEMPLATES = {
    kind: sorted(str(p.relative_to(DEPLOY)) for p in DEPLOY.glob(f"{kind}/*/*.j2")) for kind in ("systemd", "compose")
}


def rendered(name, *, trim_blocks=True, server=None, machine=None):
    """A template as `deploy.provision_kit` renders it; ``server`` and ``machine`` change the plan."""
    plan = Federation.model_validate({**PLAN, "server": {**PLAN["server"], **(server or {}), **(machine or {})}})
    site = plan.sites[0].model_copy(update=machine or {})
    facts = {"plan": plan, "site": site, "machine": site if "/site/" in name else plan.server, "superlink_port": 8000}
    loader = jinja2.FileSystemLoader(DEPLOY)
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=trim_blocks, lstrip_blocks=trim_blocks
    )
    return environment.get_template(name).render(facts)


@pytest.mark.parametrize("name", [*TEMPLATES["systemd"], *TEMPLATES["compose"]])
def test_a_template_names_at_its_top_what_it_takes(name):
    text = (DEPLOY / name).read_text()
    head = text[: text.index("#}")]
    used = re.findall(r"{{\s*([\w.]+)", text) + re.findall(r"{%\s*if ([\w.]+)", text)
    assert text.startswith("{#") and used
    assert all(part in head for variable in used for part in variable.split("."))


# -- systemd ----------------------------------------------------------------------------------------------------------

SERVICES = [name for name in TEMPLATES["systemd"] if ".service." in name]


def unit(name):
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read_string(rendered(name))
    return parser


@pytest.mark.parametrize("name", SERVICES)
def test_a_unit_always_restarts_and_may_write_to_its_state_only(name):
    service = unit(name)["Service"]
    if service["Type"] == "oneshot":
        assert "Restart" not in service and "Install" not in unit(name), "a timer starts it"
    else:
        assert service["Restart"] == "always" and int(service["RestartSec"]) <= 10
    assert service["User"] == "consilium" and service["NoNewPrivileges"] == "true"
    assert service["ProtectSystem"] == "strict"
    assert service["ReadWritePaths"] == ("/var/lib/consilium" if "/site/" in name else "/var/lib/consilium-server")
    assert service["ExecStart"].startswith("/opt/consilium/.venv/bin/python -m deploy.")
    assert "insecure" not in rendered(name)


def test_a_site_reads_its_data_and_keeps_its_gpu():
    service = unit("systemd/site/consilium-site.service.j2")["Service"]
    assert "/data/fl" in service["ReadOnlyPaths"].split() and "PrivateDevices" not in service
    assert "PrivateDevices" not in unit("systemd/server/consilium-server.service.j2")["Service"]


def test_a_site_is_cleaned_every_week():
    timer, service = (unit(f"systemd/site/consilium-clean.{kind}.j2") for kind in ("timer", "service"))
    assert timer["Timer"]["OnCalendar"].startswith("Sun ") and timer["Timer"]["Persistent"] == "true"
    assert timer["Install"]["WantedBy"] == "timers.target" and "Unit" not in timer["Timer"], "its own name's service"
    assert service["Service"]["ExecStart"].endswith("-m deploy.clean /etc/consilium/kit")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", TEMPLATES["systemd"])
def test_systemd_takes_the_unit(name, tmp_path):
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    places = dict.fromkeys(("app_dir", "kit_dir", "state_dir"), str(tmp_path)) | {"user": getpass.getuser()}
    for other in TEMPLATES["systemd"]:
        (tmp_path / Path(other).stem).write_text(rendered(other, machine=places))
    file = str(tmp_path / Path(name).stem)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True, timeout=60)
    ours = [line for line in done.stderr.splitlines() if "consilium" in line]
    assert ours == [] and done.returncode == 0, done.stderr


# -- compose ----------------------------------------------------------------------------------------------------------

SERVICE_KEYS = {
    *("image", "command", "user", "restart", "read_only", "init", "cap_drop", "security_opt", "shm_size"),
    *(
        "tmpfs",
        "volumes",
        "healthcheck",
        "logging",
        "ports",
        "network_mode",
        "depends_on",
        "sysctls",
        "pid",
        "environment",
    ),
}
"""Of the compose specification's service attributes those that the files use: another one is a slip of the pen."""


SITE, SERVER = "compose/site/compose.yaml.j2", "compose/server/compose.yaml.j2"


def services(name, **changes):
    content = yaml.safe_load(rendered(name, **changes))
    assert set(content) == {"name", "services", "volumes"}
    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]*", content["name"])
    named = {v["source"] for s in content["services"].values() for v in s["volumes"] if v["type"] == "volume"}
    assert named == set(content["volumes"])
    return content["services"]


@pytest.mark.parametrize("name", [SITE, SERVER])
@pytest.mark.parametrize("trim_blocks", [True, False])
def test_every_service_is_fenced_in(name, trim_blocks):
    for service in services(name, trim_blocks=trim_blocks).values():
        assert set(service) <= SERVICE_KEYS
        assert service["restart"] == "always" and service["read_only"] is True
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
        assert service["healthcheck"]["test"][0] == "CMD" and service["logging"]["options"]["max-size"]
        writable = [v["target"] for v in service["volumes"] if not v.get("read_only")]
        assert all(target.startswith(("/var/lib/consilium", "/var/log/consilium")) for target in writable)
        assert service["user"] == "${CONSILIUM_UID:-10001}:${CONSILIUM_UID:-10001}", (
            "root without capabilities reads no key"
        )


def test_a_site_mounts_its_data_read_only_and_publishes_no_port():
    (site,) = services(SITE).values()
    data = next(volume for volume in site["volumes"] if volume["source"] == "/data/fl")
    assert data == {"type": "bind", "source": "/data/fl", "target": "/data/fl", "read_only": True}
    assert "ports" not in site and "network_mode" not in site


@pytest.mark.parametrize(("base", "service"), [(SITE, "supernode"), (SERVER, "superlink")])
@pytest.mark.parametrize("count", [1, 4])
def test_gpus_are_reserved_by_a_file_of_its_own(base, service, count):
    file = str(Path(base).with_name("gpu.yaml.j2"))
    own, whole = (yaml.safe_load(rendered(name, machine={"gpus": count})) for name in (file, base))
    assert own["name"] == whole["name"] and set(own["services"]) == {service} <= set(whole["services"])
    devices = own["services"][service]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": count, "capabilities": ["gpu"]}]


def test_hospitals_reach_the_proxy_and_not_the_superlink():
    there = services(SERVER)
    assert there["superlink"]["ports"] == ["8443:8443"]  # the proxy's, which shares the network
    assert there["proxy"]["network_mode"] == "service:superlink" and "ports" not in there["proxy"]
    assert set(services(SERVER, server={"proxy": "none", "host": "127.0.0.1"})) == {"superlink", "supervise"}
    assert "sysctls" not in there["superlink"]
    low = services(SERVER, server={"port": 443})["superlink"]
    assert low["sysctls"] == {"net.ipv4.ip_unprivileged_port_start": 0}, "the proxy is not root"


def test_the_supervisor_sees_the_processes_it_may_end_and_the_state_they_share():
    there = services(SERVER)
    supervise, superlink = there["supervise"], there["superlink"]
    assert supervise["command"] == ["python", "-m", "deploy.supervise", "/etc/consilium/server"]
    assert supervise["pid"] == supervise["network_mode"] == "service:superlink"
    assert supervise["user"] == superlink["user"], "a process of another account could not be ended"
    assert supervise["volumes"] == [v for v in superlink["volumes"] if v["type"] == "bind"]


def test_a_site_keeps_the_hospitals_time():
    (site,) = services(SITE).values()
    mounted = {"type": "bind", "source": "/etc/localtime", "target": "/etc/localtime", "read_only": True}
    assert mounted in site["volumes"]


def test_the_log_volume_is_what_deploy_start_writes_to():
    for service in (services(SITE)["supernode"], services(SERVER)["superlink"]):
        (volume,) = (v for v in service["volumes"] if v["type"] == "volume")
        assert service["environment"] == {LOG_DIR: volume["target"]}


def test_health_checks_are_python_that_compiles():
    for name in (SITE, SERVER):
        for service in services(name).values():
            test = service["healthcheck"]["test"]
            if test[1] == "python":
                compile(test[3], "healthcheck", "exec")


# -- the image --------------------------------------------------------------------------------------------------------


def test_the_image_installs_the_tested_versions_and_runs_as_nobody():
    text = (DEPLOY / "Dockerfile").read_text()
    steps = re.findall(r"^([A-Z]+) (.*)$", text, re.M)
    copied = " ".join(rest for step, rest in steps if step == "COPY")
    assert "constraints.txt" in copied and "deploy/install.py" in text
    assert [rest for step, rest in steps if step == "USER"] == ["10001:10001"]
    assert "pip install ." not in text
    assert 'deploy/install.py "" dicom dp\n' in text, "differential privacy is a switch of every averaging method"


def test_nothing_but_the_app_goes_into_the_image():
    lines = [line for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] not in "#"]
    assert lines[0] == "**"
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert all((DEPLOY.parent / name).exists() for name in kept)
    rooms = {path.parent.name for path in DEPLOY.parent.glob("*/__init__.py")} - {"bench", "tests"}
    assert rooms <= kept
