"""specdial's own policy file: nothing is lowered, and a file that is loaded and exported again keeps its bytes."""

from specdial.policies.exporters.options import Options
from specdial.policies.exporters.rows import Lowered, Row
from specdial.policies.file import dump_policy
from specdial.policies.schema import Policy


def lower(policy: Policy, options: Options, stem: str) -> Lowered:
    """The policy in canonical form."""
    rows = (Row("all", "all", "kept", "the policy itself"),)
    return Lowered({".yaml": dump_policy(policy)}, rows, "specdial run policy=FILE prompt=@PROMPT", policy)
