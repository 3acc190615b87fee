"""States, policies, outcomes: what the rest of the farm builds on."""

from farm.compiling.attempt import TAIL_BYTES, LogTail
from farm.jobs.state import POLICIES, AttemptEnd, FailureKind, Fault, Outcome


def test_every_failure_kind_has_a_policy_with_a_sentence_and_advice() -> None:
    assert set(POLICIES) == set(FailureKind)
    assert all(policy.sentence and policy.advice and 1 <= policy.attempts <= 3 for policy in POLICIES.values())


def test_only_the_farm_gets_a_third_attempt() -> None:
    thrice = {kind for kind, policy in POLICIES.items() if policy.attempts == 3}
    assert thrice == {kind for kind, policy in POLICIES.items() if policy.fault is Fault.FARM}


def test_gates_are_the_users_and_final() -> None:
    gates = [policy for policy in POLICIES.values() if policy.gate]
    assert len(gates) == 6 and all(policy.fault is Fault.USER and policy.attempts == 1 for policy in gates)


def test_an_outcome_names_its_end() -> None:
    assert Outcome.success({}).end is AttemptEnd.SUCCEEDED
    assert Outcome.failure(FailureKind.HANG, "no progress for 600 s").end is AttemptEnd.FAILED
    assert Outcome.cancelled().end is AttemptEnd.CANCELLED
    assert Outcome.released().end is AttemptEnd.RELEASED


def test_a_log_tail_is_news_once_and_never_longer_than_its_bound(tmp_path) -> None:
    tail, log = LogTail(), tmp_path / "log.txt"
    assert tail.news() is None
    tail.follow(log)
    assert tail.news() is None
    log.write_bytes(b"a" * TAIL_BYTES + b"the end")
    assert tail.news() == b"a" * (TAIL_BYTES - 7) + b"the end"
    assert tail.news() is None
