"""The summary kind: an excerpt in full, the whole request after it, both inside the chat template."""

import pytest

from specdial.engine.tokenizer import Tokenizer
from specdial.engine.workloads import WorkloadSpec, build
from specdial.engine.workloads.sources import BOOK_PATH
from specdial.engine.workloads.summary import REQUEST


def test_excerpt_then_request(byte_tokenizer):
    text = BOOK_PATH.read_text(encoding="utf-8")
    for d in build(WorkloadSpec("summary", 2000, documents=5), byte_tokenizer):
        prompt = byte_tokenizer.decode(d.prompt_ids)
        excerpt = prompt.removesuffix(REQUEST)
        assert prompt == excerpt + REQUEST
        [[_, start, end]] = d.meta["source"]
        assert text[start:end].startswith(excerpt)
        assert d.prompt_ids[:2] == [256, 257]
        assert d.prompt_ids[-1] == 258


def test_template_of_a_real_tokenizer(tiny_model):
    tokenizer: Tokenizer = tiny_model("qwen2").tokenizer
    for d in build(WorkloadSpec("summary", 1500, documents=3), tokenizer):
        assert len(d.prompt_ids) == 1500
        prompt = tokenizer.decode(d.prompt_ids, skip_special=False)
        assert prompt.startswith("<|im_start|>user\n")
        assert prompt.endswith(REQUEST + "<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.model
def test_smollm2_prompt_is_its_chat_of_the_excerpt(smollm2):
    tokenizer = smollm2.tokenizer
    [d] = build(WorkloadSpec("summary", 700, documents=1), tokenizer)
    prompt = tokenizer.decode(d.prompt_ids, skip_special=False)
    excerpt = prompt.split("<|im_start|>user\n")[1].split(REQUEST)[0]
    whole = tokenizer.chat([{"role": "user", "content": excerpt + REQUEST}])
    assert tokenizer.decode(whole, skip_special=False) == prompt
