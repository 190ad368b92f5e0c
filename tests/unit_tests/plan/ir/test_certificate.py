"""What a plan's certificate covers, and where it goes."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import replace

import pytest

from megatron_pp.plan.builder import build_plan, forget_plans, lowered_plan
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.io.serialize import format_plan, parse_plan
from megatron_pp.plan.ir.certificate import PROOFS
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.runtime.plan_choice import certify_once
from megatron_pp.tracing.files import plan_line
from testkit.inputs.plan_text import edited


def test_a_plan_that_is_built_has_a_certificate():
    lowered = lowered_plan(PlanSpec("1f1b", 2, 1, 4))
    verdict = verify(lowered)
    assert lowered.certificate is None, "verify changes nothing"
    assert verdict.certificate.rules == ("complete", "lifetime", "rendezvous", "order")
    assert verdict.certificate.device == ()
    plan = build_plan(lowered.spec)
    assert plan.certificate == verdict.certificate
    broken = edited(plan, 0, "drop FREE_F0.1")
    with pytest.raises(ValueError, match="rank 0"):
        verify(broken)
    assert replace(plan, programs=broken.programs).certificate is broken.certificate is None


def test_rules_are_those_that_were_checked():
    rules = ("one_queue", "device_sync", "static_buffers")
    plan = lowered_plan(PlanSpec("interleaved_1f1b", 2, 2, 4, device=rules))
    certificate = verify(plan, deallocate=False, device=rules[::-1]).certificate
    assert certificate.device == rules
    assert certificate.rules == ("complete", "kept_outputs", "rendezvous", *rules, "order")
    assert set(certificate.rules) < set(PROOFS)


def test_a_repeated_plan_states_its_repetition():
    forget_plans()
    plans = [build_plan(PlanSpec("1f1b", 2, 1, m)) for m in (12, 40)]
    assert ["repetition" in plan.certificate.rules for plan in plans] == [True, True]
    assert plans[0].certificate.digest != plans[1].certificate.digest
    whole = lowered_plan(PlanSpec("1f1b", 2, 1, 40))
    assert verify(whole).certificate.digest == plans[1].certificate.digest


def test_the_digest_is_of_the_programs():
    plan = build_plan(PlanSpec("zb_v", 2, 2, 4))
    assert plan.certificate.digest == "sha256:" + hashlib.sha256(f"{plan}\n".encode()).hexdigest()
    other = build_plan(PlanSpec("zb_v", 2, 2, 4, release_after=2))
    assert other.certificate.digest != plan.certificate.digest


def test_the_certificate_is_written_to_files_and_traces_and_not_read_back():
    plan = build_plan(PlanSpec("1f1b", 2, 1, 3, device=("one_queue",)))
    content = json.loads(format_plan(plan, "json", certified=True))
    assert content["certificate"] == plan.certificate.to_dict()
    assert content["certificate"]["spec"]["schedule"] == "1f1b"
    assert list(content["certificate"]) == ["rules", "device", "spec", "digest"]
    assert parse_plan(json.dumps(content)).certificate is None
    assert json.loads(plan_line(plan, 0, 8.0))["certificate"] == content["certificate"]


def test_the_log_has_the_prediction_of_a_plan_that_was_searched(caplog):
    """Once, beside the certificate; a named plan has no costs to predict from."""
    searched = PlanSpec("auto", 2, 1, 4, measured=Measured(1.0, 1.0, 1.0, transfer=0.1))
    with caplog.at_level(logging.INFO, "megatron_pp"):
        for spec in (searched, PlanSpec("zb_h1", 2, 1, 5), searched):
            certify_once(build_plan(spec))
    predictions = [line for line in caplog.messages if "predicted step" in line]
    assert len(caplog.messages) == 3
    assert len(predictions) == 1
    assert "predicted step 13.1, bubble 8.4%, within 0.0% of the bound, 13.1 (work of rank 1)" in predictions[0]
