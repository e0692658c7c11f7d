"""specdial export: write a policy as a canonical policy file. Lowering to other engines' settings is left out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specdial.policies.errors import UserError
from specdial.policies.fields import parse
from specdial.policies.file import policy_digest, save_policy
from specdial.policies.schema import policy_from_mapping


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `export`. out: the file to write; target: whose format."""

    policy: dict[str, Any]
    out: str
    target: Literal["specdial"] = "specdial"


def run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Write the file and print one line. Returns its path and the digest of its decisions."""
    s = parse(Settings, settings)
    policy = policy_from_mapping(s.policy, "policy")
    out = Path(s.out)
    if out.is_dir():
        raise UserError(f"{out} is a directory", "give out=FILE.yaml")
    save_policy(policy, out)
    digest = policy_digest(policy)
    print(f"wrote {out}: policy {policy.name}, {'lossless' if policy.lossless else 'lossy'}, decisions {digest[:12]}")
    return {"out": str(out), "policy_digest": digest, "lossless": policy.lossless}
