"""A version that is published again while the pool verifies an engine: the earlier verification must not count.

Run from a clone's root: PYTHONPATH=. python tests/reproducers/republished_while_verifying.py
"""

import sys

from dppo_megatron.rollout.fleet.health import EngineHealth, HealthRules, State

serving = EngineHealth(HealthRules(3, 1.0)).policy_published(0, 7, "a").answered(1, "a", 7)
h = serving
for t in (2, 3, 4):
    h = h.check_failed(t, "no answer")  # dead: its verification ends
h = h.answered(5, "a", 7).verification_started(6)  # answers again; the pool checks it under policy 7
print("before:", h.state)
h = h.policy_published(7, 7, None)  # 7 is sent again for another engine; this one fails and is excluded
print("after publishing 7 again without it:", h.state, "confirmed", h.confirmed)
h = h.verification_passed(8, "a", 7)  # scores of before
print("after the earlier verification:", h.state)
print("for comparison, a serving engine that is excluded:", serving.policy_published(2, 7, None).state)
sys.exit(h.state is State.SERVING)
