"""A shared host serves at most 131,072 tokens of context per launch.

What: the context length of one launch, over all its sequences, stays within the fleet's limit.

Why: several teams share each host of this fleet; a single launch with the model's full context takes
the memory the next team's launch was promised.

Fix: ask for a smaller context, or for a host of one's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule, Way

if TYPE_CHECKING:
    from residency.rules import Facts

LIMIT_TOKENS = 131_072

rule = Rule(id="fleet-example/shared-context")


@rule.check
def check(facts: Facts) -> Finding:
    """Compare the context the engine will really make with the limit."""
    tokens = facts.budget.facts.get("context")
    if not isinstance(tokens, int):
        return rule.not_applicable("this engine's plan names no context")
    if tokens > LIMIT_TOKENS:
        return rule.veto(
            f"The launch makes a context of {tokens} tokens; a shared host of this fleet allows {LIMIT_TOKENS}.",
            knob="context.length",
            ways=(Way(knob="context.length", value=LIMIT_TOKENS),),
        )
    return rule.approve(f"{tokens} of {LIMIT_TOKENS} tokens")
