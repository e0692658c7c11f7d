"""Columns of the trace's tables and of the cost table: the one definition that writer, reader and checks share.

A position is the committed length n at which a round starts: tokens 0..n-1 are committed, keys 0..n-2 are cached.
"""

import pyarrow as pa

TRACE_SCHEMA = "specdial/trace/1"
COSTS_SCHEMA = "specdial/costs/1"
MODEL_MARK = b"specdial.model"  # of a trace's parts: the digest of the model that was recorded
PLAIN, FULL, PARTIAL = "plain", "full", "partial"  # values of rounds.mode

ROUNDS = pa.schema(
    [
        pa.field("doc", pa.int32(), nullable=False),
        pa.field("round", pa.int32(), nullable=False),
        pa.field("context_tokens", pa.int32(), nullable=False),  # committed length when the round starts
        pa.field("batch", pa.int32(), nullable=False),
        pa.field("k", pa.int32(), nullable=False),
        pa.field("accepted", pa.int32(), nullable=False),
        pa.field("emitted", pa.int32(), nullable=False),
        pa.field("mode", pa.string(), nullable=False),
        pa.field("rounds_since_full", pa.int32(), nullable=False),  # partial rounds since a full one, itself included
        pa.field("draft_us", pa.float64(), nullable=False),
        pa.field("verify_us", pa.float64(), nullable=False),
        pa.field("select_us", pa.float64(), nullable=False),
        pa.field("host_us", pa.float64(), nullable=False),
        pa.field("recomputed", pa.int32(), nullable=True),  # rows that a full round put in front of its own
        # A full round with keys in host memory: how long its layers moved, and how long it waited for them.
        pa.field("transfer_us", pa.float64(), nullable=True),
        pa.field("exposed_us", pa.float64(), nullable=True),
    ]
)

# One row per drafted token. Dense recording: round is -1 and every position of the output has a chain of k_max drafts
# per arm. `match`: greedy, the draft equals the target's token and all before it in the chain did too.
# `reached`: every earlier draft of the chain matched, so verification judged this one.
DRAFTS = pa.schema(
    [
        pa.field("doc", pa.int32(), nullable=False),
        pa.field("round", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("arm", pa.int16(), nullable=False),
        pa.field("depth", pa.int16(), nullable=False),  # 1 = first draft
        pa.field("entropy_nats", pa.float32(), nullable=False),
        pa.field("top1_prob", pa.float32(), nullable=False),
        pa.field("margin", pa.float32(), nullable=False),
        pa.field("match", pa.bool_(), nullable=False),
        pa.field("accept_prob", pa.float32(), nullable=True),  # sampled decoding: min(1, p/q); null when greedy
        pa.field("reached", pa.bool_(), nullable=False),
    ]
)

# The committed tokens of the output: token_id stands at `position` in the sequence.
OUTPUTS = pa.schema(
    [
        pa.field("doc", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("token_id", pa.int32(), nullable=False),
    ]
)

# What partial verification does to the output, judged by a full verification of the same text; where a record asked.
# arm 0 is a lossy policy itself: one row per committed token that it wrote. Arms from 1 on are meta.probe_arms: what
# their partial verifications would have said at sampled positions of the text, had each round committed the text.
# arr: the share of the target's attention that the selection held, null where it was not measured. kl_nats: divergence
# of the logits that decided from the full ones, KL(full || those), null where they were not kept. top1_match: what they
# decided is the likeliest under full verification too. rounds_since_full: as in rounds, of the round that decided.
# draft_match, full_match: the draft that the policy's drafter had for this place is what this verification decided, and
# what the full one did; null where there was none, or the drafts before it had left the text.
# hidden_cosine: between the hidden states that entered the last layer in the deciding pass and in the full one, null
# where the former were not kept.
PROBES = pa.schema(
    [
        pa.field("doc", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("arm", pa.int16(), nullable=False),
        pa.field("arr", pa.float32(), nullable=True),
        pa.field("kl_nats", pa.float32(), nullable=True),
        pa.field("top1_match", pa.bool_(), nullable=False),
        pa.field("rounds_since_full", pa.int32(), nullable=False),
        pa.field("draft_match", pa.bool_(), nullable=True),
        pa.field("full_match", pa.bool_(), nullable=True),
        pa.field("hidden_cosine", pa.float32(), nullable=True),
    ]
)

# Medians of measured operations, in microseconds. op: plain (one decode step), draft (one draft token at `budget`),
# verify (a full verification of k drafts), select (choosing and gathering `budget` keys, once a round),
# host (the rest of a round). k and budget are 0 where they have no meaning. drafter: whose rounds were timed, by the
# label of policies.drafting (sparse_self, sparse_self/fp8, quest, lookup, model/NAME), since a verification that keeps
# attention rows costs more than one that keeps none; "none" for plain steps, which are the same for all.
# source: of the rounds' partial verification (trace.sources), "" where policies are lossless. With one there are also
# select_partial (choosing the `budget` keys that a verification reads, once a round), verify_partial (a verification of
# k drafts over them, the choice apart), host_partial (the rest of such a round) and refresh (what a full round that
# recomputes `k` rows takes beyond one that recomputes none). Where keys live in host memory a full round has transfer
# too: how long it waited for layers to move, which its verify then leaves out.
COSTS = pa.schema(
    [
        pa.field("op", pa.string(), nullable=False),
        pa.field("drafter", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("context_tokens", pa.int32(), nullable=False),
        pa.field("batch", pa.int32(), nullable=False),
        pa.field("k", pa.int32(), nullable=False),
        pa.field("budget", pa.int32(), nullable=False),
        pa.field("median_us", pa.float64(), nullable=False),
        pa.field("p10_us", pa.float64(), nullable=False),
        pa.field("p90_us", pa.float64(), nullable=False),
        pa.field("n", pa.int32(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),  # bytes the operation must move: weights + keys and values
    ]
)
PARTIAL_OPS = ("select_partial", "verify_partial", "host_partial", "refresh")
# Rounds whose controller looks at signals, none or one of them late: on a GPU they wait for the host as others do not,
# and longer for rate, which computes more.
WATCHED = ("lag0", "lag1", "rate_lag0")
WATCHED_OPS = tuple(f"{op}_{how}" for how in WATCHED for op in ("draft", "host"))
OPS = ("plain", "draft", "verify", "select", "host", "transfer", *WATCHED_OPS, *PARTIAL_OPS)
# Columns that tables written before they existed lack, or that a writer has nothing for, and the value that then holds
# for every row.
LATER_COLUMNS: dict[str, str | None] = {
    "drafter": "sparse_self",
    "source": "",
    "draft_match": None,
    "full_match": None,
    "hidden_cosine": None,
    "recomputed": None,
    "transfer_us": None,
    "exposed_us": None,
}

PARTS = ("rounds", "drafts", "outputs")  # that every document of a trace has if one has it
TABLES: dict[str, pa.Schema] = {
    "drafts": DRAFTS,
    "outputs": OUTPUTS,
    "probes": PROBES,
    "rounds": ROUNDS,
}  # rounds last: it marks a finished document
NON_NEGATIVE = (
    "draft_us", "verify_us", "select_us", "host_us", "transfer_us", "exposed_us", "median_us", "p10_us", "p90_us",
    "entropy_nats",
)  # fmt: skip
KEYS: dict[str, tuple[str, ...]] = {
    "rounds": ("doc", "round"),
    "drafts": ("doc", "round", "position", "arm", "depth"),
    "outputs": ("doc", "position"),
    "probes": ("doc", "position", "arm"),
    "costs": ("op", "drafter", "source", "context_tokens", "batch", "k", "budget"),
}
