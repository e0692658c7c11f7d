"""Azure's LLM inference traces: CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens.

Lengths alone are read. Requests without output are passed over.

Sources: AzurePublicDataset, AzureLLMInferenceDataset2023.md (Patel et al., Splitwise, ISCA 2024) and
AzureLLMInferenceDataset2024.md (Stojkovic et al., DynamoLLM, HPCA 2025).
"""

from pathlib import Path

from specdial.simulator.importers.lengths import Lengths
from specdial.simulator.importers.lines import MOST_TOKENS, csv_lines

CONTEXT, NEW = "ContextTokens", "GeneratedTokens"


def read(path: Path) -> list[Lengths]:
    """Lengths of every request. Raises UserError naming the first bad line."""
    found = []
    for line in csv_lines(path, (CONTEXT, NEW)):
        context, new = (line.whole(name, high=MOST_TOKENS) for name in (CONTEXT, NEW))
        if context and new:
            found.append(Lengths(context, new))
    return found
