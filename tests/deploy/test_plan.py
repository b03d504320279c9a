"""federation.yaml: what is refused, by field and all of it together."""

from __future__ import annotations

import pytest

from deploy import provision_plan
from deploy.provision_plan import PlanError, read_plan


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: p.pop("labels"), "labels: Field required"),
        (lambda p: p.update(labels=["cat", "cat"]), "label 'cat' is there twice"),
        (lambda p: p.update(labels=["a,b"]), "labels.0 = 'a,b'"),
        (lambda p: p["server"].update(port=99999), "server.port = 99999: Input should be less than or equal to 65535"),
        (lambda p: p["server"].update(port=18000), "server.port and server.superlink_port are one port"),
        (lambda p: p["server"].update(host="fl example"), "server.host = 'fl example'"),
        (lambda p: p["server"].update(proxy="none", host="fl.example.org"), "whoever reaches the port could submit"),
        (lambda p: p["sites"][0].update(name="../x"), "sites.0.name = '../x'"),
        (lambda p: p["sites"][0].update(name="SOUTH"), "site name 'south' is there twice"),
        (lambda p: p["sites"][0].update(name="server"), "which names the server's kit"),
        (lambda p: p["sites"][0].update(data_root="data"), "sites.0.data_root = 'data'"),
        (lambda p: p["sites"][0].update(data_root='/x"; rm'), "sites.0.data_root"),
        (lambda p: p["sites"][0].update(limits={"allowed_hours": "night"}), "sites.0.limits.allowed_hours = 'night'"),
        (lambda p: p["sites"][0].update(colour="red"), "sites.0.colour = 'red': Extra inputs are not permitted"),
        (lambda p: p["sites"][0].update(tunnel_port=19094), "runtime_port and tunnel_port are one port"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_by_field(provisioned, plan, change, sentence):
    change(plan)
    code, said = provisioned()
    assert code == 1 and sentence in said, said
    assert not provisioned.out.exists()


def test_all_problems_of_a_plan_are_told_together(provisioned, plan):
    plan["server"]["port"], plan["sites"][0]["name"] = 0, ""
    _, said = provisioned()
    assert "2 problem(s)" in said and "server.port" in said and "sites.0.name" in said


def test_a_plan_that_is_no_yaml_is_one_sentence(tmp_path):
    (tmp_path / "bad.yaml").write_text("name: [unclosed")
    with pytest.raises(PlanError, match="is not YAML") as caught:
        read_plan(tmp_path / "bad.yaml")
    assert "\n" not in str(caught.value)
    with pytest.raises(PlanError, match="there is no file"):
        read_plan(tmp_path / "none.yaml")


def test_the_example_of_the_module_can_be_read(tmp_path):
    example = provision_plan.__doc__.split("\n\n")[1]
    (tmp_path / "federation.yaml").write_text("\n".join(line[4:] for line in example.splitlines()))
    plan = read_plan(tmp_path / "federation.yaml")
    assert plan.site("county").role == "evaluate" and plan.server.port == 8443
